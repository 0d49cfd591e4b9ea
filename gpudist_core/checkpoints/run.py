"""Collect what belongs into a run's checkpoints, and restore it from the newest complete one that fits.

The random states of this process that belong to no model are Python's, NumPy's, TensorFlow's and Keras's. TensorFlow does not
tell what a stateful operation inside a tf.function has drawn (`tf.random.uniform` there). Use a `tf.random.Generator` or
stateless draws if a restored run must continue with the same numbers.
"""

from __future__ import annotations

import functools
import platform
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gpudist_core.checkpoints import files
from gpudist_core.checkpoints.items import Array, Collector, Item
from gpudist_core.checkpoints.saving import Held, Snapshot
from gpudist_core.errors import Damaged, Foreign, UsageError
from gpudist_core.installed import installed_version, own_version
from gpudist_core.replicas import Replicas, replicas_of
from gpudist_core.static.memory import along


@dataclass
class RunParts:
    """Hold the parts of a run, as far as they are known.

    Attributes:
        model: A Keras model or an object with `variables`.
        optimizer: A Keras optimizer; that of `step` if there is one.
        pipeline: An object with `state()` and `restore(state)`.
        step: A TrainStep.
        extra: Variables, metrics, random generators and objects with `state()` and `restore(state)`, by name.
        strategy: The strategy of the variables.
        others: Further optimizers, which the model keeps for a custom step.
        taken: The parts that come from the model that `fit` trains; another `fit` may have others.
    """

    model: Any = None
    optimizer: Any = None
    pipeline: Any = None
    step: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    strategy: Any = None
    others: Sequence[Any] = ()
    taken: set[str] = field(default_factory=set)

    def take(self, part: str, value: Any) -> None:
        """Set a part that `fit` provides, unless the user has named one."""
        if getattr(self, part) is None or part in self.taken:
            setattr(self, part, value)
            self.taken.add(part)

    def complete(self) -> None:
        """Complete the parts that follow from the others."""
        from gpudist_core.upstream import models

        if self.step is not None:
            self.model = getattr(self.step, "model", None) if self.model is None else self.model
            self.optimizer = getattr(self.step, "optimizer", self.optimizer)
            self.strategy = getattr(self.step, "strategy", None) if self.strategy is None else self.strategy
        if self.strategy is None:
            self.strategy = models.strategy_of(self.model)
        if self.model is None and self.optimizer is None and not self.extra:
            raise UsageError(
                "Checkpoints need something to save", "Pass model=..., step=... or extra={...}.", model=None, step=None
            )

    def replicas(self) -> Replicas:
        """Return the replicas of the strategy. A coordinator of parameter servers counts as one."""
        if isinstance(self.strategy, tf.distribute.experimental.ParameterServerStrategy):
            return Replicas(1, 0, ("",), 0, 1)
        return replicas_of(self.strategy)

    def build(self) -> None:
        """Create the missing variables, so that they can be restored.

        Raises:
            UsageError: If the shapes of the model's variables are not known yet.
        """
        if self.model is not None and not getattr(self.model, "built", True):
            raise UsageError(
                "A model must be built before it can be saved or restored",
                "Give it an Input, call model.build(shape), or call it on a batch first.",
                model=getattr(self.model, "name", type(self.model).__name__),
            )
        if self.optimizer is not None and not getattr(self.optimizer, "built", True):
            trained = self.step.trained_variables if self.step is not None else self.model.trainable_variables
            with self.strategy.scope():
                self.optimizer.build(trained)

    def items(self) -> list[Item]:
        """Return all variables as items."""
        collector = Collector(self.strategy, self.replicas())
        groups: dict[str, list[Item]] = {}
        if self.model is not None:
            groups["model"] = collector.of_model(self.model)
        optimizers = {"optimizer": self.optimizer, **{f"optimizer_{n}": other for n, other in enumerate(self.others, 1)}}
        for name, optimizer in optimizers.items():
            if optimizer is not None:
                groups[name] = collector.of_optimizer(name, optimizer, self.model)
        of_model = list(getattr(self.model, "variables", ())) if self.model is not None else []
        trained = getattr(self.step, "trained_variables", ()) if self.step is not None else ()
        more = [variable for variable in trained if not any(variable is other for other in of_model)]
        groups["trained"] = collector.of_others("trained", more)
        for name, value in sorted(self.extra.items()):
            if not files.has_state(value):
                groups[f"extra/{name}"] = collector.of_others(f"extra/{name}", [value])
        return [item for group in groups.values() for item in group]

    def metrics(self) -> list[Item]:
        """Return the variables of the metrics that the model was compiled with."""
        return Collector(self.strategy, self.replicas()).of_metrics(self.model)

    def stateful(self) -> dict[str, Any]:
        """Return the objects with `state()` and `restore(state)`, by name."""
        parts = {"pipeline": self.pipeline, "step": self.step if files.has_state(self.step) else None}
        parts |= {f"extra/{name}": value for name, value in sorted(self.extra.items()) if files.has_state(value)}
        return {name: value for name, value in parts.items() if value is not None}

    def snapshot(self, step: int, reason: str, fit: Mapping[str, Any] | None, callbacks: Mapping[str, Any] | None) -> Snapshot:
        """Copy everything, so that the training can continue. All hosts must call it at the same step.

        Args:
            step: The step's number.
            reason: The reason of the save.
            fit: The position of Keras's `fit`; None outside of it.
            callbacks: The state of its other callbacks; None outside of it.

        Returns:
            This host's part.
        """
        replicas = self.replicas()
        metrics = self.metrics() if fit is not None and fit["in_epoch"] else []
        held = [Held(item.name, item.shape, item.dtype, item.axis, item.pieces()) for item in [*self.items(), *metrics]]

        def keep(is_mine: bool) -> Any:
            def hold(name: str, values: Array) -> None:
                pieces = [(0, 0, np.array(values))] if is_mine else []
                held.append(Held(name, values.shape, values.dtype.name, None, pieces))

            return hold

        of_all = keep(replicas.host == 0)
        stateful = self.stateful().items()
        kept = {name: files.encode_state(value.state(), f"state/{name}", of_all) for name, value in stateful}
        if fit is not None:
            kept["fit"] = dict(fit)
        if callbacks is not None:
            kept["callbacks"] = files.encode_state(callbacks, "state/callbacks", of_all)
        own = files.encode_state({"random": random_states()}, f"random/{replicas.host}", keep(True))
        info = {
            "reason": reason,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "topology": {
                "strategy": type(self.strategy).__name__,
                "replicas": replicas.total,
                "hosts": replicas.num_hosts,
                "devices": list(replicas.devices),
            },
            "versions": {
                "python": platform.python_version(),
                "gpudist": own_version(),
                **{name: str(installed_version(name)) for name in ("tensorflow", "keras", "numpy")},
            },
        }
        return Snapshot(step, held, kept, own, info)

    def restore(self, opened: Opened, items: list[Item]) -> None:
        """Restore everything, starting with objects that may refuse their state."""
        for name, value in self.stateful().items():
            value.restore(opened.state(name))
        opened.assign(items)
        hosts = opened.state("hosts")
        host = self.replicas().host
        restore_random_states(hosts[host if host < len(hosts) else 0]["random"])


