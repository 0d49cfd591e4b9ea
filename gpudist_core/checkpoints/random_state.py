"""Save the random states of this process that belong to no model: Python's, NumPy's, TensorFlow's and Keras's.

TensorFlow does not tell what a stateful operation inside a tf.function has drawn (`tf.random.uniform` there). Use a
`tf.random.Generator` or stateless draws if a restored run must continue with the same numbers.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def state() -> dict[str, Any]:
    """Return the states as numbers, lists and arrays."""
    from gpudist_core.upstream import run_state

    version, words, gauss = random.getstate()
    keras = run_state.keras_global_generator()
    return {
        "python": [version, np.array(words, np.uint32), gauss],
        "numpy": np.random.get_state(legacy=False),
        "tensorflow": run_state.op_seeds(),
        "keras": None if keras is None else np.asarray(keras.state),
    }


def restore(kept: dict[str, Any]) -> None:
    """Restore the random states, so that draws continue where `state` was taken.

    Args:
        kept: The result of `state`.
    """
    from gpudist_core.upstream import run_state

    version, words, gauss = kept["python"]
    random.setstate((int(version), tuple(int(word) for word in words), gauss))
    np.random.set_state(kept["numpy"])
    run_state.restore_op_seeds(kept["tensorflow"])
    if kept["keras"] is not None:
        run_state.keras_global_generator(make=True).state.assign(kept["keras"])
