"""Real hosts hash strings each in its own way: a program whose hosts agree on the order of a set all the same is right."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import dedent

import pytest

import emulate
from emulate.cluster import Preload
from emulate.report import render

PROGRAM = """
import json, os, pathlib, sys, time, keras, numpy as np, tensorflow as tf
from words import TEXTS, LABELS, vocabulary
keras.utils.set_random_seed(1)
strategy = tf.distribute.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else tf.distribute.MirroredStrategy()
numbers = vocabulary()
rows = np.array([[numbers[word] for word in text] for text in TEXTS])
data = tf.data.Dataset.from_tensor_slices((rows, LABELS)).batch(16)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
with strategy.scope():
    layers = [keras.Input((4,), dtype="int64"), keras.layers.Embedding(30, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.SGD(0.5)
@tf.function
def train(x, y):
    def step(x, y):
        with tf.GradientTape() as tape:
            each = tf.nn.sigmoid_cross_entropy_with_logits(y, model(x)[:, 0])
            loss = tf.nn.compute_average_loss(each, global_batch_size=16)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    strategy.run(step, args=(x, y))
for x, y in strategy.experimental_distribute_dataset(data.with_options(options)):
    train(x, y)
"""

WORDS = """
import json, os, pathlib, time, numpy as np
draws = np.random.RandomState(0)
TEXTS = [[f"word-{k}" for k in draws.randint(0, 30, 4)] for _ in range(64)]
LABELS = draws.randint(0, 2, 64).astype("float32")
"""

ITS_OWN = """
def vocabulary():
    return {word: number for number, word in enumerate({word for text in TEXTS for word in text})}
"""

OF_THE_CHIEF = """
def vocabulary():
    file = pathlib.Path("vocabulary.json")
    if json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"] == 0:
        words = {word for text in TEXTS for word in text}
        pathlib.Path("half.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
        os.replace("half.json", file)
    while not file.exists():
        time.sleep(0.05)
    return json.loads(file.read_text())
"""


def verified(folder: Path, preload: Preload, vocabulary: str) -> emulate.Verdict:
    (folder / "train.py").write_text(dedent(PROGRAM))
    (folder / "words.py").write_text(dedent(WORDS + vocabulary))
    return emulate.verify(folder / "train.py", "2x1", preload=preload)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.mark.slow  # emulate/verify/test_host_seeds.py has the cause, on made traces
@pytest.mark.parametrize("way", ["the chief's", "one seed in the environment"])
def test_a_vocabulary_that_all_hosts_share_is_equivalent(
    tmp_path: Path, preload: Preload, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "the chief's":
        monkeypatch.setitem(os.environ, "PYTHONHASHSEED", "0")
    verdict = verified(tmp_path, preload, OF_THE_CHIEF if way == "the chief's" else ITS_OWN)
    assert verdict.runs[0].verdict == "equivalent", render(verdict)
