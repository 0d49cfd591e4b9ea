"""Call the user's functions once for each example, with many examples in one call of a compiled function.

A `tf.data` map dispatches every example separately (about 30 us). Here the examples of a host's share go through one
`tf.map_fn`, which is two to three times faster. The function is traced once, not in each epoch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from types import CellType
from typing import Any

import numpy as np
import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.pipelines.hashing import AUGMENTATION, Integers, words
from gpudist_core.pipelines.sources.access import Rows, stacked

# How many rows of one share are in work at the same time.
_PARALLEL = 16
# Bytes above which an array does not belong in a graph: as a constant 256 MB take 17.5 s, and above 2 GB TensorFlow raises.
_LARGE = 1 << 24
_EMPTY = CellType()
# Operations that call Python, which may draw from any generator there is.
_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
# How operations begin that draw, or write a variable: they would give other examples on another topology, or after a restore.
_STATEFUL = (
    *("Random", "TruncatedNormal", "ParameterizedTruncatedNormal", "Multinomial", "SampleDistorted", "Stateful", "Rng"),
    *("NonDeterministic", "Assign", "ResourceScatter"),
)
_TOLERANCE = 1e-3  # of numbers that Python computes twice, with threads that add up in no fixed order


@dataclass(frozen=True)
class Stage:
    """Describe a function of an example, or the cache (no function).

    Attributes:
        function: The function applied to each example; None is the cache.
        random: Whether the function takes a seed.
    """

    function: Callable[..., Any] | None
    random: bool = False


class Mapper:
    """Apply functions to each of many examples, one after the other.

    Args:
        stages: The functions.
        row: The structure of an example, a `tf.TensorSpec` for each component.
        first: The number of random functions before these, so that each draws its own numbers.
    """

    def __init__(self, stages: Sequence[Stage], row: Any, first: int) -> None:
        for stage in stages:
            _check_closure(stage.function)
        self._seeded = [first + i for i in range(sum(stage.random for stage in stages))]
        self._stages = stages
        self._all: Any = None
        self._in_python: list[str] = []
        self.spec = row
        if stages:
            self._trace(row)

    def _trace(self, row: Any) -> None:
        inputs = [*tf.nest.flatten(row), *(tf.TensorSpec((2,), tf.int32) for _ in self._seeded)]
        before = _drawn_in_python()
        try:
            self._one = self._traced(row, inputs)
        except TypeError as error:
            if "Binding inputs to tf.function failed" not in str(error):
                raise
            raise UsageError(
                "A map function must take the components of an example"
                + (", and seed= with random=True" if self._seeded else ""),
                "Give it one parameter for each.",
                functions=[stage.function for stage in self._stages],
                row=row,
            ) from error
        drawn = [name for name, state in _drawn_in_python().items() if state != before[name]]
        # Another thread may have drawn in the meantime: a draw of the map makes it another one each time it is traced.
        if drawn and _operations(self._traced(row, inputs)) == _operations(self._one):
            drawn = []
        operations = {node.op for node in _nodes(self._one)}
        # What a call of another function does is looked at in that function.
        stateful = sorted(op for op in operations if op.startswith(_STATEFUL) and op != "StatefulPartitionedCall")
        if stateful or drawn:
            raise _draws([*stateful, *drawn])
        self._in_python = sorted(operations & {*_PYTHON})
        self.spec = tf.nest.map_structure(lambda value: tf.TensorSpec(value.shape, value.dtype), self._one.structured_outputs)
        outputs = tf.nest.flatten(self.spec)

        def map_rows(*values: Any) -> Any:
            return tf.map_fn(
                lambda values_of_row: tf.nest.flatten(self._one(*values_of_row)),
                list(values),
                fn_output_signature=outputs,
                parallel_iterations=_PARALLEL,
            )

        batches = [tf.TensorSpec((None, *spec.shape), spec.dtype) for spec in inputs]
        self._all = tf.function(map_rows, autograph=False, input_signature=batches).get_concrete_function()

    def _traced(self, row: Any, inputs: list[Any]) -> Any:
        return tf.function(self._chain(row), autograph=False).get_concrete_function(*inputs)

    def _chain(self, row: Any) -> Callable[..., Any]:
        # A function of its own for each stage: so autograph sees the user's code, as it does in tf.data.
        compiled = [tf.function(stage.function) for stage in self._stages]

        def chain(*values: Any) -> Any:
            flat = values[: len(values) - len(self._seeded)]
            seeds = iter(values[len(flat) :])
            result = tf.nest.pack_sequence_as(row, flat)
            for stage, function in zip(self._stages, compiled, strict=True):
                arguments = result if isinstance(result, tuple) else (result,)
                result = function(*arguments, **({"seed": next(seeds)} if stage.random else {}))
                result = tf.nest.map_structure(_tensor, result)
            return result

        return chain

    def __call__(self, parts: Rows, seed: int, epoch: int, rows: Integers, repeats: Integers) -> Rows:
        """Map examples.

        Args:
            parts: The examples, flattened.
            seed: The seed of the pipeline.
            epoch: The number of the epoch.
            rows: The number of each example.
            repeats: How often each example was drawn before in this epoch.

        Returns:
            The mapped examples, flattened.

        Raises:
            UsageError: If mapped examples have different shapes, or Python code returns another example each time.
        """
        if self._all is None:
            return parts
        if not len(rows):
            return stacked([], tf.nest.flatten(self.spec))
        words_of_seeds = [words(seed, AUGMENTATION, number, epoch, rows, repeats) for number in self._seeded]
        seeds = [keys.view(np.int32).reshape(-1, 2) for keys in words_of_seeds]
        try:
            with tf.device("CPU:0"):
                given = [tf.convert_to_tensor(part) for part in [*parts, *seeds]]
                mapped = list(self._all(*given))
                in_python, self._in_python = self._in_python, []
                if in_python:  # a graph does not show what Python draws: the first example is mapped a second time
                    again = tf.nest.flatten(self._one(*(part[0] for part in given)))
                    if not all(_is_alike(second, first[0]) for second, first in zip(again, mapped, strict=True)):
                        raise _draws(in_python)
                return mapped
        except tf.errors.InvalidArgumentError as error:
            # What map_fn says of rows that it cannot stack names nothing that the user wrote.
            if "TensorListStack" not in error.message:
                raise
            shapes = [tuple(spec.shape) for spec in tf.nest.flatten(self.spec)]
            raise UsageError(
                "A map function must return examples of one shape", "Pad or crop them in the map.", shapes=shapes
            ) from error


def _is_alike(first: Any, second: Any) -> bool:
    first, second = np.asarray(first), np.asarray(second)
    if first.dtype.kind in "iubOSU":
        return bool((first == second).all())
    first, second = (value.astype(np.complex128 if value.dtype.kind == "c" else np.float64) for value in (first, second))
    return bool(np.allclose(first, second, _TOLERANCE, _TOLERANCE, equal_nan=True))


def _tensor(value: Any) -> Any:
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise UsageError(
            "A map function must return dense tensors", "Make them dense, with one shape for all examples.", value=value
        )
    if value is None or isinstance(value, tf.data.Dataset):
        raise UsageError("A map function must return tensors", "Return the components of the example.", value=value)
    return tf.convert_to_tensor(value)


def _check_closure(function: Any) -> None:
    """Refuse large arrays from outside.

    TensorFlow copies them into the graph slowly (256 MB in 17 s), above 2 GB not at all.
    """
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    if code is None:
        return
    outside = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True) if cell != _EMPTY}
    outside |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    drawing = [name for name, value in outside.items() if isinstance(value, (np.random.Generator, np.random.RandomState))]
    if drawing:
        raise _draws(drawing)
    large = {name: value.nbytes for name, value in outside.items() if isinstance(value, np.ndarray) and value.nbytes > _LARGE}
    if large:
        raise UsageError(
            f"A map function must not use arrays above {_LARGE} bytes from outside",
            "Convert the array to a tensor once, before the map: tf.constant(array).",
            function=function.__name__,
            nbytes=large,
        )


def _drawn_in_python() -> dict[str, Any]:
    """Return the states of Python's and NumPy's generators: they would draw only once, while the map is traced."""
    kind, keys, *rest = np.random.get_state()
    return {"random": random.getstate(), "numpy.random": (kind, np.asarray(keys).tobytes(), *rest)}


def _nodes(concrete: Any) -> list[Any]:
    definition = concrete.graph.as_graph_def()
    return [*definition.node, *(node for function in definition.library.function for node in function.node_def)]


def _operations(concrete: Any) -> list[tuple[str, bytes]]:
    """Return the operations, with the values of constants."""
    return sorted((node.op, node.attr["value"].SerializeToString() if node.op == "Const" else b"") for node in _nodes(concrete))


def _draws(operations: list[str]) -> UsageError:
    return UsageError(
        "A map function must depend on the example only, so that it is the same on every topology",
        "For a random function use map(function, random=True). It gets seed=, a pair for tf.random.stateless_* and "
        "tf.image.stateless_*, made from the seed, the epoch and the example.",
        operations=operations,
    )


class RowCache:
    """Cache the examples that this host has made, each once. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        # Numbers of rows may be far apart: where each lies is looked up.
        self._places: dict[int, int] = {}
        self._parts: Rows = []

    def get(self, rows: Integers, make: Callable[[Integers], Rows]) -> Rows:
        """Return the examples with these numbers.

        Args:
            rows: Their numbers.
            make: A function that makes the examples at some places of `rows`. It is called for those that are not cached yet.

        Returns:
            The examples, flattened.
        """
        numbers = rows.tolist()
        with self._lock:
            missing = np.array([i for i, number in enumerate(numbers) if number not in self._places], np.int64)
        if not numbers:
            return make(missing)
        new_rows = [np.asarray(part) for part in make(missing)] if len(missing) else []
        with self._lock:
            if new_rows:
                self._keep([numbers[i] for i in missing], new_rows)
            places = [self._places[number] for number in numbers]
            return [part[places] for part in self._parts]

    def _keep(self, numbers: list[int], rows: Rows) -> None:
        # Another thread may have made the same rows meanwhile: then they are the same, and lie where it put them.
        for number in numbers:
            self._places.setdefault(number, len(self._places))
        if not self._parts:
            self._parts = [np.empty((0, *part.shape[1:]), part.dtype) for part in rows]
        held = len(self._parts[0])
        if len(self._places) > held:
            more = max(len(self._places) - held, held)
            self._parts = [np.concatenate([part, np.empty((more, *part.shape[1:]), part.dtype)]) for part in self._parts]
        for part, values in zip(self._parts, rows, strict=True):
            part[[self._places[number] for number in numbers]] = values
