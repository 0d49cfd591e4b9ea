"""Prevent a hang of TensorFlow 2.21 at the end of an epoch: datasets run without the tuning thread.

tf.data starts a thread for each iterator that tunes it, first after 10 ms, then after twice as long each time, up to a minute.
An iterator that ends wakes that thread and waits for it; but the flag that says so is set after the wake-up, so that on a busy
machine the thread sees none and sleeps on, and the iterator (there is one for each device) waits up to a minute. Emulated
devices have no spare cores to tune for: where a program does not ask for the tuning itself, it is off, and what it would have
chosen has tf.data's own fixed defaults.
"""

from __future__ import annotations

import functools
from typing import Any

from emulate.devices import upstream


def leave_datasets_untuned() -> None:
    """Change what every iterator makes of its dataset; call once in a process."""
    cls = upstream.dataset_class()
    real = cls._apply_debug_options

    @functools.wraps(real)
    def apply(self: Any) -> Any:
        import tensorflow as tf

        dataset = real(self)
        if dataset.options().autotune.enabled is not None:
            return dataset
        options = tf.data.Options()
        options.autotune.enabled = False
        return dataset.with_options(options)

    cls._apply_debug_options = apply
