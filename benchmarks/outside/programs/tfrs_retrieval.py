"""A two-tower model of TensorFlow Recommenders: its Retrieval task, its Model's train_step, as in its first tutorial."""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # what tensorflow-recommenders asks for

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

USERS, ITEMS, BATCH = 60, 90, 48


class TwoTower(tfrs.Model):
    def __init__(self):
        super().__init__()
        self.user = tf.keras.layers.Embedding(USERS, 16)
        self.item = tf.keras.layers.Embedding(ITEMS, 16)
        self.task = tfrs.tasks.Retrieval()

    def compute_loss(self, features, training=False):
        return self.task(self.user(features["user"]), self.item(features["item"]), compute_metrics=not training)


strategy = tf.distribute.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else tf.distribute.MirroredStrategy()
tf.keras.utils.set_random_seed(1)
draw = np.random.default_rng(2)
views = {"user": draw.integers(0, USERS, 960), "item": draw.integers(0, ITEMS, 960)}
dataset = tf.data.Dataset.from_tensor_slices(views).batch(BATCH, drop_remainder=True)

with strategy.scope():
    model = TwoTower()
    model.compile(tf.keras.optimizers.Adagrad(0.1))

model.fit(dataset, epochs=1, verbose=2)
