"""What a step returns for its rows and the program uses again: states that it carries, predictions that become labels."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

PROGRAM = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(1)
strategy = tf.distribute.MirroredStrategy()
STREAMS, TIME, WORDS, UNITS = 8, 4, 7, 6
text = np.random.default_rng(2).integers(0, WORDS, (STREAMS, 1 + TIME * 12))
with strategy.scope():
    cell = keras.layers.GRUCell(UNITS)
    cell.build((STREAMS, WORDS))
    out = keras.layers.Dense(WORDS)
    out.build((STREAMS, UNITS))
    variables = cell.trainable_variables + out.trainable_variables
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(variables)

def step(x, y, state):
    with tf.GradientTape() as tape:
        losses = []
        for at in range(TIME):
            hidden, _ = cell(tf.one_hot(x[:, at], WORDS), state)
            state = hidden
            losses.append(tf.nn.sparse_softmax_cross_entropy_with_logits(y[:, at], out(hidden)))
        loss = tf.reduce_sum(losses) / STREAMS
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return loss, state

@tf.function
def train(x, y, state):
    loss, state = strategy.run(step, args=(x, y, state))
    return strategy.reduce("SUM", loss, axis=None), state

each = STREAMS // strategy.num_replicas_in_sync
state = strategy.experimental_distribute_values_from_function(lambda _: tf.zeros([each, UNITS]))
pieces = [text[:, at:at + TIME + 1] for at in range(0, 12 * TIME, TIME)]
rows = (np.concatenate([piece[:, :-1] for piece in pieces]), np.concatenate([piece[:, 1:] for piece in pieces]))
for x, y in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(rows).batch(STREAMS)):
    loss, state = train(x, y, state)
"""
OF_THE_FIRST = "    state = strategy.experimental_local_results(state)[0]\n"


@pytest.mark.parametrize("wrong", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_state_that_is_carried_on_is_compared_as_closely_as_everything_else(
    tmp_path: Path, preload: Preload, wrong: bool
) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM + (OF_THE_FIRST if wrong else ""))
    verdict = emulate.verify(path, "1x2", preload=preload)
    run = verdict.runs[0]
    assert run.verdict == ("divergent" if wrong else "equivalent"), render(verdict)
    if wrong:
        assert [cause.code for cause in run.causes] == ["depends-on-replicas"], render(verdict)
        assert "The program gives the step other inputs for the same examples" in run.causes[0].summary
        assert run.first_divergence is not None
        assert run.first_divergence.step == 1
    else:
        assert run.worst is not None
        assert run.worst.noise < 1e-5
        assert not any("depends on the order of the examples" in note for note in verdict.notes)
