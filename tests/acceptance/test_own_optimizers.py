"""Optimizers of a program's own, which gpudist_core gives the gradients of all replicas."""

from __future__ import annotations

from pathlib import Path

import emulate
from emulate.cluster import Preload
from emulate.report import render

OWN_OPTIMIZER = """
import keras, numpy as np, gpudist_core as gd
keras.utils.set_random_seed(3)
strategy = gd.make_strategy()
class Normed(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        pairs = list(grads_and_vars)
        norm = keras.ops.sqrt(sum(keras.ops.sum(g * g) for g, _ in pairs))
        return super().apply_gradients([(g / norm, v) for g, v in pairs])
x = np.random.default_rng(0).normal(size=(50, 6)).astype("float32")
with strategy.scope():
    model = gd.distributed(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]))
    model.compile(Normed(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, x[:, :3].argmax(1), batch_size=12, shuffle=False, verbose=0)
"""


def test_an_optimizer_of_ones_own_is_judged_by_the_gradients_that_gpudist_core_gives_it(
    tmp_path: Path, preload: Preload
) -> None:
    (tmp_path / "train.py").write_text(OWN_OPTIMIZER)
    verdict = emulate.verify(tmp_path / "train.py", "1x2", preload=preload)
    print(render(verdict))
    assert verdict.runs[0].verdict == "equivalent"
