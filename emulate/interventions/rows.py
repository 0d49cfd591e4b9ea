"""Give a step its own examples in another order, or the examples of another run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from emulate import graph_functions
from emulate.imports import tf
from emulate.interventions.numbers import numbered
from emulate.interventions.switches import numbers_of_shares
from emulate.recorder import Body, Replay, shard_of
from emulate.trace import Array, Step, StoredArray, Trace, entries_of_examples, joined, local_slice, row_positions
from emulate.upstream import Names, is_floating

Call = Callable[[Callable[..., Any], Any, Any], Any]


def permuted(seed: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the same batch with its examples in another order, which differs in each step."""
    return in_another_order(seed, args, kwargs)[:2]


def in_another_order(seed: int, args: Any, kwargs: Any, splits: Sequence[Sequence[int]] = ()) -> tuple[Any, Any, Any]:
    """Return the permuted batch, in which each row stays in its share, and the order; None without examples."""
    flat = tf.nest.flatten((args, kwargs))
    positions = _positions(flat)
    if not positions:
        return args, kwargs, None
    number = _num_rows(flat[positions[0]])
    step_seed = _step_seed(seed, flat[positions[0]])
    with graph_functions.on_cpu():
        order = tf.random.experimental.index_shuffle(tf.range(number), step_seed, number - 1)
        if splits:
            ends = tf.cumsum(numbers_of_shares(tf.cast(number, tf.int32), splits))
            share = tf.searchsorted(ends, tf.cast(order, tf.int32), side="right")
            order = tf.gather(order, tf.argsort(share, stable=True))
    for position in positions:
        flat[position] = _gathered(flat[position], order, number)
    new_args, new_kwargs = tf.nest.pack_sequence_as((args, kwargs), flat)
    return new_args, new_kwargs, order


def _positions(flat: list[Any]) -> list[int]:
    """Return which of a step's inputs hold its examples."""
    return row_positions({place: rows for place, value in enumerate(flat) if (rows := _static_rows(value)) is not None})


def first_half(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the first half of the batch."""
    flat = tf.nest.flatten((args, kwargs))
    for position in _positions(flat):
        with tf.name_scope("gpudist_half"):  # the program's own names stay as they are
            flat[position] = flat[position][: _num_rows(flat[position]) // 2]
    return tuple(tf.nest.pack_sequence_as((args, kwargs), flat))


def put_back(body: Body, order: Any, result: Any) -> Any:
    """Return a step's results for each example (predictions, states) in the program's order.

    The program may hand it to another step, beside rows that it knows in its own order. What has as many rows by chance stays
    as it is where it has the shape of a weight, as gradients have.
    """
    kinds = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)
    taped = [weight for _, weights in body.tape for weight in weights]
    called = [weight for model in body.models.values() for weight in getattr(model, "weights", ())]
    shapes_of_weights = {tuple(weight.shape) for weight in [*taped, *called]}

    def back(value: Any) -> Any:
        if not isinstance(value, kinds) or _static_rows(value) is None or tuple(value.shape) in shapes_of_weights:
            return value
        return _in_place(value, order)

    return tf.nest.map_structure(back, result)


def _in_place(value: Any, order: Any) -> Any:
    """Return examples in their original order. Values with another length are unchanged."""
    static = _static_rows(value), order.shape[0]
    if static[0] != static[1] and static[0] != -1 and static[1] is not None:
        return value
    rows = _num_rows(value)
    with graph_functions.on_cpu():
        is_permuted = tf.equal(rows, tf.size(order))
        before = tf.cond(is_permuted, lambda: tf.math.invert_permutation(order), lambda: tf.range(rows))
    return _gathered(value, before, rows)


def _step_seed(seed: int, value: Any) -> Any:
    """Return a seed from the batch's contents: it differs from step to step without a counter in the graph."""
    flat = value.flat_values if isinstance(value, tf.RaggedTensor) else getattr(value, "values", value)
    if flat.dtype == tf.string:
        return tf.constant([seed, 1], tf.int64)
    total = tf.cast(tf.reduce_sum(tf.cast(flat, tf.float64)) * 1e6, tf.int64)
    return tf.stack([tf.constant(seed, tf.int64), total])


def _static_rows(value: Any) -> int | None:
    """Return the static leading dimension of inputs; -1 if it is unknown while the graph is built."""
    if isinstance(value, tf.RaggedTensor):
        rows = value.nrows() if tf.executing_eagerly() else value.shape[0]
        return -1 if rows is None else int(rows)
    if isinstance(value, tf.SparseTensor) or tf.is_tensor(value):
        if value.shape.rank == 0 or value.dtype in (tf.resource, tf.variant):
            return None
        return -1 if value.shape.rank is None or value.shape[0] is None else int(value.shape[0])
    return None


def _num_rows(value: Any) -> Any:
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.nrows(), tf.int32)
    shape = value.dense_shape if isinstance(value, tf.SparseTensor) else tf.shape(value)
    return tf.cast(shape[0], tf.int32)


