"""Keep the loss and the gradient of each replica before the sum, each time that a program asks a tape for gradients.

BASELINES_FOLDER gets one file of each process: `replica/number/loss` and `replica/number/gradient`.
"""

import atexit
import os

import numpy as np
import tensorflow as tf

of_tape = tf.GradientTape.gradient
seen = {}


def keep(replica, loss, gradient):
    """Keep what one replica has in one step."""
    seen.setdefault(int(replica), []).append((loss, gradient))


def gradient(self, target, sources, *arguments, **options):
    """Return the gradients, and keep those of variables."""
    gradients = of_tape(self, target, sources, *arguments, **options)
    context = tf.distribute.get_replica_context()
    flat = [
        tf.reshape(tf.cast(tf.convert_to_tensor(one), tf.float32), [-1])
        for one in tf.nest.flatten(gradients)
        if one is not None
    ]
    of_variables = not any(isinstance(source, tf.Tensor) for source in tf.nest.flatten(sources))
    if context is not None and of_variables and flat:
        loss = tf.add_n([tf.reduce_sum(tf.cast(one, tf.float32)) for one in tf.nest.flatten(target)])
        tf.numpy_function(keep, [context.replica_id_in_sync_group, loss, tf.concat(flat, 0)], [])
    return gradients


tf.GradientTape.gradient = gradient


@atexit.register
def write():
    """Write what the replicas of this process had."""
    named = {
        f"{replica}/{number}/{name}": value
        for replica, its in seen.items()
        for number, pair in enumerate(its)
        for name, value in zip(("loss", "gradient"), pair, strict=True)
    }
    np.savez(os.path.join(os.environ["BASELINES_FOLDER"], f"replicas-{os.getpid()}.npz"), **named)
