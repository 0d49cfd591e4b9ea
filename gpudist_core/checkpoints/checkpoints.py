"""`Checkpoints`: save a run on one topology, go on with it on another."""

from __future__ import annotations

import atexit
import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, final

from gpudist_core.checkpoints import arguments, restoring, saving
from gpudist_core.checkpoints.background import Background
from gpudist_core.checkpoints.errors import CheckpointRefused, Damaged, FolderInUse, Foreign, Preempted, SaveFailed, refusal
from gpudist_core.checkpoints.fit import CallbackMethods, Fit
from gpudist_core.checkpoints.folder import Folder
from gpudist_core.checkpoints.hosts import Hosts
from gpudist_core.checkpoints.lock import IN_USE
from gpudist_core.checkpoints.preemption import Notice
from gpudist_core.checkpoints.run import Run
from gpudist_core.errors import WrongUse
from gpudist_core.values import is_whole


@dataclass(frozen=True)
class Restored:
    """What a run goes on from.

    Attributes:
        step: The step after which it was saved.
        path: The checkpoint.
        refused: Newer checkpoints that could not be used, and why, by name.
        info: The topology and the versions that it was saved with, the time and the reason.
    """

    step: int
    path: Path
    refused: Mapping[str, str]
    info: Mapping[str, Any]


