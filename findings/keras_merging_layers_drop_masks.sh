#!/usr/bin/env bash
# Add of a masked and an unmasked input has no mask in Keras 3, so padding counts again; of two masks it takes the union.
#
# Guess: tokens from Embedding(mask_zero=True) plus positions from an Embedding without a mask: Add keeps the tokens' mask, as tf_keras
# does. Of two masked inputs a step counts where both count.
# What happens: in Keras 3 one input without a mask removes the mask. Pooling, LSTM, attention and the loss behind it then count the padding,
# and no layer warns. Where both have a mask, a step counts if one of them counts. The same program trains another model than with
# tf_keras on one device. Concatenate does the same along the features.
# Why: `Merge.compute_mask` in keras/src/layers/merging/base_merge.py: `if any(m is None for m in mask): return None`, then `logical_or`.
# Concatenate takes `any` over the features, with ones for a missing mask. tf_keras has `all` over the masks that are there.
# Workaround: give the mask on, `pool(hidden, mask=embedding.compute_mask(ids))`, or subclass Add with a `compute_mask`.
# Versions: TensorFlow 2.21.0, Keras 3.15.1, tf_keras 2.21.0
# Seen: the mean over time of a sequence of two tokens of value 1 and two of padding. First the second input adds 10 to the padding,
# then it has a mask of its own and adds 4 to the first token alone.
#     keras Add, second input without a mask: 6.0
#     keras Concatenate, second input without a mask: 6.0
#     keras Add, second input with a mask of one step: 3.0
#     tf_keras Add, second input without a mask: 1.0
#     tf_keras Concatenate, second input without a mask: 1.0
#     tf_keras Add, second input with a mask of one step: 5.0

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1 tf_keras==2.21.0
cat > "$work/masks.py" <<'PYTHON'
import keras
import numpy as np
import tf_keras

tokens, positions = np.array([[1, 2, 0, 0]], "int32"), np.array([[0, 0, 1, 1]], "int32")
shorter = np.array([[1, 0, 0, 0]], "int32")  # of these the first step alone counts


def mean(library, merge, other, masked, values):
    layers = library.layers
    inputs = [library.Input((4,), dtype="int32"), library.Input((4,), dtype="int32")]
    embeddings = [layers.Embedding(3, 1, mask_zero=True), layers.Embedding(3, 1, mask_zero=masked)]
    hidden = [embedding(ids) for embedding, ids in zip(embeddings, inputs)]
    pooled = layers.GlobalAveragePooling1D()(getattr(layers, merge)()(hidden))
    model = library.Model(inputs, pooled)
    embeddings[0].set_weights([np.array([[1.0], [1.0], [1.0]])])
    embeddings[1].set_weights([values])
    return np.asarray(model([tokens, other])).sum()


unmasked = np.array([[0.0], [10.0], [0.0]])
for library in (keras, tf_keras):
    for merge in ("Add", "Concatenate"):
        value = mean(library, merge, positions, False, unmasked)
        print(f"{library.__name__} {merge}, second input without a mask: {value:.1f}")
    value = mean(library, "Add", shorter, True, np.array([[0.0], [4.0], [0.0]]))
    print(f"{library.__name__} Add, second input with a mask of one step: {value:.1f}")
PYTHON
expect_header "$(run_python masks.py)"
