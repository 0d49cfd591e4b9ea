"""What tells rows apart, and which numbers are looked at."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from emulate.trace import joined, row_names
from emulate.upstream import is_floating


def test_rows_of_one_string_each_are_told_apart() -> None:
    part: Any = {"dense": np.array([b"oslo", b"rome", b"oslo"], object)}
    first, second, third = row_names([part])
    assert first == third != second


def test_a_variable_of_keras_is_a_floating_number_as_a_tensor_is() -> None:
    assert is_floating(keras.Variable(1.0))
    assert is_floating(tf.constant(1.0, tf.bfloat16))
    assert not is_floating(keras.Variable(1, dtype="int32"))
    assert not is_floating(tf.constant("a"))


LENGTHS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=6)


@given(LENGTHS, st.integers(0, 3), st.sampled_from(["int32", "float32", "float64"]))
def test_an_example_has_one_name_however_wide_its_batch_is_padded_and_others_have_others(
    examples: list[list[int]], more: int, dtype: str
) -> None:
    def batch(width: int) -> Any:
        return {"dense": np.array([example + [0] * (width - len(example)) for example in examples], dtype)}

    longest = max(map(len, examples))
    names = row_names([batch(longest)])
    assert names == row_names([batch(longest + more)])
    assert len({*names}) == len({tuple(example) for example in examples})


@given(LENGTHS)
def test_rows_of_several_widths_are_joined_as_padded_batch_joins_them(examples: list[list[int]]) -> None:
    whole = tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=tf.TensorSpec([None], tf.int32))
    (expected,) = whole.padded_batch(len(examples)).as_numpy_iterator()
    assert np.array_equal(joined([np.array([example], "int32") for example in examples]), expected)
    texts = [np.array([[str(number).encode() for number in example]], object) for example in examples]
    assert [[text for text in row if text] for row in joined(texts)] == [list(text[0]) for text in texts]
    assert joined([np.ones(2), np.zeros(0)]).tolist() == [1, 1]
