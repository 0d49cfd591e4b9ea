"""Define `Checkpoints`: save a run on one topology, continue it on another."""

from __future__ import annotations

import atexit
import contextlib
import signal
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, final

from gpudist_core.checkpoints import saving
from gpudist_core.checkpoints.files import HasState
from gpudist_core.checkpoints.fit import CallbackMethods, FollowedFit
from gpudist_core.checkpoints.folder import IN_USE, Folder
from gpudist_core.checkpoints.hosts import Hosts, Notice
from gpudist_core.checkpoints.run import Opened, RunParts, open_checked
from gpudist_core.errors import (
    CheckpointRefused,
    Damaged,
    FolderInUse,
    Foreign,
    Preempted,
    SaveFailed,
    UsageError,
    is_finite,
    is_whole,
    refusal,
)

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from gpudist_core.parameter_servers import CoordinatedTraining
    from gpudist_core.steps import TrainStep


@dataclass(frozen=True)
class Restored:
    """Describe the checkpoint that a run continues from.

    Attributes:
        step: The step after which it was saved.
        path: The checkpoint's folder.
        refused: Newer checkpoints that could not be used, with the reason, by name.
        info: The topology, the versions, the time and the reason of the save.
    """

    step: int
    path: Path
    refused: Mapping[str, str]
    info: Mapping[str, Any]