@final
class Checkpoints(CallbackMethods):
    """Saves a run so that it goes on after an interruption as if there had been none, on the same topology or another.

    A checkpoint has the model's variables, the optimizer's slots and counters, moving averages, the loss scale, random states,
    the position in the pipeline and what a TrainStep has accumulated. Mirrored values are kept once; of sums that replicas hold
    parts of, the total; sharded tables as slices, written by the hosts that hold them. It is written beside the training,
    appears under its name only when all hosts have written all of it, and carries a checksum for every block.

    In a loop of one's own, `restore` first and `after_step` after each step. In Keras's `fit`, it is a callback and does both
    by itself; it saves at the end of each epoch, or every so many batches where `fit` was given a Pipeline, whose position it
    can keep. Other data are gone through again, in `fit` of a `gd.distributed` model: one seeded shuffle at once, generators,
    sequences and epochs of `steps_per_epoch` by reading over what was read. Where that is not possible, it warns.

    Of the other callbacks it keeps what Keras's have from epoch to epoch (EarlyStopping, ReduceLROnPlateau, ModelCheckpoint,
    SwapEMAWeights) and the state of those with `state()` and `restore(state)`, as it is on the first host; it warns of others
    that had one. A `History` begins where `fit` goes on. A `fit` that a callback has stopped is not trained on.

    When the process is sent SIGTERM on any host, all hosts save after the same step and raise `Preempted`, which ends the
    process with exit code 75. A second signal, later than five seconds after the first, ends the process at once.

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
        folder: Where; hosts need one that they share. One run at a time writes into it.
        keep: How many checkpoints to leave.
        every: Save after every so many steps; None leaves it to `save`, in `fit` to the end of each epoch.
        model: A Keras model, or anything with `variables`.
        optimizer: A Keras optimizer; not needed with `step`.
        pipeline: A Pipeline, or anything with `state()` and `restore(state)`.
        step: A TrainStep.
        extra: More to keep, by names: variables, metrics, random generators, lists of them, objects with `state()` and
            `restore(state)`.
        strategy: Where the variables were made; found by itself where there is a model.
        signals: Which signals mean that the run has to leave, as `SIGTERM` or `SIGUSR1`.
        synchronous: Let the training wait until each checkpoint is written.
        timeout: How long to wait for another host, in seconds.

    Raises:
        WrongUse: For numbers that cannot be, a folder that is none, and what is no model, optimizer, pipeline or step.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        every: int | None = None,
        model: Any = None,
        optimizer: Any = None,
        pipeline: Any = None,
        step: Any = None,
        extra: Mapping[str, Any] | None = None,
        strategy: Any = None,
        signals: Sequence[str] = ("SIGTERM",),
        synchronous: bool = False,
        timeout: float = 600.0,
    ) -> None:
        arguments.check(folder, keep, every, signals, timeout, extra)
        arguments.check_parts(model=model, optimizer=optimizer, pipeline=pipeline, step=step)
        self._folder = Folder(Path(folder).absolute())
        self._keep, self._every, self._signals = keep, every, tuple(signals)
        self._synchronous, self._timeout = synchronous, timeout
        self._run = Run(model, optimizer, pipeline, step, dict(extra or {}), strategy)
        self._hosts: Hosts | None = None
        self._notice: Notice | None = None
        self._background = Background()
        self._failure: BaseException | None = None
        self._has_looked = False
        self._is_writer = False
        self._calls = 0
        self._last = 0
        self._writing: int | None = None
        self._saved: int | None = None
        self._fit: Fit | None = None

    def saved(self) -> list[Path]:
        """The checkpoints in the folder, the newest first."""
        return [self._folder.of(step) for step in self._folder.steps()]

    def restore(self, *, required: bool = False) -> Restored | None:
        """Go on from the newest checkpoint that is whole and of this model; all hosts call it, with their variables made.

        A checkpoint that cannot be used is named in a warning, and the one before it is tried.

        Args:
            required: Raise where there is none to go on from.

        Returns:
            What was restored; None where the folder has no checkpoint.

        Raises:
            CheckpointRefused: Where there are some and none can be used, or none and one is required.
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
                f"There must be a checkpoint to go on from. Received: folder={str(self._folder.path)!r}, none in it. "
                "Name the folder of the run, or leave required out to start from scratch."
            )
        return None

    def save(self, step: int, *, synchronous: bool | None = None) -> None:
        """Save after a step; all hosts call it after the same one.

        Args:
            step: The step's number, which orders the checkpoints.
            synchronous: Wait until it is written; as the constructor says unless given.

        Raises:
            SaveFailed: When waiting, and it could not be written on some host.
        """
        self._save(_checked(step), "asked for", self._synchronous if synchronous is None else synchronous)

    def after_step(self, step: int) -> bool:
        """Save when it is time to, and leave when some host was told to; all hosts call it after each step.

        Args:
            step: The step's number, larger than the last one's.

        Returns:
            Whether a checkpoint was saved, or is being written.

        Raises:
            Preempted: After saving, where some host was told to leave.
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

    def _save_epoch(self, step: int) -> None:
        if self._every is None:
            self._save(step, "end of an epoch", self._synchronous)

    def _save_rest(self, step: int) -> None:
        """Save the end of a `fit` that no checkpoint has yet.

        All hosts must decide alike: what is in the folder one may see while another is still writing.
        """
        self._settle()
        if self._every is not None and step != self._saved:
            self._save(step, "end of training", self._synchronous)

    def _begin_fit(self, has_position: bool) -> None:
        if self._every is not None and not has_position:
            raise WrongUse(
                "Saving in the middle of an epoch needs a position in the data to go on from",
                "Give fit a gpudist_core.Pipeline, or leave every out to save at the end of each epoch.",
                every=self._every,
            )
        self._restore(required=False, stacklevel=2)
        self._claim()

    def _is_time_to_leave(self) -> bool:
        """Whether all hosts have agreed to stop here; each call counts as the end of one step."""
        self._claim()
        assert self._notice is not None
        self._calls += 1
        return self._notice.is_time(self._calls)

    def _leave(self, step: int, save: bool = True) -> NoReturn:
        """Save, if what is there now can be gone on from, give everything back and raise."""
        try:
            if save:
                self._save(step, "preempted", True)
            else:
                self._settle()
        finally:
            self.close()
        path = self._folder.of(step) if save else next(iter(self.saved()), None)
        raise Preempted(
            f"This run was told to leave after step {step}. "
            + (f"Start it again to go on from {path}." if path else "Nothing was saved yet: it will start from scratch."),
            step=step,
            path=path,
        )

    def wait(self) -> None:
        """Wait until what is being saved is written.

        Raises:
            SaveFailed: When the last checkpoint could not be written.
        """
        self._settle(warn=False)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Wait for what is being saved, give the signals and the folder back.

        Raises:
            SaveFailed: When the last checkpoint could not be written.
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
        from gpudist_core.upstream import callbacks

        callbacks.install()
        self._fit = Fit(self, self._run, model)

    def set_params(self, params: Any) -> None:
        if self._fit is not None:
            self._fit.batches, self._fit.epochs = (params or {}).get("steps"), (params or {}).get("epochs")

    def on_train_begin(self, logs: Any = None) -> None:
        self._in_fit().begin()

    def all_begun(self, callbacks: list[Any]) -> None:
        """Told by the list of callbacks once each has had its `on_train_begin`.

        Args:
            callbacks: All of them, this one included.
        """
        self._in_fit().all_begun(callbacks)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._in_fit().begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._in_fit().begin_batch(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._in_fit().end_batch(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._in_fit().end_epoch(epoch)

    def on_train_end(self, logs: Any = None) -> None:
        self._in_fit().end()
        self._fit = None

    def abandon(self) -> None:
        """Leave a `fit` that ended by an exception: what was begun is written, the folder and the signals are given back."""
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.leave_model()
        try:
            self.close()
        except SaveFailed as failure:
            warnings.warn(str(failure), stacklevel=2)

    def _in_fit(self) -> Fit:
        assert self._fit is not None
        return self._fit

    def _open(self) -> Hosts:
        """Meet the other hosts, once."""
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
        """Become the one run that writes into the folder, once."""
        hosts = self._open()
        if not self._is_writer:
            self._take_over(hosts)
            hosts.claim()
            there = hosts.training.all_gather("looking for checkpoints", self._folder.steps())[0]
            if there and not self._has_looked:
                raise WrongUse(
                    "A run must go on from the checkpoints that its folder has, or have a folder of its own",
                    "Call restore() before the first step, or name another folder.",
                    folder=str(self._folder.path),
                    newest=self._folder.of(there[0]).name,
                )
            self._has_looked = self._is_writer = True
            self._notice = self._notice or Notice(self._signals, hosts.agreement())
        return hosts

    def _take_over(self, hosts: Hosts) -> None:
        """Become the one of this process that writes into the folder.

        Another that does is not in the way where this one goes on from what that has saved.
        """
        other = self._other_writer()
        if other is not None:
            there = hosts.training.all_gather("looking for checkpoints", self._folder.steps())[0]
            if there and self._saved != there[0]:
                raise FolderInUse(
                    f"{IN_USE}. Received: folder={str(self._folder.path)!r}, in use by another gd.Checkpoints of this process. "
                    "Give this one a folder of its own, or keep both models with one: extra={...}."
                )
            with contextlib.suppress(SaveFailed):
                other.close()
        _writers[self._folder.path.resolve()] = self

    def _other_writer(self) -> Checkpoints | None:
        """Who else of this process writes into the folder, once what it has begun is written."""
        other = _writers.get(self._folder.path.resolve())
        if other is None or other is self:
            return None
        with contextlib.suppress(SaveFailed):
            other.wait()
        return other

    def _try(self, step: int, items: list[Any]) -> tuple[restoring.Opened | None, str]:
        """Open a checkpoint on all hosts; one that cannot be used on one host is not used on any."""
        opened, reason = None, ""
        try:
            opened = restoring.open_checked(
                self._folder.of(step), items, [*self._run.stateful(), *(["fit"] if self._fit else [])]
            )
        except (Damaged, Foreign, OSError) as error:
            reason = str(error)
        assert self._hosts is not None
        reasons = self._hosts.training.all_gather("restoring", reason)
        told = [f"on host {host} {text}" if len(reasons) > 1 else text for host, text in enumerate(reasons) if text]
        return (None, ", ".join(told)) if told else (opened, "")

    def _take(self, opened: restoring.Opened, items: list[Any], refused: Mapping[str, str], stacklevel: int) -> Restored:
        if self._fit is not None:
            self._fit.read_over(opened)
        self._run.restore(opened, items)
        self._last = self._saved = opened.manifest.step
        if self._fit is not None:
            self._fit.taken(opened)
        if refused:
            names = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
            warnings.warn(
                f"Restored {opened.path.name}, because newer checkpoints cannot be used. {names}.", stacklevel=stacklevel
            )
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
        """Wait for the writer and take note of how it ended."""
        over = self._background.join()
        if over is not None and not isinstance(over, SaveFailed):
            raise over
        self._failure = over if over is not None else self._failure
        self._saved = self._writing if over is None and self._writing is not None else self._saved
        self._writing = None
        if over is not None and warn:
            warnings.warn(str(over), stacklevel=4)


_writers: dict[Path, Checkpoints] = {}
"""By folder who of this process writes into it."""


def _checked(step: Any) -> int:
    """The number of a step: it orders the checkpoints and names their folders."""
    number = step.numpy() if hasattr(step, "numpy") else step
    if not is_whole(number, 0):
        raise WrongUse("A step must be a whole number, 0 or more", "Count the steps that were made.", step=step)
    return int(number)
