"""Collect what belongs into a run's checkpoints, and restore it.

The random states of this process that belong to no model are Python's, NumPy's, TensorFlow's and Keras's. TensorFlow does not
tell what a stateful operation inside a tf.function has drawn (`tf.random.uniform` there). Use a `tf.random.Generator` or
stateless draws if a restored run must continue with the same numbers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from gpudist_core.checkpoints import files
from gpudist_core.checkpoints.collect import Collector
from gpudist_core.checkpoints.items import Constant, Item
from gpudist_core.checkpoints.restoring import Opened
from gpudist_core.checkpoints.saving import Held, Snapshot
from gpudist_core.errors import UsageError
from gpudist_core.installed import installed_version, own_version
from gpudist_core.replicas import Replicas, replicas_of


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
        held = [Held.of(item) for item in [*self.items(), *metrics]]

        def keep(is_mine: bool) -> Any:
            return lambda name, values: held.append(Held.of(Constant(name, np.array(values), is_mine)))

        kept = {
            name: files.encode_state(value.state(), f"state/{name}", keep(replicas.host == 0))
            for name, value in self.stateful().items()
        }
        if fit is not None:
            kept["fit"] = dict(fit)
        if callbacks is not None:
            kept["callbacks"] = files.encode_state(callbacks, "state/callbacks", keep(replicas.host == 0))
        own = files.encode_state({"random": random_states()}, f"random/{replicas.host}", keep(True))
        return Snapshot(step, held, kept, own, self._info(replicas, reason))

    def restore(self, opened: Opened, items: list[Item]) -> None:
        """Restore everything, starting with objects that may refuse their state."""
        for name, value in self.stateful().items():
            value.restore(opened.state(name))
        opened.assign(items)
        hosts = opened.state("hosts")
        host = self.replicas().host
        restore_random_states(hosts[host if host < len(hosts) else 0]["random"])

    def _info(self, replicas: Replicas, reason: str) -> dict[str, Any]:
        return {
            "reason": reason,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "topology": {
                "strategy": type(self.strategy).__name__,
                "replicas": replicas.total,
                "hosts": replicas.num_hosts,
                "devices": list(replicas.devices),
            },
            "versions": _versions(),
        }


def _versions() -> dict[str, str]:
    import platform

    names = ("tensorflow", "keras", "numpy")
    return {
        "python": platform.python_version(),
        "gpudist": own_version(),
        **{name: str(installed_version(name)) for name in names},
    }


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
