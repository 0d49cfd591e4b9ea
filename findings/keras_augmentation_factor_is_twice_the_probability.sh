#!/usr/bin/env bash
# RandomErasing(factor=1.0), the default, erases half of the images; so for blur, perspective, elastic transform and inversion.
#
# Guess: factor is the probability that an image is changed. The documentation: "factor=1.0 means erasing is always applied".
# What happens: a number is the upper end of a range that starts at 0. For each image a probability is drawn from it, then a coin with this
# probability is tossed. So half as many images are changed as the number says. factor=0.5 changes a quarter. RandomGrayscale, with
# the same argument, has no such range: its number is the probability.
# Why: `_set_factor` in keras/src/layers/preprocessing/image_preprocessing/base_image_preprocessing_layer.py makes (0, factor) of a
# number. That is right for a strength. `get_random_transformation` of these layers takes it as a probability. The documentation of
# `factor` says that, too, some lines below "always".
# Workaround: give both ends: `factor=(p, p)`.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: how many of 2,000 images were changed with factor=1.0, with factor=(1.0, 1.0), which RandomGrayscale does not take, and with 0.5.
#     RandomErasing: 50% 100% 25%
#     RandomGaussianBlur: 50% 100% 25%
#     RandomPerspective: 50% 100% 25%
#     RandomElasticTransform: 50% 100% 25%
#     RandomInvert: 50% 100% 25%
#     RandomGrayscale: 100% - 50%

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/shares.py" <<'PYTHON'
import keras
import numpy as np

image = np.random.default_rng(0).uniform(size=(16, 16, 3)).astype("float32")
images = np.tile(image, (2000, 1, 1, 1))


def changed(name, factor):
    """Return the share of the images that the layer changes, to 5 percent."""
    settings = {} if name in ("RandomPerspective", "RandomGrayscale") else {"value_range": (0.0, 1.0)}
    layer = getattr(keras.layers, name)(factor=factor, seed=1, **settings)
    difference = np.abs(np.array(layer(images, training=True)) - image).max(axis=(1, 2, 3))
    return f"{5 * round(20 * np.mean(difference > 1e-5))}%"


for name in ("RandomErasing", "RandomGaussianBlur", "RandomPerspective", "RandomElasticTransform", "RandomInvert"):
    print(f"{name}:", changed(name, 1.0), changed(name, (1.0, 1.0)), changed(name, 0.5))
print("RandomGrayscale:", changed("RandomGrayscale", 1.0), "-", changed("RandomGrayscale", 0.5))
PYTHON
expect_header "$(run_python shares.py)"
