#!/usr/bin/env bash
# After set_random_seed a Dataset.map with tf.random or tf.image.random_* gives each example the same augmentation in every epoch.
#
# Guess: a seed makes runs repeatable. Within a run each epoch draws anew, as it does without a seed, and as shuffle does with one.
# What happens: each pass over the dataset begins with the first draw again. So fit with many epochs trains on the same augmented images,
# as if they had been written to a file. A seed of the operation alone does the same. Draws of NumPy, of a tf.random.Generator and of
# Keras 3's layers go on. With repeat behind the map they go on, too, as that is one pass. Preprocessing of KerasHub and
# TensorFlow Text that draws with tf.random is no exception.
# Why: each iterator instantiates the function of the map again, so its random operations start from their seeds. `get_seed` in
# tensorflow/python/framework/random_seed.py fixes these once a global seed is set. Reported as tensorflow#44195 and #35682, both closed.
# Workaround: `Dataset.zip(data, tf.data.Dataset.random(rerandomize_each_iteration=True))` and tf.image.stateless_random_*, or
# `data.map(augment).repeat()` with steps_per_epoch.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: whether three epochs of fit see new draws.
#     no seed: new
#     set_random_seed(0): the same
#     set_random_seed(0), shuffle: new order, the same draws
#     set_random_seed(0), repeat and steps_per_epoch: new
#     set_random_seed(0), Keras layer: new
#     set_random_seed(0), stateless with Dataset.random: new
#     random_brightness(seed=1): the same

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/epochs.py" <<'PYTHON'
import keras
import tensorflow as tf

EXAMPLES, EPOCHS = 6, 3
image = tf.fill([1, 1, 3], 0.5)
examples = tf.data.Dataset.range(EXAMPLES)
layer = keras.layers.RandomBrightness(0.5, value_range=(0.0, 1.0))


class Look(keras.Model):
    """Keep what each step is given."""

    def train_step(self, data):
        seen.extend(data.numpy().tolist())
        return {"loss": 0.0}


def augment(number, seed=None):
    return number, tf.image.random_brightness(image, 0.5, seed=seed)[0, 0, 0]


def augment_by_layer(number):
    return number, layer(image, training=True)[0, 0, 0]


def augment_without_state(number, seed):
    return number, tf.image.stateless_random_brightness(image, 0.5, (0, seed))[0, 0, 0]


def epochs(data, steps=None):
    """Return the numbers and the draws of each epoch of fit."""
    model = Look()
    model.compile(run_eagerly=True)
    seen.clear()
    batches = data.map(lambda number, draw: tf.stack([tf.cast(number, tf.float32), draw])[None])
    model.fit(batches, epochs=EPOCHS, steps_per_epoch=steps, verbose=0)
    return [seen[start : start + EXAMPLES] for start in range(0, EPOCHS * EXAMPLES, EXAMPLES)]


def is_new(parts):
    return "new" if all(part != parts[0] for part in parts[1:]) else "the same"


def draws(parts):
    return [[draw for _, draw in part] for part in parts]


seen = []
print("no seed:", is_new(draws(epochs(examples.map(augment)))))
keras.utils.set_random_seed(0)
print("set_random_seed(0):", is_new(draws(epochs(examples.map(augment)))))
shuffled = epochs(examples.shuffle(EXAMPLES).map(augment))
order = is_new([[number for number, _ in part] for part in shuffled])
print(f"set_random_seed(0), shuffle: {order} order, {is_new(draws(shuffled))} draws")
print("set_random_seed(0), repeat and steps_per_epoch:", is_new(draws(epochs(examples.map(augment).repeat(), EXAMPLES))))
print("set_random_seed(0), Keras layer:", is_new(draws(epochs(examples.map(augment_by_layer)))))
seeded = tf.data.Dataset.zip(examples, tf.data.Dataset.random(rerandomize_each_iteration=True))
print("set_random_seed(0), stateless with Dataset.random:", is_new(draws(epochs(seeded.map(augment_without_state)))))
tf.random.set_seed(None)
print("random_brightness(seed=1):", is_new(draws(epochs(examples.map(lambda number: augment(number, seed=1))))))
PYTHON
expect_header "$(run_python epochs.py)"
