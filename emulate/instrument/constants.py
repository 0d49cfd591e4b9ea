"""Record what a host computes with besides its examples and variables: constants, captured tensors and tables.

They are those of its step, and of the functions that make its rows. Also recorded is what a program builds into its graphs and
pipelines: large constants, and random draws that a cache keeps.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulate import upstream
from emulate.imports import tf
from emulate.instrument import draws
from emulate.point import around
from emulate.recorder import Body, Recorder, current_body
from emulate.recorder.lines import stack_lines
from emulate.trace import TABLE

_FEWEST_WHOLE = 16
"""So many whole numbers are data; fewer are a shape, an axis, the number of a replica or a collective's key."""
_LARGEST = 64 << 20
"""Bytes from which on a tensor is not looked into."""
_MOST = 500
"""Places of which values are kept."""
_MOST_ENTRIES = 1 << 20
"""Entries beyond which a table is not looked into."""
_FIRST = 3
"""Numbers of an array, and entries of a table, that are told."""


def remember_constant(recorder: Recorder, tensor: Any) -> None:
    """Store the value of a new constant of a graph if it belongs to a replica's step and is the program's own."""
    body = current_body()
    if body is None or draws.are_unwatched() or not _is_looked_at(recorder, body) or not _may_be_data(tensor):
        return
    value = tf.get_static_value(tensor)
    if value is not None:
        _remember_values(recorder.facts.held, stack_lines.place_of(tensor.op), np.asarray(value))


def remember_captured(recorder: Recorder, body: Body) -> None:
    """Store the values that a replica's step captures, except for variables: of the first replica of one of several hosts."""
    if body.graph is not None and _is_looked_at(recorder, body):
        _remember_closed_over(recorder.facts.held, body.graph, "")
        recorder.write_facts()


def remember_mapped(recorder: Recorder, dataset: Any) -> None:
    """Store the values that a function which makes examples computes with, except for variables.

    Args:
        recorder: What records.
        dataset: What `Dataset.map` returned.
    """
    if not recorder.several_hosts:
        return
    mapped = recorder.facts.mapped
    for function, graph in upstream.functions_of(dataset):
        where = _line_of(function)
        for operation in graph.get_operations():
            if operation.type == "Const" and _may_be_data(operation.outputs[0]):
                _remember_values(mapped, where, np.asarray(tf.get_static_value(operation.outputs[0])))
        _remember_closed_over(mapped, graph, where)


