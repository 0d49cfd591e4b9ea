"""What tells rows apart, and which numbers are looked at."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from emulate.probe.rows import row_names
from emulate.probe.variables import is_floating


def test_rows_of_one_string_each_are_told_apart() -> None:
    part: Any = {"dense": np.array([b"oslo", b"rome", b"oslo"], object)}
    first, second, third = row_names([part])
    assert first == third != second


def test_a_variable_of_keras_is_a_floating_number_as_a_tensor_is() -> None:
    assert is_floating(keras.Variable(1.0))
    assert is_floating(tf.constant(1.0, tf.bfloat16))
    assert not is_floating(keras.Variable(1, dtype="int32"))
    assert not is_floating(tf.constant("a"))