def _gathered(value: Any, order: Any, number: Any) -> Any:
    if isinstance(value, tf.SparseTensor):
        place = tf.cast(tf.math.invert_permutation(order), tf.int64)
        rows = tf.gather(place, value.indices[:, 0])
        indices = tf.concat([rows[:, None], value.indices[:, 1:]], axis=1)
        return tf.sparse.reorder(tf.SparseTensor(indices, value.values, value.dense_shape))
    gathered = tf.gather(value, order)
    if not isinstance(value, tf.RaggedTensor):
        gathered.set_shape(value.shape)
    return gathered


def applied(replay: Replay, body: Body, optimizer: str, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Collect one share's gradients; with the last share, their mean or sum; before it, nothing to apply."""
    if replay.taped:
        return pairs if body.share == -1 else []
    joined = _collected(replay, body, (optimizer, body.updates[optimizer]), [gradient for gradient, _ in pairs])
    return [(gradient, variable) for gradient, (_, variable) in zip(joined, pairs, strict=True)] if body.share == -1 else []


def taped(replay: Replay, body: Body, gradients: list[Any]) -> list[Any]:
    """Collect what a tape makes of one share; with the last share, their mean or sum; before it, the share's own."""
    body.num_taped += 1
    joined = _collected(replay, body, ("", body.num_taped), gradients)
    return joined if body.share == -1 else gradients


def _collected(replay: Replay, body: Body, maker: tuple[str, int], gradients: list[Any]) -> list[Any]:
    collected = body.collected.setdefault(maker, [])
    collected.append(gradients)
    number = 1 if replay.summed else len(collected)
    return [_joined(list(shares), number) for shares in zip(*collected, strict=True)]


def _joined(gradients: list[Any], number: int) -> Any:
    if gradients[0] is None:
        return None
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):  # side by side, as replicas' are summed
        values = tf.concat([gradient.values for gradient in gradients], 0) / number
        indices = tf.concat([gradient.indices for gradient in gradients], 0)
        return tf.IndexedSlices(values, indices, gradients[0].dense_shape)
    return tf.add_n([tf.convert_to_tensor(gradient) for gradient in gradients]) / number


def assign_initial(trace: Path, names: Names, copies: Sequence[Any], replica: int, change: Callable[[Array], Array]) -> None:
    """Start from the weights that another run started from, changed by a function."""
    values = next(iter(Trace(trace).variables("initial").values()), {})
    for variable, copy in copies:
        entry = values.get(names.of(variable))
        value = copy.read_value().numpy()
        if entry is not None and entry.array is not None and entry.array.is_complete:
            value, shard = entry.array.read(), shard_of(variable)
            value = value if shard is None else local_slice(value, shard, replica)
        copy.assign(change(value).astype(copy.dtype.as_numpy_dtype).reshape(copy.shape))  # a scalar may have one dimension


_OF_OTHER_CALLS = (
    "A replay needs rows and update in one call of Strategy.run, and this program takes gradients in one call (or several) and "
    "applies them in another, or outside."
)
_NO_ROWS = "A replay needs the rows of each step, and none were seen: no step was made, or its call of Strategy.run gets none."


