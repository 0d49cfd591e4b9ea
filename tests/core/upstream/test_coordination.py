"""The private names that parameter servers rest on: a test that fails here says what upstream has changed."""

from __future__ import annotations


def test_a_sharded_variable_still_cannot_be_read_as_an_array() -> None:
    """Once it can, `let_be_read` can go."""
    from tensorflow.python.distribute.sharded_variable import ShardedVariable

    assert not hasattr(ShardedVariable, "__array__")
    assert isinstance(ShardedVariable.variables, property)


def test_a_parameter_server_strategy_still_counts_its_tasks() -> None:
    import inspect

    import tensorflow as tf

    source = inspect.getsource(tf.distribute.ParameterServerStrategy)
    assert "_num_workers" in source
    assert "_num_ps" in source


def test_a_seed_generator_still_advances_by_one_for_each_draw() -> None:
    import keras
    import numpy as np
    import tensorflow as tf

    from gpudist_core.upstream.strategies import advance_seeds, reading_seeds

    one, other = keras.random.SeedGenerator(3), keras.random.SeedGenerator(3)
    drawn = [np.asarray(one.next()) for _ in range(3)]
    with reading_seeds(tf.constant(0, tf.int64)) as seeds:
        read = [np.asarray(other.next()) for _ in range(2)]
    advance_seeds(seeds.draws)
    assert [d.tolist() for d in drawn] == [r.tolist() for r in [*read, np.asarray(other.next())]]


def test_an_optimizer_still_lists_what_it_was_built_with() -> None:
    import keras
    import tensorflow as tf

    from gpudist_core.upstream.strategies import variables_of

    variable, optimizer = tf.Variable([1.0]), keras.optimizers.Adam()
    optimizer.build([variable])
    assert [id(v) for v in variables_of(optimizer)] == [id(variable)]