def random_states() -> dict[str, Any]:
    """Return the states as numbers, lists and arrays."""
    from gpudist_core.upstream import runtime

    version, words, gauss = random.getstate()
    keras = runtime.keras_global_generator()
    return {
        "python": [version, np.array(words, np.uint32), gauss],
        "numpy": np.random.get_state(legacy=False),
        "tensorflow": runtime.op_seeds(),
        "keras": None if keras is None else np.asarray(keras.state),
    }


def restore_random_states(kept: dict[str, Any]) -> None:
    """Restore the random states, so that draws continue where `random_states` was taken.

    Args:
        kept: The result of `random_states`.
    """
    from gpudist_core.upstream import runtime

    version, words, gauss = kept["python"]
    random.setstate((int(version), tuple(int(word) for word in words), gauss))
    np.random.set_state(kept["numpy"])
    runtime.restore_op_seeds(kept["tensorflow"])
    if kept["keras"] is not None:
        runtime.keras_global_generator(make=True).state.assign(kept["keras"])


@dataclass(frozen=True)
class Opened:
    """Hold a complete checkpoint.

    Args:
        path: Its folder.
        manifest: Its manifest.
    """

    path: Path
    manifest: files.Manifest

    def assign(self, items: Iterable[Item]) -> None:
        """Assign its values to items that fit."""
        for item in items:
            entry = self.manifest.entries[item.name]
            item.assign(functools.partial(rows_of, self.path, entry), entry.rows)

    def state(self, name: str) -> Any:
        """Return one of its states, including arrays; None if it has no such state."""
        kept = self.manifest.states.get(name)
        return None if kept is None else files.decode_state(kept, self.array)

    def array(self, name: str) -> Array:
        """Return a whole array by its name."""
        entry = self.manifest.entries[name]
        return np.array(rows_of(self.path, entry, 0, entry.rows))


