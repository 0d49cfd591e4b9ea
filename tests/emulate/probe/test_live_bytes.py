from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from emulate.evaluate.costs import LiveBytes, highest

KIB = 256  # float32 numbers


def graph_of(function: Callable[..., Any], rows: int, width: int = KIB) -> Any:
    return tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec([rows, width])).graph


def peak(graph: Any, *, gradients: frozenset[str] = frozenset(), reduced: bool = False) -> float:
    return float(LiveBytes(graph, 1, None, gradients).moments(reduced=reduced)[:, 0].max()) / 1024


def test_element_wise_operations_share_a_buffer_that_nothing_else_needs() -> None:
    def chain(x: Any) -> Any:
        return tf.nn.relu(tf.exp(tf.sin(tf.matmul(x, x))))

    def kept(x: Any) -> Any:
        made = tf.matmul(x, x)
        return tf.exp(made) + tf.sin(made)

    assert peak(graph_of(chain, KIB)) == KIB
    assert peak(graph_of(kept, KIB)) == 2 * KIB


def test_a_buffer_is_free_after_its_last_use() -> None:
    def products(x: Any) -> Any:
        for _ in range(5):
            x = tf.matmul(x, x)
        return x

    assert peak(graph_of(products, KIB)) == 2 * KIB


def test_a_reshaped_tensor_is_no_second_buffer() -> None:
    def reshaped(x: Any) -> Any:
        return tf.reshape(tf.identity(tf.reshape(tf.cumsum(x), [-1])), [KIB, KIB])

    assert peak(graph_of(reshaped, KIB)) == KIB


def test_variables_and_constants_are_not_counted_but_a_copy_of_a_variable_that_is_still_read_is() -> None:
    variable = tf.Variable(tf.zeros([1, KIB]))

    def assigned(x: Any) -> Any:
        before = variable.read_value()
        with tf.control_dependencies([variable.assign_add(tf.cumsum(x))]):
            return tf.cumsum(before)

    def read(x: Any) -> Any:
        return variable + tf.constant(np.ones([1, KIB], np.float32)) + x

    assert peak(graph_of(read, 1)) == 1
    assert peak(graph_of(assigned, 1)) == 2


def test_several_devices_need_all_gradients_before_the_first_update() -> None:
    variables = [tf.Variable(tf.zeros([1, KIB])) for _ in range(4)]
    names = []

    def step(x: Any) -> Any:
        for variable in variables:
            gradient = tf.cumsum(x)
            names.append(gradient.name)
            variable.assign_add(tf.cumsum(gradient))
        return x

    graph = graph_of(step, 1)
    assert peak(graph, gradients=frozenset(names)) == 2
    assert peak(graph, gradients=frozenset(names), reduced=True) == 5


def test_bytes_of_another_batch_follow_from_two_graphs() -> None:
    def step(x: Any) -> Any:
        return tf.matmul(x, x, transpose_a=True)

    def body(x: Any) -> Any:
        return step(tf.cumsum(x))

    half, whole, large = (graph_of(body, rows) for rows in (4, 8, 100))
    moments = LiveBytes(whole, 8, (half, 4), frozenset()).moments(reduced=False)
    fixed, each, floats = moments[moments.sum(axis=1).argmax()]
    assert (fixed, each, floats) == (1024 * KIB, 1024, 1024)
    assert (fixed + 100 * each) / 1024 == peak(large)


def test_operations_that_hide_their_tensors_are_named() -> None:
    def looped(x: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * 2), [0, x])

    def unknown(x: Any) -> Any:
        return tf.boolean_mask(x, x[:, 0] > 0)

    assert LiveBytes(graph_of(looped, 2), 2, None, frozenset()).uncounted >= {"StatelessWhile"}
    assert "Where" in LiveBytes(graph_of(unknown, 2), 2, None, frozenset()).uncounted


LINES = st.lists(st.tuples(*[st.integers(0, 1000).map(float)] * 2, st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=20)


@given(LINES, st.integers(0, 2000))
def test_what_is_kept_of_all_moments_has_the_peak_of_each_batch(lines: list[tuple[float, float, float]], batch: int) -> None:
    moments = np.array([(fixed, each, each * share) for fixed, each, share in lines])
    for half in (0.0, 0.5):
        peaks = [
            max(fixed + batch * (each - half * short) for fixed, each, short in some) for some in (moments, highest(moments))
        ]
        assert peaks[0] == peaks[1]
