"""Track one replica's parts of gradients in a custom step, and everything that is computed from such parts.

A tape gives a replica its part of the gradient over all examples, and the optimizer sums the parts. A value that is computed
from a part before that, and is no gradient for an optimizer (a norm, a step of the weights), differs between replicas. Here
such a value is recomputed from the gradients of all replicas: the operations between the parts and the value are repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpudist_core.errors import UsageError
from gpudist_core.gradients import reduction

Key = tuple[int, str]


class Parts:
    """Track the parts in one replica's trace. The object is made where the step starts."""

    def __init__(self) -> None:
        import tensorflow as tf

        self._graph = id(tf.compat.v1.get_default_graph())
        self._graphs: dict[int, Any] = {}  # kept, so that none has the id of one that is gone
        self._known: dict[int, tuple[Any, Any]] = {}
        self._groups: list[tuple[list[Any], list[Any]]] = []
        self._group_of: dict[Key, int] = {}
        self._same: dict[Key, Any] = {}
        self._whole: dict[Key, Any] = {}
        self._descends: dict[Key, bool] = {}
        self._keepers: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._groups)

    def remember(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Note that these are parts of the gradients of these variables. Anything but variables is ignored."""
        import keras
        import tensorflow as tf

        pairs = [
            (gradient, variable)
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None and isinstance(variable, (tf.Variable, keras.Variable))
        ]
        if not pairs:
            return
        self._known |= {id(gradient): (gradient, variable) for gradient, variable in pairs}
        for gradient, _ in pairs:
            if tf.is_symbolic_tensor(reduction.values_of(gradient)):
                self._group_of[_key(reduction.values_of(gradient))] = len(self._groups)
        self._groups.append(([gradient for gradient, _ in pairs], [variable for _, variable in pairs]))

    def remember_same(self, value: Any) -> None:
        """Note that a value is equal on all replicas: a sum over them, or another result of a collective."""
        import tensorflow as tf

        for one in tf.nest.flatten(value, expand_composites=True):
            if tf.is_symbolic_tensor(one):
                self._same[_key(one)] = one

    def remember_keeper(self, variable: Any) -> None:
        """Note that this TensorFlow variable holds from now on what is computed from parts."""
        self._keepers.append(variable.handle)

    def variables(self, gradients: Sequence[Any]) -> list[Any] | None:
        """Return the variables of these parts of gradients; None if one is no such part, or all are None."""
        known = [self._known.get(id(gradient)) for gradient in gradients if gradient is not None]
        if not known or None in known:
            return None
        found = iter(known)
        return [None if gradient is None else (next(found) or (None, None))[1] for gradient in gradients]

    def descends(self, value: Any) -> bool:
        """Return whether a tensor of a graph is computed from parts; in a function or branch, also whether it may be."""
        self._graphs[id(value.graph)] = value.graph
        self._look_at(value)
        return self._descends[_key(value)]

    def is_of_rows(self, value: Any) -> bool:
        """Return whether a tensor of a graph depends on this replica's examples other than by gradients or collectives."""
        seen: set[Key] = set()
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if _is_in_a_graph(one) and _key(one) not in seen:
                seen.add(_key(one))
                if (
                    one.op.type == "Placeholder"
                    and id(one.graph) == self._graph
                    and _has_numbers(one)
                    and _captured(one) is None
                ):
                    return True
                waiting += self._inputs(one)
        return False

    def whole(self, value: Any) -> Any:
        """Recompute a tensor from the gradients of all replicas, in a place where collectives work.

        Args:
            value: A tensor of the graph of the step.

        Returns:
            A tensor of its shape and dtype.

        Raises:
            UsageError: If it is computed from the parts by operations that cannot be repeated.
        """
        self._look_at(value)
        waiting = [value]
        while waiting:
            one = waiting[-1]
            inputs = [] if _key(one) in self._whole or not self._descends[_key(one)] else self._inputs(one)
            missing = [each for each in inputs if self._descends[_key(each)] and _key(each) not in self._whole]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if _key(one) not in self._whole and self._descends[_key(one)]:
                self._make_whole(one)
        return self._whole.get(_key(value), value)

    def _make_whole(self, value: Any) -> None:
        group = self._group_of.get(_key(value))
        if group is None:
            inputs = [self._whole.get(_key(one), one) for one in value.op.inputs]
            made = _repeated(value.op, inputs)
            self._whole |= {_key(old): new for old, new in zip(value.op.outputs, made, strict=True)}
            return
        gradients, variables = self._groups[group]
        for part, total in zip(gradients, reduction.sum_over_replicas(gradients, variables, differentiable=True), strict=True):
            self._whole |= {_key(old): new for old, new in zip(_tensors(part), _tensors(total), strict=True)}

    def _look_at(self, value: Any) -> None:
        """Find out whether a tensor, and everything it is computed from, is computed from parts."""
        waiting = [value]
        while waiting:
            one = waiting[-1]
            inputs = [] if _key(one) in self._descends else self._inputs(one)
            missing = [each for each in inputs if _key(each) not in self._descends]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if _key(one) not in self._descends:
                self._descends[_key(one)] = self._may_be_a_part(one) or any(self._descends[_key(each)] for each in inputs)

    def _inputs(self, value: Any) -> list[Any]:
        """Return the inputs of a tensor; none for a part, a value equal on all replicas, or a resource."""
        if _key(value) in self._group_of or _key(value) in self._same or not _has_numbers(value):
            return []
        outer = _captured(value)
        return list(value.op.inputs) if outer is None else [outer]

    def _may_be_a_part(self, value: Any) -> bool:
        if _key(value) in self._same:
            return False
        return _key(value) in self._group_of or (_has_numbers(value) and self._comes_from_elsewhere(value))

    def _comes_from_elsewhere(self, value: Any) -> bool:
        """Return whether a value comes from a variable, an argument of an inner function, or the result of one with a tape."""
        if not value.dtype.is_floating:
            return False
        if value.op.type == "ReadVariableOp":
            return any(_captured(value.op.inputs[0]) is handle for handle in self._keepers)
        here = id(value.graph)
        if value.op.type == "Placeholder":
            return here != self._graph and _captured(value) is None
        calls = any(attribute.HasField("func") for attribute in value.op.node_def.attr.values())
        return calls and any(graph != here for graph, _ in self._group_of)


def _is_in_a_graph(value: Any) -> bool:
    import tensorflow as tf

    return bool(tf.is_symbolic_tensor(value))


def _key(value: Any) -> Key:
    return id(value.graph), value.name


def _tensors(gradient: Any) -> list[Any]:
    return [gradient.values, gradient.indices] if hasattr(gradient, "indices") else [gradient]


def _has_numbers(value: Any) -> bool:
    import tensorflow as tf

    return value.dtype not in (tf.resource, tf.variant, tf.string)


def _captured(value: Any) -> Any:
    """Return the outer tensor that a function has captured as this tensor, or None."""
    captures = getattr(value.graph, "captures", ())
    return next((outer for outer, inner in captures if inner is value), None) if value.op.type == "Placeholder" else None


def _repeated(operation: Any, inputs: list[Any]) -> list[Any]:
    """Repeat an operation with other inputs, and return its results."""
    if operation.op_def.is_stateful:
        raise UsageError(
            "A custom step must compute what it assigns to trained variables from gradients with stateless operations",
            "Use the sum of the gradients: tf.distribute.get_replica_context().all_reduce('SUM', gradients).",
            operation=operation.type,
        )
    copy = operation.graph.create_op(
        operation.type,
        inputs,
        [output.dtype for output in operation.outputs],
        attrs=dict(operation.node_def.attr),
        op_def=operation.op_def,
        name=f"{operation.name.split('/')[-1]}_of_all",
    )
    return list(copy.outputs)
