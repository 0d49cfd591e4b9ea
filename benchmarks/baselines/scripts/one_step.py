"""Let each optimizer make one step of descent with a large learning rate, and none later.

Keras's optimizers do the rest as ever: they clip, sum over the replicas, and count their steps. BASELINES_FOLDER gets a file of
the name `asked` where an optimizer has made its step. The rate is that of D3's program for TensorFlow.
"""

import atexit
import os
import sys
from pathlib import Path

import tensorflow as tf

RATE = 10.0
asked = []


def step(self, gradient, variable, *_):
    """Update a variable in the first step alone."""
    asked.append(variable.name)
    update = tf.cast(RATE * tf.convert_to_tensor(gradient), variable.dtype)
    is_first = tf.equal(tf.convert_to_tensor(self.iterations), 0)
    variable.assign_sub(tf.where(is_first, update, tf.zeros_like(update)))


def replace(optimizer):
    """Replace the update of an optimizer, and of those that are made of it."""
    optimizer.update_step = step
    for kind in optimizer.__subclasses__():
        replace(kind)


if "TF_USE_LEGACY_KERAS" in Path(sys.argv[0]).read_text():
    import tf_keras as keras
else:
    import keras
replace(keras.optimizers.Optimizer)


@atexit.register
def tell():
    """Say whether there was an optimizer to ask."""
    if asked:
        Path(os.environ["BASELINES_FOLDER"], "asked").touch()