def open_checked(path: Path, items: Sequence[Item], needed_states: Iterable[str]) -> Opened:
    """Open a checkpoint, and check that everything this host needs is there, complete and fits.

    Args:
        path: Its folder.
        items: The items to restore.
        needed_states: The states to restore.

    Returns:
        The checkpoint.

    Raises:
        Damaged: If it was changed after it was written.
        Foreign: If it belongs to another run.
    """
    opened = Opened(path, files.read_manifest(path))
    _check_fits(opened.manifest, items, needed_states)
    for item in items:
        entry = opened.manifest.entries[item.name]
        for start, stop in item.wanted(entry.rows):
            _check_rows(path, item.name, entry, start, stop)
    for name, entry in opened.manifest.entries.items():
        if name.startswith(("state/", "random/")):
            _check_rows(path, name, entry, 0, entry.rows)
    return opened


def rows_of(path: Path, entry: files.Entry, start: int, stop: int) -> Array:
    """Return rows of an array that may be in several pieces; the whole array if it has no axis."""
    if entry.axis is None:
        return files.load_piece(path, entry.pieces[0], entry.dtype, entry.shape)
    pieces = []
    for piece in _overlapping(entry, start, stop):
        shape = (*entry.shape[: entry.axis], piece.stop - piece.start, *entry.shape[entry.axis + 1 :])
        values = files.load_piece(path, piece, entry.dtype, shape)
        first, last = max(start, piece.start) - piece.start, min(stop, piece.stop) - piece.start
        pieces.append(values[along(entry.axis, first, last)])
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, entry.axis)


def _overlapping(entry: files.Entry, start: int, stop: int) -> list[files.Piece]:
    pieces = sorted(
        (piece for piece in entry.pieces if piece.start < stop and piece.stop > start), key=lambda piece: piece.start
    )
    reached = start
    for piece in pieces:
        if piece.start > reached:
            break
        reached = max(reached, piece.stop)
    if reached < stop:
        raise Damaged(f"rows {reached} to {stop} of an array are missing")
    return pieces


def _check_rows(path: Path, name: str, entry: files.Entry, start: int, stop: int) -> None:
    """Check the bytes that hold some rows; along another axis than the first, the whole pieces."""
    if entry.axis is None:
        files.check_blocks(path, name, entry.pieces[0])
        return
    for piece in _overlapping(entry, start, stop):
        if entry.axis == 0 and piece.stop > piece.start:
            row = piece.size // (piece.stop - piece.start)
            first, last = max(start, piece.start) - piece.start, min(stop, piece.stop) - piece.start
            files.check_blocks(path, name, piece, first * row, last * row)
        else:
            files.check_blocks(path, name, piece)


def _check_fits(kept: files.Manifest, items: Sequence[Item], needed_states: Iterable[str]) -> None:
    """Check that names, shapes and dtypes are those of the run. Groups that the run does not have are ignored."""
    groups = {item.name.split("/")[0] for item in items}
    there = {name for name in kept.entries if name.split("/")[0] in groups}
    asked = {item.name: item for item in items}
    problems = []
    if only := sorted(there - asked.keys()):
        problems.append(f"only the checkpoint has {_some(only)}")
    if only := sorted(asked.keys() - there):
        problems.append(f"only this run has {_some(only)}")
    for name in sorted(there & asked.keys()):
        item, entry = asked[name], kept.entries[name]
        if not item.fits(entry.shape) or item.dtype != entry.dtype or (item.axis is None) != (entry.axis is None):
            problems.append(f"{name} is {_kind(entry)} in the checkpoint and {_kind(item)} in this run")
    missing = [name for name in needed_states if name not in kept.states]
    if missing:
        problems.append(f"it has no state for {_some(missing)}")
    if problems:
        raise Foreign("it is of something else: " + ", ".join(problems[:4]) + (", ..." if len(problems) > 4 else ""))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _kind(value: Item | files.Entry) -> str:
    return f"{value.dtype}{list(value.shape)}" + ("" if value.axis is None else " in slices")
