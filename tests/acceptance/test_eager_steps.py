"""Steps in eager code: evaluated from a run that compiles them if that does the same, else from more runs of the program."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

START = """
import numpy as np, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
draws = np.random.default_rng(0)
x = draws.normal(size=(96, 6)).astype("float32")
y = x.sum(1, keepdims=True)
BATCH = 16
with strategy.scope():
    weights = [tf.Variable(draws.normal(size=s).astype("float32"), name=n) for n, s in (("a", (6, 5)), ("b", (5, 1)))]
    optimizer = tf.keras.optimizers.SGD(0.01)
    optimizer.build(weights)

def gradients(x, y, whole):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((tf.tanh(x @ weights[0]) @ weights[1] - y) ** 2) / whole
    return zip(tape.gradient(loss, weights), weights)
"""
IN_A_FUNCTION = """
def train(x, y):
    def step(x, y):
        optimizer.apply_gradients(gradients(x, y, BATCH))
    strategy.run(step, args=(x, y))
"""
IN_A_METHOD = """
class Trainer:
    def step(self, x, y):
        optimizer.apply_gradients(gradients(x, y, BATCH))
trainer = Trainer()
def train(x, y):
    strategy.run(trainer.step, args=(x, y))
"""
WITH_A_COUNT = """
made = []
def step(x, y):
    optimizer.apply_gradients((gradient / (1 + len(made)), weight) for gradient, weight in gradients(x, y, BATCH))
def train(x, y):
    strategy.run(step, args=(x, y))
    made.append(1)
"""
WITH_NUMBERS = """
def step(x, y):
    optimizer.apply_gradients(gradients(x, y, BATCH))
    seen.append(float(tf.reduce_sum(x)))
seen = []
def train(x, y):
    strategy.run(step, args=(x, y))
"""
LOOP = """
for x, y in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)):
    train(x, y)
"""
WRONG = IN_A_FUNCTION.replace("gradients(x, y, BATCH)", "gradients(x, y, x.shape[0])")


@pytest.mark.parametrize(
    ("step", "codes", "starts"),
    [
        pytest.param(IN_A_FUNCTION, [], 3, id="a function that is defined anew in each step"),
        pytest.param(IN_A_METHOD, [], 3, id="a method", marks=pytest.mark.slow),
        pytest.param(WRONG, ["loss-scaling"], 4, id="a wrong mean"),
        pytest.param(WITH_A_COUNT, [], None, id="a number from Python that a compiled step would not see change"),
        pytest.param(WITH_NUMBERS, [], None, id="numbers that a compiled step cannot read", marks=pytest.mark.slow),
    ],
)
def test_an_eager_step_is_judged_with_few_starts_and_never_by_what_it_does_only_when_it_is_compiled(
    step: str, codes: list[str], starts: int | None, tmp_path: Path, preload: Preload
) -> None:
    path = tmp_path / "train.py"
    path.write_text(START + step + LOOP)
    verdict = emulate.verify(path, "1x2", preload=preload)
    assert [cause.code for run in verdict.runs for cause in run.causes] == codes, render(verdict)
    assert starts is None or verdict.program_starts <= starts, render(verdict)
