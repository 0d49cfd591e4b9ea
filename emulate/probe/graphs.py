"""Record what a program builds into its graphs and pipelines: large constants, and random draws that a cache keeps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from emulate.probe import held, upstream
from emulate.probe.point import around

if TYPE_CHECKING:
    from emulate.probe.probe import Probe

LARGE_BYTES = 8 << 20
"""From this size on a constant is told: each copy of it is written into a graph, and read again by whatever rewrites that."""


def install(probe: Probe) -> None:
    """Wrap what makes the constants of graphs, and `cache`, `enumerate` and `map` of datasets."""
    _wrap_constants(probe)
    _wrap_cache(probe)
    remember_first_numbers()
    _wrap_map(probe)


def _wrap_constants(probe: Probe) -> None:
    module, name = upstream.constant_maker()

    @around(module, name)
    def create(original: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = original(*args, **kwargs)
        held.remember_constant(probe, tensor)
        size = _num_bytes(tensor)
        if size >= LARGE_BYTES:
            _remember(probe, tensor, size)
        return tensor


def _num_bytes(tensor: Any) -> int:
    return math.prod(tensor.shape.as_list()) * int(tensor.dtype.size or 0) if tensor.shape.rank is not None else 0


def _remember(probe: Probe, tensor: Any, size: int) -> None:
    """Count a constant under the line of the program that makes it."""
    shape, dtype, where = tensor.shape.as_list(), tensor.dtype.name, upstream.line_of(tensor.op)
    constants = probe.facts.constants
    same = next((c for c in constants if (c["shape"], c["dtype"], c["where"]) == (shape, dtype, where)), None)
    if same is None:
        constants.append({"shape": shape, "dtype": dtype, "where": where, "bytes": size, "copies": 1})
    else:
        same["copies"] += 1


def _wrap_cache(probe: Probe) -> None:
    cls = upstream.dataset_class()

    @around(cls, "cache")
    def cache(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        stages = probe.facts.cached
        stages += [what for what in upstream.random_stages(self) if what not in stages]
        return original(self, *args, **kwargs)


def _wrap_map(probe: Probe) -> None:
    """Record what each function that makes examples computes with, and the seeds if it draws from TensorFlow's generators."""
    cls = upstream.dataset_class()

    @around(cls, "map")
    def map_(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        dataset = original(self, *args, **kwargs)
        held.remember_mapped(probe, dataset)
        stage = upstream.drawing_stage(dataset)
        if stage is not None:
            probe.facts.note("drawing", stage)
        return dataset


def remember_first_numbers() -> None:
    """Have each dataset know the number that its `enumerate` begins with."""
    cls = upstream.dataset_class()

    @around(cls, "enumerate")
    def enumerate_(original: Any, self: Any, start: Any = 0, *args: Any, **kwargs: Any) -> Any:
        dataset = original(self, start, *args, **kwargs)
        setattr(dataset, upstream.FIRST_NUMBER, str(start))
        return dataset
