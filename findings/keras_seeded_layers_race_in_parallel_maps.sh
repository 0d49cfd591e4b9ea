#!/usr/bin/env bash
# A Keras augmentation layer with a seed in Dataset.map(num_parallel_calls=AUTOTUNE) gives other images in each run, and some draws twice.
#
# Guess: the documentation calls these layers safe in tf.data, and map is deterministic by default. So a seed makes runs repeatable,
# and each image has a draw of its own.
# What happens: the values differ from run to run, not only their order. Some images share a draw, since two calls read the same seed.
# In order, or after enable_op_determinism, both are right.
# Why: `SeedGenerator.next` in keras/src/random/seed_generator.py reads a variable and assigns the next value to it, in two operations.
# Calls of a parallel map run at the same time. `deterministic` of map is about the order of the results alone.
# Workaround: no num_parallel_calls for this map, or `tf.config.experimental.enable_op_determinism()`.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: the draws of 8 runs over 2,000 images, all with the same seed.
#     in order: runs equal, images that share a draw: none or by chance
#     parallel: runs different, images that share a draw: more
#     parallel, enable_op_determinism: runs equal, images that share a draw: none or by chance

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/draws.py" <<'PYTHON'
import keras
import numpy as np
import tensorflow as tf

RUNS, IMAGES = 8, 2000
BY_CHANCE = 2  # of 2,000 draws with 23 bits
image = tf.fill([1, 1, 3], 0.5)


def draws(parallel_calls):
    layer = keras.layers.RandomBrightness(0.5, value_range=(0.0, 1.0), seed=1)
    numbers = tf.data.Dataset.range(IMAGES)
    changed = numbers.map(lambda number: layer(image, training=True)[0, 0, 0], num_parallel_calls=parallel_calls)
    return list(changed.as_numpy_iterator())


def report(name, parallel_calls):
    runs = [draws(parallel_calls) for _ in range(RUNS)]
    equal = "equal" if all(np.array_equal(run, runs[0]) for run in runs) else "different"
    shared = sum(IMAGES - len(set(run)) for run in runs)
    print(f"{name}: runs {equal}, images that share a draw: {'more' if shared > RUNS * BY_CHANCE else 'none or by chance'}")


report("in order", None)
report("parallel", 8)
tf.config.experimental.enable_op_determinism()
keras.utils.set_random_seed(0)
report("parallel, enable_op_determinism", 8)
PYTHON
expect_header "$(run_python draws.py)"