@final
class Checkpoints(CallbackMethods):
    """Save a run so that it continues after an interruption as if there had been none, on the same or another topology.

    A checkpoint holds the model's variables, the optimizer's slots and counters, moving averages, the loss scale, random
    states, the position in the pipeline and the sums that a TrainStep has accumulated. Mirrored values are stored once. Sums
    that are spread over replicas are stored as totals. Sharded tables are stored as slices by the hosts that hold them. A
    checkpoint is written in the background. It gets its name only when all hosts have written all of it. Every block has a
    checksum.

    In a custom loop, call `restore` first and `after_step` after each step. In Keras's `fit`, pass the object as a callback: it
    does both. It then saves at the end of each epoch. With `every` it saves after so many batches, which needs a Pipeline,
    because only the position of a Pipeline can be saved. With other data, the `fit` of a `gd.distributed` model reads them
    again to the same place: one seeded shuffle at once; generators, sequences and epochs with `steps_per_epoch` batch by batch.
    If that is not possible, it warns.

    Of other callbacks it saves the state of Keras's own (EarlyStopping, ReduceLROnPlateau, ModelCheckpoint, SwapEMAWeights) and
    of those with `state()` and `restore(state)`, as it is on the first host. It warns of other callbacks with a state. A
    `History` starts where `fit` continues. If a callback has stopped `fit`, the training does not continue.

    If a process on any host gets SIGTERM, all hosts save after the same step and raise `Preempted`. That ends the process with
    exit code 75. A second signal, more than five seconds after the first, ends the process at once.

    Example:
        >>> import keras, tempfile, gpudist_core as gd
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> folder = tempfile.mkdtemp()
        >>> with gd.Checkpoints(folder, keep=2, every=10, model=model) as checkpoints:
        ...     restored = checkpoints.restore()
        ...     for step in range(1 if restored is None else restored.step + 1, 31):
        ...         saved = checkpoints.after_step(step)
        >>> [path.name for path in checkpoints.saved()]
        ['step-00000030', 'step-00000020']

    Args:
        folder: The folder. Several hosts need a shared one. One run at a time writes into it.
        keep: Number of checkpoints to keep.
        every: Save after every this many steps. Default: `save` decides; in `fit`, the end of each epoch.
        model: A Keras model, or an object with `variables`.
        optimizer: A Keras optimizer. Not needed with `step`.
        pipeline: A Pipeline, or an object with `state()` and `restore(state)`.
        step: A TrainStep.
        extra: More to save, by name: variables, metrics, random generators, lists of them, objects with `state()` and
            `restore(state)`.
        strategy: The strategy of the variables. Default: the strategy of the model.
        signals: The signals that stop the run, for example `SIGTERM` or `SIGUSR1`.
        synchronous: Whether the training waits until each checkpoint is written.
        timeout: How long to wait for another host, in seconds.

    Raises:
        UsageError: If an argument is not valid.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        every: int | None = None,
        model: keras.Model | tf.Module | None = None,
        optimizer: keras.optimizers.Optimizer | None = None,
        pipeline: HasState | None = None,
        step: TrainStep | CoordinatedTraining | None = None,
        extra: Mapping[str, Any] | None = None,
        strategy: tf.distribute.Strategy | None = None,
        signals: Sequence[str] = ("SIGTERM",),
        synchronous: bool = False,
        timeout: float = 600.0,
    ) -> None:
        parts = {"model": model, "optimizer": optimizer, "pipeline": pipeline, "step": step}
        check_arguments(folder, keep, every, signals, timeout, extra, **parts)
        self._folder = Folder(Path(folder).absolute())
        self._keep, self._every, self._signals = keep, every, tuple(signals)
        self._synchronous, self._timeout = synchronous, timeout
        self._run = RunParts(model, optimizer, pipeline, step, dict(extra or {}), strategy)
        self._hosts: Hosts | None = None
        self._notice: Notice | None = None
        self._background = saving.Background()
        self._failure: BaseException | None = None
        self._has_looked = False
        self._is_writer = False
        self._calls = 0
        self._last = 0
        self._writing: int | None = None
        self._saved: int | None = None
        self._fit: FollowedFit | None = None

    def saved(self) -> list[Path]:
        """Return the paths of the checkpoints in the folder, the newest first."""
        return [self._folder.of(step) for step in self._folder.steps()]

    def restore(self, *, required: bool = False) -> Restored | None:
        """Continue from the newest checkpoint that is complete and belongs to this model.

        All hosts must call it, after the model is built. If a checkpoint cannot be used, a warning names it and the one before
        it is tried.

        Args:
            required: Whether to raise if the folder has no checkpoint.

        Returns:
            The restored checkpoint, or None if the folder has no checkpoint.

        Raises:
            CheckpointRefused: If there are checkpoints but none can be used, or there is none and `required` is True.
        """
        return self._restore(required, 3)

    def _restore(self, required: bool, stacklevel: int) -> Restored | None:
        hosts = self._open()
        self._settle()
        self._other_writer()
        self._run.build()
        items = self._run.items()
        steps = hosts.training.all_gather("restoring", self._folder.steps())[0]
        refused: dict[str, str] = {}
        self._has_looked = True
        for step in steps:
            opened, reason = self._try(step, items)
            if opened is not None:
                return self._take(opened, items, refused, stacklevel + 1)
            refused[self._folder.of(step).name] = reason
        if refused:
            raise CheckpointRefused(refusal(self._folder.path, refused))
        if required:
            raise CheckpointRefused(
                f"There must be a checkpoint to continue from. Received: folder={str(self._folder.path)!r}, no checkpoint in "
                "it. Pass the folder of the run, or leave required out to start from scratch."
            )
        return None

    def save(self, step: int, *, synchronous: bool | None = None) -> None:
        """Save after a step. All hosts must call it after the same step.

        Args:
            step: The step's number, which orders the checkpoints.
            synchronous: Whether to wait until it is written. Default: the constructor's `synchronous`.

        Raises:
            SaveFailed: If it waits and some host could not write.
        """
        self._save(_checked(step), "asked for", self._synchronous if synchronous is None else synchronous)

    def after_step(self, step: int) -> bool:
        """Save if a save is due, and stop if some host got a signal. All hosts must call it after each step.

        Args:
            step: The step's number, larger than the last one's.

        Returns:
            Whether a checkpoint was saved, or is being written.

        Raises:
            Preempted: After saving, if some host got a signal.
        """
        step = _checked(step)
        if self._is_time_to_leave():
            self._leave(step)
        return self._save_if_due(step)

    def _save_if_due(self, step: int) -> bool:
        if self._background.is_over:
            self._settle()
        is_time = self._every is not None and step // self._every > self._last // self._every
        self._last = step
        if is_time:
            self._save(step, "every", self._synchronous)
        return is_time

    def _is_time_to_leave(self) -> bool:
        """Return whether all hosts have agreed to stop here. Each call counts as the end of one step."""
        self._claim()
        assert self._notice is not None
        self._calls += 1
        return self._notice.is_time(self._calls)

    def _leave(self, step: int, save: bool = True) -> NoReturn:
        """Save if the present state can be continued, release everything, and raise."""
        try:
            if save:
                self._save(step, "preempted", True)
            else:
                self._settle()
        finally:
            self.close()
        path = self._folder.of(step) if save else next(iter(self.saved()), None)
        raise Preempted(
            f"This run was told to stop after step {step}. "
            + (f"Start it again to continue from {path}." if path else "Nothing was saved yet: it will start from scratch."),
            step=step,
            path=path,
        )

    def wait(self) -> None:
        """Wait until the current save is written.

        Raises:
            SaveFailed: If the last checkpoint could not be written.
        """
        self._settle(warn=False)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Wait for the current save, and release the signals and the folder.

        Raises:
            SaveFailed: If the last checkpoint could not be written.
        """
        hosts, self._hosts = self._hosts, None
        notice, self._notice = self._notice, None
        self._is_writer = False
        atexit.unregister(self.close)
        if _writers.get(self._folder.path.resolve()) is self:
            del _writers[self._folder.path.resolve()]
        try:
            self.wait()
        finally:
            if hosts is not None:
                hosts.leave()
            if notice is not None:
                notice.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def set_model(self, model: Any) -> None:
        self._fit = FollowedFit(self, self._run, model)

    def set_params(self, params: Any) -> None:
        if self._fit is not None:
            self._fit.batches, self._fit.epochs = (params or {}).get("steps"), (params or {}).get("epochs")

    def on_train_begin(self, logs: Any = None) -> None:
        from gpudist_core.upstream import trainer

        fit = self._in_fit()
        fit.begin()
        if self._every is not None and self._run.pipeline is None:
            raise UsageError(
                "Saving in the middle of an epoch needs data with a position",
                "Pass fit a gpudist_core.Pipeline, or leave every out to save at the end of each epoch.",
                every=self._every,
            )
        self._restore(required=False, stacklevel=2)
        self._claim()
        trainer.after_all_begin(self, fit.all_begun)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._in_fit().begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._in_fit().begin_batch(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        fit = self._in_fit()
        fit.end_batch(batch)
        if self._is_time_to_leave():
            self._leave(fit.trained, save=self._run.pipeline is not None)
        if not fit.is_at_end_of_epoch:
            self._save_if_due(fit.trained)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        fit = self._in_fit()
        fit.end_epoch(epoch)
        if self._is_time_to_leave():
            self._leave(fit.trained)
        self._save_if_due(fit.trained)
        if self._every is None:
            self._save(fit.trained, "end of an epoch", self._synchronous)

    def on_train_end(self, logs: Any = None) -> None:
        fit = self._in_fit()
        fit.leave_model()
        self._settle()
        # The end may be in no checkpoint yet. All hosts must decide the same, so the folder is not read: one host may see what
        # another is still writing.
        if self._every is not None and fit.trained != self._saved:
            self._save(fit.trained, "end of training", self._synchronous)
        self.close()
        self._fit = None

    def abandon(self) -> None:
        """Clean up after a `fit` that ended with an exception: finish the current save, release the folder and the signals."""
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.leave_model()
        try:
            self.close()
        except SaveFailed as failure:
            warnings.warn(str(failure), stacklevel=2)

    def _in_fit(self) -> FollowedFit:
        assert self._fit is not None
        return self._fit

    def _open(self) -> Hosts:
        """Contact the other hosts, once."""
        if self._hosts is None:
            self._run.complete()
            replicas = self._run.replicas()
            self._hosts = Hosts(replicas.host, replicas.num_hosts, self._folder, self._timeout)
            self._hosts.check_alike(folder=str(self._folder.path), keep=self._keep, every=self._every)
            self._hosts.check_shared()
            atexit.register(self.close)
            if replicas.num_hosts > 1:
                # TensorFlow has taken the signal there, and nobody else would hear it before the first step.
                self._notice = Notice(self._signals, self._hosts.agreement())
        return self._hosts

    def _claim(self) -> Hosts:
        """Claim the folder for this run, once."""
        hosts = self._open()
        if not self._is_writer:
            self._take_over(hosts)
            hosts.claim()
            there = hosts.training.all_gather("looking for checkpoints", self._folder.steps())[0]
            if there and not self._has_looked:
                raise UsageError(
                    "A run must continue from the checkpoints in its folder, or use another folder",
                    "Call restore() before the first step, or pass another folder.",
                    folder=str(self._folder.path),
                    newest=self._folder.of(there[0]).name,
                )
            self._has_looked = self._is_writer = True
            self._notice = self._notice or Notice(self._signals, hosts.agreement())
        return hosts

    def _take_over(self, hosts: Hosts) -> None:
        """Become the only `Checkpoints` of this process that writes into the folder.

        Another one gives way if this one continues from what it has saved.
        """
        other = self._other_writer()
        if other is not None:
            there = hosts.training.all_gather("looking for checkpoints", self._folder.steps())[0]
            if there and self._saved != there[0]:
                raise FolderInUse(
                    f"{IN_USE}. Received: folder={str(self._folder.path)!r}, in use by another gd.Checkpoints of this process. "
                    "Give this one another folder, or save both models with one: extra={...}."
                )
            with contextlib.suppress(SaveFailed):
                other.close()
        _writers[self._folder.path.resolve()] = self

    def _other_writer(self) -> Checkpoints | None:
        """Return the other writer of this process, if any, after its current save is written."""
        other = _writers.get(self._folder.path.resolve())
        if other is None or other is self:
            return None
        with contextlib.suppress(SaveFailed):
            other.wait()
        return other

    def _try(self, step: int, items: list[Any]) -> tuple[Opened | None, str]:
        """Open a checkpoint on all hosts. If one host cannot use it, no host does."""
        opened, reason = None, ""
        try:
            opened = open_checked(self._folder.of(step), items, [*self._run.stateful(), *(["fit"] if self._fit else [])])
        except (Damaged, Foreign, OSError) as error:
            reason = str(error)
        assert self._hosts is not None
        reasons = self._hosts.training.all_gather("restoring", reason)
        reasons_by_host = [f"on host {host} {text}" if len(reasons) > 1 else text for host, text in enumerate(reasons) if text]
        return (None, ", ".join(reasons_by_host)) if reasons_by_host else (opened, "")

    def _take(self, opened: Opened, items: list[Any], refused: Mapping[str, str], stacklevel: int) -> Restored:
        if self._fit is not None:
            self._fit.read_over(opened)
        self._run.restore(opened, items)
        self._last = self._saved = opened.manifest.step
        if self._fit is not None:
            self._fit.taken(opened)
        if refused:
            names = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
            warnings.warn(f"Restored {opened.path.name}: newer checkpoints cannot be used. {names}.", stacklevel=stacklevel)
        return Restored(opened.manifest.step, opened.path, dict(refused), opened.manifest.info)

    def _save(self, step: int, reason: str, synchronous: bool) -> None:
        hosts = self._claim()
        self._settle()
        self._run.build()
        position, others = (None, None) if self._fit is None else (self._fit.position(), self._fit.others())
        snapshot = self._run.snapshot(step, reason, position, others)
        self._failure = None
        self._writing = step
        self._background.start(lambda: saving.write(snapshot, self._folder, hosts.writing, self._keep))
        if synchronous:
            self.wait()

    def _settle(self, warn: bool = True) -> None:
        """Wait for the writer, and remember how it ended."""
        over = self._background.join()
        if over is not None and not isinstance(over, SaveFailed):
            raise over
        self._failure = over if over is not None else self._failure
        self._saved = self._writing if over is None and self._writing is not None else self._saved
        self._writing = None
        if over is not None and warn:
            warnings.warn(str(over), stacklevel=4)


_writers: dict[Path, Checkpoints] = {}
"""The Checkpoints of this process that writes into each folder."""


def _checked(step: Any) -> int:
    """Return the number of a step, which orders the checkpoints and names their folders."""
    number = step.numpy() if hasattr(step, "numpy") else step
    if not is_whole(number, 0):
        raise UsageError("step must be an integer >= 0", "Pass the number of steps that were made.", step=step)
    return int(number)


_METHODS = {"pipeline": ("state", "restore"), "step": ("model",), "optimizer": ("variables",)}
_MEANT = {
    "model": ("model must be a Keras model, or have variables", "Pass the model that is trained."),
    "optimizer": ("optimizer must be a Keras optimizer", "Pass an optimizer object, not its name."),
    "pipeline": ("pipeline must be a gpudist_core.Pipeline, or have state() and restore(state)", "Pass the object itself."),
    "step": ("step must be a gpudist_core.TrainStep", "Pass the number of a step to save() and after_step()."),
}


def check_arguments(folder: Any, keep: Any, every: Any, signals: Any, timeout: Any, extra: Any, **parts: Any) -> None:
    """Refuse arguments that are not valid.

    Args:
        folder: The folder.
        keep: Number of checkpoints to keep.
        every: Save after every this many steps.
        signals: Names of signals.
        timeout: How long to wait for another host, in seconds.
        extra: More to save, by name.
        **parts: The model, the optimizer, the pipeline and the step; None for those not given.

    Raises:
        UsageError: For a value of another type, outside of its range, or without the methods that it needs.
    """
    for name, value in (("keep", keep), ("every", 1 if every is None else every)):
        if not is_whole(value, 1):
            raise UsageError(f"{name} must be a positive integer", **{name: value})
    if not isinstance(folder, (str, Path)) or folder == "":
        raise UsageError("folder must be a path", "All hosts must see it.", folder=folder)
    if Path(folder).exists() and not Path(folder).is_dir():
        raise UsageError("folder must not be a file", "Pass another path.", folder=str(folder))
    if not is_finite(timeout) or timeout <= 0:
        raise UsageError(
            "timeout must be a positive number of seconds", "Leave it out for the default of 600 seconds.", timeout=timeout
        )
    if isinstance(signals, str) or not all(isinstance(name, str) and name in signal.Signals.__members__ for name in signals):
        raise UsageError(
            "signals must be names from Python's signal module", "Use signals=('SIGTERM',) or ('SIGUSR1',).", signals=signals
        )
    if never := {"SIGKILL", "SIGSTOP"}.intersection(signals):
        raise UsageError(
            "A signal must be one that Python can catch", "Use another signal, for example SIGTERM.", signals=sorted(never)
        )
    if extra is not None and not isinstance(extra, Mapping):
        raise UsageError("extra must be a dictionary of names and values", 'Write extra={"name": variable}.', extra=extra)
    for name, value in parts.items():
        needs = _METHODS.get(name, ("variables",))
        if value is not None and (isinstance(value, type) or not all(hasattr(value, method) for method in needs)):
            raise UsageError(*_MEANT[name], **{name: value})
