"""The DLRM of TensorFlow Recommenders: its Ranking model with its own task, loss and train_step."""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # what tensorflow-recommenders asks for

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs

BATCH, DIM = 48, 8


class Embeddings(tf.keras.layers.Layer):
    def __init__(self, sizes):
        super().__init__()
        self.tables = {name: tf.keras.layers.Embedding(size, DIM, name=name) for name, size in sizes.items()}

    def call(self, features):
        return {name: self.tables[name](ids) for name, ids in features.items()}


strategy = tf.distribute.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else tf.distribute.MirroredStrategy()
tf.keras.utils.set_random_seed(1)
draw = np.random.default_rng(2)
sparse = {"user": draw.integers(0, 60, (960, 1)), "ad": draw.integers(0, 90, (960, 1))}
dense = draw.normal(size=(960, 6)).astype("float32")
clicks = (dense[:, :1] + draw.normal(size=(960, 1)) > 0).astype("float32")
features = {"dense_features": dense, "sparse_features": sparse}
dataset = tf.data.Dataset.from_tensor_slices((features, clicks)).batch(BATCH, drop_remainder=True)

with strategy.scope():
    model = tfrs.experimental.models.Ranking(
        Embeddings({"user": 60, "ad": 90}),
        bottom_stack=tfrs.layers.blocks.MLP([32, DIM], final_activation="relu"),
        top_stack=tfrs.layers.blocks.MLP([32, 1], final_activation="sigmoid"),
    )
    model.compile(tf.keras.optimizers.Adagrad(0.1))

model.fit(dataset, epochs=1, verbose=2)
