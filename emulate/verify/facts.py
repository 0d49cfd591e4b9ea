"""Collect what the probe learned about the program: its optimizers, layers and calls. Every fact may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from emulate.probe.trace import Trace

_NAMES = """
batchnorm regularized dropout clipped_by apply_only taping repeated cached bfloat16 float16 casts distributed
of_first outside shared values_added"""
_FLAGS = ("asynchronous", "compiled", "train_steps", "gathers", "joins", "joins_gradients", "numbered", "own_draws")


@dataclass(frozen=True)
class Facts:
    """Hold facts about the program.

    Attributes:
        optimizers: Of each optimizer class, clipnorm, clipvalue, global_clipnorm, weight_decay, loss_scale, learning_rate,
            scheduled, settings.
        batchnorm: Names of BatchNormalization variables that are not synchronized.
        regularized: Names of variables with a Keras regularizer.
        clipped_by: Which of tf.clip_by_* a step calls.
        dropout: Names of dropout layers.
        apply_only: Functions that only apply gradients they are given.
        taping: Functions that take gradients.
        repeated: Optimizers that make more than one update in a call of Strategy.run.
        constants: Large constants in graphs: shape, dtype, where, bytes and copies of each.
        drawn: Of each draw of several numbers in a function that gets no rows how many it makes, its first dimension.
        cached: Stages of a pipeline that draw random numbers and lie before its cache.
        bfloat16: Names of variables whose layers compute in it.
        float16: The same.
        casts: 16-bit types that a step makes of wider ones.
        distributed: Names of Keras models that gpudist_core distributes.
        compiled: Whether a Keras model is trained by a loss that it was compiled with.
        train_steps: Whether the program makes steps of gpudist_core's.
        of_first: Names of single numbers that a step assigns and that are those of the first replica.
        outside: Names of variables that the program assigns between steps, outside of `Strategy.run`, and that no step reads.
        shared: Names of variables that a step assigns and that several replicas of a host have one of together.
        values_added: Names of variables of whose sparse gradients a step adds up the values over the replicas without the rows.
        gathers: Whether a step gathers over the replicas.
        joins: Whether it adds up tensors over them before it takes gradients.
        joins_gradients: Whether it adds up gradients over them while it takes them: those of tensors that it has added up.
        own_draws: Whether replicas draw for something else than rows, or gpudist_core draws for rows.
        broken: Of each place where gpudist itself has failed in the program's process its error.
        asynchronous: Whether a program with parameter servers makes updates without waiting for those before.
    """

    optimizers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    batchnorm: tuple[str, ...] = ()
    regularized: tuple[str, ...] = ()
    clipped_by: tuple[str, ...] = ()
    dropout: tuple[str, ...] = ()
    apply_only: tuple[str, ...] = ()
    taping: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    constants: tuple[Mapping[str, Any], ...] = ()
    drawn: Mapping[str, int] = field(default_factory=dict)
    cached: tuple[str, ...] = ()
    bfloat16: tuple[str, ...] = ()
    float16: tuple[str, ...] = ()
    casts: tuple[str, ...] = ()
    distributed: tuple[str, ...] = ()
    of_first: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    values_added: tuple[str, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    asynchronous: bool = False
    compiled: bool = False
    train_steps: bool = False
    gathers: bool = False
    joins: bool = False
    joins_gradients: bool = False
    own_draws: bool = False
    numbered: bool = False

    @classmethod
    def of(cls, *traces: Trace) -> Facts:
        """Return the facts of all traces together."""
        merged: dict[str, Any] = {}
        for trace in traces:
            for _, event in trace.of("program"):
                for name in ("optimizers", "drawn", "broken"):
                    merged[name] = {**merged.get(name, {}), **event.get(name, {})}
                for name in _NAMES.split():
                    merged[name] = tuple(dict.fromkeys((*merged.get(name, ()), *event.get(name, ()))))
                merged["constants"] = tuple(event.get("constants", ())) or merged.get("constants", ())
                for name in _FLAGS:
                    merged[name] = merged.get(name, False) or bool(event.get(name))
        return cls(**merged)

    def clipping(self, optimizer: str) -> dict[str, float]:
        """Return the clipping options that an optimizer sets."""
        options = self.optimizers.get(optimizer, {})
        names = ("clipnorm", "clipvalue", "global_clipnorm")
        return {name: float(options[name]) for name in names if options.get(name) is not None}

    @property
    def clips(self) -> bool:
        """Return whether anything clips gradients."""
        return bool(self.clipped_by) or any(self.clipping(name) for name in self.optimizers)