def _line_of(function: Any) -> str:
    """Return where a function is defined; empty for a callable object."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or upstream.is_library(code.co_filename):
        return ""
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def _remember_closed_over(held: dict[str, list[str]], graph: Any, where: str) -> None:
    for tensor, _ in getattr(graph, "captures", ()):
        if isinstance(tensor, tf.__internal__.EagerTensor) and _may_be_data(tensor):
            _remember_values(held, where, tensor.numpy())
    for kind, text in _tables_of(graph):
        _keep(held, f"{where}|{TABLE}|{kind}", text)


def _tables_of(graph: Any) -> Iterator[tuple[str, str]]:
    """Yield the types and the content of each table that a function captures for lookups.

    Of what types a table is only its lookups tell; to export it as another one ends the process (TensorFlow 2.21).
    """
    outside = {id(inner): outer for outer, inner in getattr(graph, "captures", ())}
    for operation in graph.get_operations():
        table = outside.get(id(operation.inputs[0])) if operation.type == "LookupTableFindV2" else None
        if isinstance(table, tf.__internal__.EagerTensor):
            key, value = operation.get_attr("Tin"), operation.get_attr("Tout")
            with tf.init_scope():
                if int(tf.raw_ops.LookupTableSizeV2(table_handle=table)) > _MOST_ENTRIES:
                    continue
                keys, values = tf.raw_ops.LookupTableExportV2(table_handle=table, Tkeys=key, Tvalues=value)
            pairs = sorted(zip(values.numpy().tolist(), keys.numpy().tolist(), strict=True))
            yield f"{key.name} to {value.name}", _pairs_told(pairs)


def _is_looked_at(recorder: Recorder, body: Body) -> bool:
    return recorder.several_hosts and body.replica == recorder.first_replica


def _may_be_data(tensor: Any) -> bool:
    dtype, shape = tensor.dtype, tensor.shape
    if shape.rank is None or not (dtype.is_floating or dtype.is_integer) or dtype.is_quantized:
        return False
    count = math.prod(shape.as_list())
    return 0 < count * int(dtype.size or 1) <= _LARGEST and (bool(dtype.is_floating) or count >= _FEWEST_WHOLE)


def _remember_values(held: dict[str, list[str]], where: str, value: NDArray[Any]) -> None:
    if value.size > 1 and bool(np.all(value == value.flat[0])):
        return  # zeros and ones in the shape of something, of which hosts may have other numbers of rows
    _keep(held, f"{where}|{value.dtype.name}|{'x'.join(map(str, value.shape[1:])) if value.ndim else 'number'}", _told(value))


def _keep(held: dict[str, list[str]], place: str, text: str) -> None:
    if place in held or len(held) < _MOST:
        texts = held.setdefault(place, [])
        texts += [text] if text not in texts else []


def _told(value: NDArray[Any]) -> str:
    first = ", ".join(f"{float(number):.6g}" for number in value.flat[:_FIRST])
    if value.ndim == 0:
        return f"{float(value)!r}"
    digest = hashlib.blake2b(value.tobytes(), digest_size=6).hexdigest()
    return f"{first}{', ...' if value.size > _FIRST else ''} (shape {list(value.shape)}, {digest})"


def _pairs_told(pairs: list[tuple[Any, Any]]) -> str:
    words = [f"{key.decode(errors='replace') if isinstance(key, bytes) else key} for {value}" for value, key in pairs[:_FIRST]]
    digest = hashlib.blake2b(repr(pairs).encode(), digest_size=6).hexdigest()
    return f"{', '.join(words)}{', ...' if len(pairs) > _FIRST else ''} ({len(pairs)} entries, {digest})"


LARGE_BYTES = 8 << 20
"""From this size on a constant is told: each copy of it is written into a graph, and read again by whatever rewrites that."""


def install(recorder: Recorder) -> None:
    """Wrap what makes the constants of graphs, and `cache`, `enumerate` and `map` of datasets."""
    facts, dataset_class = recorder.facts, upstream.dataset_class()

    @around(*upstream.constant_maker())
    def create(original: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = original(*args, **kwargs)
        remember_constant(recorder, tensor)
        size = math.prod(tensor.shape.as_list()) * int(tensor.dtype.size or 0) if tensor.shape.rank is not None else 0
        if size >= LARGE_BYTES:
            shape, dtype, where = tensor.shape.as_list(), tensor.dtype.name, stack_lines.place_of(tensor.op)
            same = next((c for c in facts.constants if (c["shape"], c["dtype"], c["where"]) == (shape, dtype, where)), None)
            if same is None:
                facts.constants.append({"shape": shape, "dtype": dtype, "where": where, "bytes": size, "copies": 1})
            else:
                same["copies"] += 1
        return tensor

    @around(dataset_class, "cache")
    def cache(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        facts.add("cached", *upstream.random_stages(self))
        return original(self, *args, **kwargs)

    @around(dataset_class, "map")
    def map_(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        dataset = original(self, *args, **kwargs)
        remember_mapped(recorder, dataset)
        stage = upstream.drawing_stage(dataset)
        if stage is not None:
            facts.add("drawing", stage)
        return dataset

    remember_first_numbers()


def remember_first_numbers() -> None:
    """Have each dataset know the number that its `enumerate` begins with."""

    @around(upstream.dataset_class(), "enumerate")
    def enumerate_(original: Any, self: Any, start: Any = 0, *args: Any, **kwargs: Any) -> Any:
        dataset = original(self, start, *args, **kwargs)
        setattr(dataset, upstream.FIRST_NUMBER, str(start))
        return dataset
