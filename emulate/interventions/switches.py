"""Switch a suspect off, so that the absence of what it does confirms it; and enlarge learning rates."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from emulate import upstream
from emulate.imports import tf
from emulate.interventions import batch_norm
from emulate.point import around, instead_of
from emulate.recorder import IN_32_BITS


def switch_layers(package: str, switches: Collection[str]) -> None:
    """Change the layers and policies of an imported Keras as the switches say."""
    batch_norm.install(package, switches)
    if IN_32_BITS in switches:
        for cls in upstream.policy_classes():

            @around(cls, "_parse_name")
            def parse_name(original: Any, self: Any, name: Any) -> Any:  # the name stays, and a loss is scaled as before
                return tuple("float32" if dtype in ("float16", "bfloat16") else dtype for dtype in original(self, name))

    if "no-regularization" in switches:
        for cls in upstream.layer_classes():

            @instead_of(cls, "losses")
            def losses(original: Any, self: Any) -> Any:
                return [0.0 * loss for loss in original(self)]


def enlarge_rates(times: float) -> None:
    """Make the learning rate of all Keras 3 optimizers so many times as large."""
    for cls, method in upstream.rate_makers():

        @around(cls, method)
        def current(original: Any, self: Any) -> Any:
            return tf.convert_to_tensor(original(self)) * times
