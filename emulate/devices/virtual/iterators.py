"""Deal the batches of virtual replicas from one iterator, in the order in which TensorFlow deals them to real devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from emulate.devices import upstream


def deal_from_one_iterator() -> None:
    """Change the iterator over several devices; call once in a process.

    TensorFlow 2.21 makes an iterator with threads and buffers for each device, which takes 35 ms a replica.
    """
    cls = upstream.multi_device_iterator()
    real = cls.__init__

    @functools.wraps(real)
    def init(self: Any, dataset: Any = None, devices: Any = None, *args: Any, **kwargs: Any) -> None:
        if dataset is None:
            real(self, dataset, devices, *args, **kwargs)
            return
        iterator = iter(dataset)
        self._element_spec, self._devices = dataset.element_spec, devices
        self._source_device = kwargs.get("source_device", "/cpu:0")
        self._multi_device_iterator_resource = iterator._iterator_resource
        self._device_iterators = [iterator] * len(devices)

    def get_next(self: Any, device: Any = None) -> Any:
        if device is not None:
            return self._device_iterators[self._devices.index(device)].get_next()
        return _one_after_the_other([iterator.get_next for iterator in self._device_iterators], _ops_of)

    def get_next_as_optional(self: Any) -> Any:
        following = [iterator.get_next_as_optional for iterator in self._device_iterators]
        return _one_after_the_other(following, lambda optional: [optional._variant_tensor.op])

    cls.__init__, cls.get_next, cls.get_next_as_optional = init, get_next, get_next_as_optional


def _one_after_the_other(following: list[Callable[[], Any]], ops_of: Callable[[Any], list[Any]]) -> list[Any]:
    """Call each; in a graph, where the replicas' iterators are inputs of their own, in this order."""
    import tensorflow as tf

    made: list[Any] = []
    for call in following:
        with tf.control_dependencies([] if tf.executing_eagerly() or not made else ops_of(made[-1])):
            made.append(call())
    return made


def _ops_of(element: Any) -> list[Any]:
    import tensorflow as tf

    return [tensor.op for tensor in tf.nest.flatten(element, expand_composites=True)[:1]]