class Rows:
    """Return the examples of another run's replicas, step after step."""

    def __init__(self, plan: Replay) -> None:
        trace = Trace(plan.trace)
        self._plan = plan
        self._steps: list[list[Step]] = [[step[replica] for replica in sorted(step)] for step in trace.calls()]
        self._stays: dict[int, bool] = {}  # by input whether it is the same on each replica in all steps
        every = [step for steps in self._steps for step in steps]
        examples = [step.inputs[place] for steps in self._steps for place in self._times(steps) for step in steps]
        if not all(array is not None and array.is_complete for array in examples):
            raise ValueError("A replay needs all rows: of large ones a part was kept, of sparse and ragged ones nothing.")
        if not any(step.row_inputs for step in every):
            raise ValueError(_OF_OTHER_CALLS if any(step.rows for step in every) else _NO_ROWS)
        self._calls: dict[int | None, int] = {}
        self._lock = threading.Lock()

    def batches(self, number: int, own: Mapping[Any, Array]) -> list[dict[Any, Array]]:
        """Return the inputs of a step share by share, with the recorded examples in place of a run's own.

        Args:
            number: The step's number.
            own: The run's own inputs in the order of its arguments.

        Returns:
            One for each share; nothing after the last recorded step.
        """
        if number >= len(self._steps):
            return []
        steps, order = self._steps[number], range(self._plan.shares)
        shares = [None] if self._plan.shares == 1 else list(reversed(order) if self._plan.backwards else order)
        shares = [0] if self._plan.part else shares
        given = [(place, key, value) for place, (key, value) in enumerate(own.items())]
        times = self._times(steps, [value.shape for value in own.values()])
        return [{key: self._input(steps, place, share, value, times) for place, key, value in given} for share in shares]

    def _input(self, steps: list[Step], place: int, share: int | None, own: Array, times: Mapping[int, int]) -> Array:
        """Return an input of a share: recorded examples; of others the run's own, or the recorded one where it is wanted."""
        if place in times:
            return np.asarray(self._rows(steps, place, share).astype(own.dtype))
        found = common_input(steps, place) if self._plan.inputs else None
        return own if found is None else found.astype(own.dtype)

    def call(self, body: Body, once: Call, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the program's function on the recorded examples: on their union, or share after share."""
        if self._plan.shares == 1 or self._plan.part:
            args, kwargs = self._replaced(args, kwargs, 0 if self._plan.part else None)
            return once(function, args, kwargs)
        results = []
        order = range(self._plan.shares)
        for number, share in enumerate(reversed(order) if self._plan.backwards else order):
            body.share = number if number < self._plan.shares - 1 else -1
            new_args, new_kwargs = self._replaced(args, kwargs, share)
            first_replica = share * (len(self._steps[0]) // self._plan.shares)
            with numbered(first_replica if self._plan.numbered else None):
                results.append(once(function, new_args, new_kwargs))
        body.share = None

        def joined(*values: Any) -> Any:
            if tf.is_tensor(values[-1]) and values[-1].shape.rank == 0 and is_floating(values[-1]):
                return tf.add_n(list(values)) / (1 if self._plan.summed else len(values))
            return values[-1]

        return tf.nest.map_structure(joined, *results)

    def _replaced(self, args: Any, kwargs: Any, share: int | None) -> tuple[Any, Any]:
        flat = tf.nest.flatten((args, kwargs))
        recorded = [i for i, value in enumerate(flat) if tf.is_tensor(value) and value.shape.rank != 0]
        like = self._steps[self._at(share)]
        times = self._times(like, [flat[position].shape for position in recorded])
        rows_at = [(place, position) for place, position in enumerate(recorded) if place in times]
        dtypes = [flat[position].dtype for _, position in rows_at]

        def rows() -> list[Any]:
            return self._next([place for place, _ in rows_at], share, dtypes)

        with graph_functions.on_cpu():
            values = tf.numpy_function(rows, [], dtypes)
        for (place, position), value in zip(rows_at, values, strict=True):
            value.set_shape(self._shape(like, place, share))
            flat[position] = value
        new_args, new_kwargs = tf.nest.pack_sequence_as((args, kwargs), flat)
        return new_args, new_kwargs

    def _at(self, share: int | None) -> int:
        """Return the index of the next recorded call; while a graph is built, of the first one for it."""
        return min(self._calls.get(share, 0), len(self._steps) - 1)

    def _chosen(self, steps: list[Step], share: int | None) -> list[Step]:
        """Return the replicas of one share: neighbors, in the order of hosts and devices."""
        if share is None:
            return steps
        each = len(steps) // self._plan.shares
        return steps[share * each : (share + 1) * each]

    def _next(self, places: list[int], share: int | None, dtypes: list[Any]) -> list[Any]:
        with self._lock:
            steps = self._steps[self._at(share)]
            self._calls[share] = self._calls.get(share, 0) + 1
        return [
            self._rows(steps, place, share).astype(dtype.as_numpy_dtype) for place, dtype in zip(places, dtypes, strict=True)
        ]

    def _rows(self, steps: list[Step], place: int, share: int | None) -> Any:
        if share is None or not self._plan.regrouped:
            return joined([_examples(step, place).read() for step in self._chosen(steps, share)])
        sizes = [sum(_examples(step, place).shape[0] for step in self._chosen(steps, k)) for k in range(self._plan.shares)]
        everything = joined([_examples(step, place).read() for step in steps])
        of_example = np.arange(len(everything)) // self._times(steps)[place]
        dealt = everything[np.argsort(of_example % self._plan.shares, kind="stable")]
        return np.split(dealt, np.cumsum(sizes)[:-1])[share]

    def _times(self, steps: Sequence[Step], own: Sequence[Any] = ()) -> dict[int, int]:
        """Return which inputs of a step have entries for each example, and how many.

        A vector of each replica's own may be as long by chance. So those of one device have as many, as far as shapes are
        known, and they are not the same in all steps.
        """
        shares = [{place: array for place, array in enumerate(step.inputs) if array is not None} for step in steps]
        counts = [len(step.rows or ()) for step in steps]
        several = entries_of_examples(shares, counts, lambda place: self._is_no_data(steps, place))
        shapes = enumerate(map(tf.TensorShape, own))
        known = {place: shape[0] for place, shape in shapes if shape.rank and shape[0] is not None}
        rows = next((known[place] for place in steps[0].row_inputs if place in known), None)
        several = {place: n for place, n in several.items() if rows is None or known.get(place, n * rows) == n * rows}
        return several | dict.fromkeys(steps[0].row_inputs, 1)

    def _is_no_data(self, steps: Sequence[Step], place: int) -> bool:
        """Return whether an input is the same on all replicas of a step, or on each replica in all steps."""
        if place not in self._stays:
            of_replicas = zip(*self._steps, strict=False)
            self._stays[place] = all(common_input(of_replica, place) is not None for of_replica in of_replicas)
        return self._stays[place] or common_input(steps, place) is not None

    def _shape(self, like: list[Step], place: int, share: int | None) -> list[int | None]:
        """Return the static shape of an input: the number of rows and each width, where it is the same in all such steps."""
        alike = [self._chosen(steps, share) for steps in self._steps if steps[0].row_inputs == like[0].row_inputs]
        shapes = [[_examples(step, place).shape for step in steps] for steps in alike]
        rows = {sum(shape[0] for shape in of_share) for of_share in shapes}
        widths = [{*sizes} for sizes in zip(*(shape[1:] for of_share in shapes for shape in of_share), strict=True)]
        return [sizes.pop() if len(sizes) == 1 else None for sizes in (rows, *widths)]


def common_input(steps: Sequence[Step], place: int) -> Array | None:
    """Return an input that is the same on all replicas of a step; None of others, and where it was not kept whole."""
    stored = [step.inputs[place] if place < len(step.inputs) else None for step in steps]
    values = [array.read() for array in stored if array is not None and array.is_complete]
    is_same = len(values) == len(stored) and all(np.array_equal(values[0], value) for value in values[1:])
    return values[0] if values and is_same else None


def _examples(step: Step, place: int) -> StoredArray:
    array = step.inputs[place]
    assert array is not None
    return array
