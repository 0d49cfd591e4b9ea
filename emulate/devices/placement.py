"""Place operations: every device name that reaches TensorFlow passes through `DeviceNames`.

This holds for everybody, TensorFlow's own code included: a GPU's name can only have come from the program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from emulate.devices import upstream
from emulate.devices.names import DeviceNames


def translate_placement(names: DeviceNames) -> None:
    """Have `tf.device`, `Graph.device`, strategies and datasets place on the logical CPU that a name means."""
    context_class, graph_class = upstream.context_class(), upstream.graph_class()
    context_class.device = _translating_method(context_class.device, names)
    graph_class.device = _translating_method(graph_class.device, names)
    util = upstream.device_util()
    util.canonicalize = _translating(util.canonicalize, names)
    prefetching = upstream.prefetching()
    for module in (prefetching, *upstream.data_modules()):
        module.copy_to_device = _translating(prefetching.copy_to_device, names)


def _translating_method(real: Callable[..., Any], names: DeviceNames) -> Callable[..., Any]:
    @functools.wraps(real)
    def device(self: Any, name: Any) -> Any:
        return real(self, _of_function(name, names) if callable(name) else names.real(name))

    return device


def _translating(real: Callable[..., Any], names: DeviceNames) -> Callable[..., Any]:
    """Translate the arguments of a function whose first argument, and perhaps others, are devices."""

    @functools.wraps(real)
    def translated(*args: Any, **kwargs: Any) -> Any:
        return real(*map(names.real, args), **{key: names.real(value) for key, value in kwargs.items()})

    return translated


def _of_function(choose: Callable[..., Any], names: DeviceNames) -> Callable[..., Any]:
    """Handle TF 1's device functions, which choose a device for each operation."""

    @functools.wraps(choose)
    def chosen(operation: Any) -> Any:
        return names.real(choose(operation))

    return chosen
