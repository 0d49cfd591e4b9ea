"""Hold what is learned about a program while it runs: its optimizers, layers and calls."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from emulate.trace.format import Trace

TABLE = "table"
"""Stands for the type of a table, where `Facts.held` has the types of numbers."""


@dataclass
class Facts:
    """Hold facts about the program: the recorder notes them, a trace stores them, the judge reads them.

    Attributes:
        optimizers: Of each optimizer class, clipnorm, clipvalue, global_clipnorm, weight_decay, loss_scale, learning_rate,
            scheduled, settings.
        batchnorm: Names of BatchNormalization variables that are not synchronized.
        masked: Those of them that cannot be, because the layer's input has a mask.
        unmasked: Names of merging layers of Keras 3 that drop a mask, because another input has none.
        regularized: Names of variables with a Keras regularizer.
        clipped_by: Which of tf.clip_by_* a step calls.
        dropout: Names of dropout layers.
        apply_only: Functions that only apply gradients they are given.
        taping: Functions that take gradients.
        repeated: Optimizers that make more than one update in a call of Strategy.run.
        constants: Large constants in graphs: shape, dtype, where, bytes and copies of each.
        drawn: Of each draw of several numbers in a function that gets no rows how many it makes, its first dimension.
        held: Of each line that makes a constant, what a step computes with (`instrument/constants.py`).
        mapped: The same of each function that makes examples.
        cached: Stages of a pipeline that draw random numbers and lie before its cache.
        drawing: Functions of a pipeline that draw from TensorFlow's generators: stage, function, seeds.
        bfloat16: Names of variables whose layers compute in it.
        float16: The same.
        casts: 16-bit types that a step makes of wider ones.
        distributed: Names of Keras models that gpudist_core distributes.
        compiled: Whether a Keras model is trained by a loss that it was compiled with.
        distributes_generator: Whether Keras 3's `fit` distributes a Python generator.
        own_train_step: Whether that model has a `train_step` of the program's own.
        mirrored_metrics: Whether all replicas share the variables of each metric (an old Keras 3).
        train_steps: Whether the program makes steps of gpudist_core's.
        of_first: Names of single numbers that a step assigns and that are those of the first replica.
        reads: Of each variable that a step assigns whether a step makes more of its value than its next one, on which gradients
            or weights may depend. Also true where that is not seen.
        outside: Names of variables that the program assigns between steps, outside of `Strategy.run`, and that no step reads.
        shared: Names of variables that a step assigns and that several replicas of a host have one of together.
        values_added: Names of variables of whose sparse gradients a step adds up the values over the replicas without the rows.
        gathers: Whether a step gathers over the replicas.
        joins: Whether it adds up tensors over them before it takes gradients.
        joins_gradients: Whether it adds up gradients over them while it takes them: those of tensors that it has added up.
        own_draws: Whether replicas draw for something else than rows, or gpudist_core draws for rows.
        numbered: Whether the program asks for the number of a replica.
        follows: Whether this run gets the gradients of another one.
        by_share: Whether it normalizes each replica's share by itself.
        broken: Of each place where gpudist itself has failed in the program's process its error.
        asynchronous: Whether a program with parameter servers makes updates without waiting for those before.
    """

    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    drawn: dict[str, int] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)
    mapped: dict[str, Any] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    reads: dict[str, bool] = field(default_factory=dict)
    batchnorm: list[str] = field(default_factory=list)
    masked: list[str] = field(default_factory=list)
    unmasked: list[str] = field(default_factory=list)
    regularized: list[str] = field(default_factory=list)
    dropout: list[str] = field(default_factory=list)
    clipped_by: list[str] = field(default_factory=list)
    apply_only: list[str] = field(default_factory=list)
    taping: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    constants: list[dict[str, Any]] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    drawing: list[dict[str, Any]] = field(default_factory=list)
    bfloat16: list[str] = field(default_factory=list)
    float16: list[str] = field(default_factory=list)
    casts: list[str] = field(default_factory=list)
    distributed: list[str] = field(default_factory=list)
    of_first: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    values_added: list[str] = field(default_factory=list)
    asynchronous: bool = False
    compiled: bool = False
    distributes_generator: bool = False
    own_train_step: bool = False
    train_steps: bool = False
    mirrored_metrics: bool = False
    gathers: bool = False
    joins: bool = False
    joins_gradients: bool = False
    numbered: bool = False
    own_draws: bool = False
    follows: bool = False
    by_share: bool = False

    @classmethod
    def of(cls, *traces: Trace) -> Facts:
        """Return the facts of all traces together; of large constants those of the last host that has some."""
        merged = cls()
        for event in (event for trace in traces for _, event in trace.of("program")):
            for name in (one.name for one in fields(cls)):
                known, more = getattr(merged, name), event.get(name)
                if isinstance(known, dict):
                    known |= more or {}
                elif not isinstance(known, list):
                    setattr(merged, name, known or bool(more))
                elif name == "constants":
                    known[:] = more or known
                else:
                    merged.add(name, *(more or ()))
        return merged

    def add(self, name: str, *values: Any) -> None:
        """Add values that are not there yet to a fact that is a list."""
        known = getattr(self, name)
        for value in values:
            if value not in known:
                known.append(value)

    def clipping(self, optimizer: str) -> dict[str, float]:
        """Return the clipping options that an optimizer sets."""
        options = self.optimizers.get(optimizer, {})
        names = ("clipnorm", "clipvalue", "global_clipnorm")
        return {name: float(options[name]) for name in names if options.get(name) is not None}

    @property
    def clips(self) -> bool:
        """Return whether anything clips gradients."""
        return bool(self.clipped_by) or any(self.clipping(name) for name in self.optimizers)
