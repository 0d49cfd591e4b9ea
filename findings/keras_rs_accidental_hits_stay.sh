#!/usr/bin/env bash
# keras_rs.layers.RemoveAccidentalHits removes nothing: the logits are bitwise those that it was given.
#
# Guess: in retrieval with negatives from the batch it hides a candidate that is the query's own item once more, as the layer of
# tensorflow-recommenders does, from which it is ported.
# What happens: it adds the smallest positive float to the logit where the lowest float was meant. So popular items, which occur often in a
# batch, are pushed away from the very users who chose them, and the loss looks normal.
# Why: `SMALLEST_FLOAT = ml_dtypes.finfo("float32").smallest_normal / 100.0` in keras_rs/src/layers/retrieval/remove_accidental_hits.py.
# tensorflow_recommenders/layers/loss.py has `MIN_FLOAT = np.finfo(np.float32).min / 100.0`.
# Workaround: `logits - 1e9 * (same_item - labels)`, where `same_item` is 1 where the candidate has the id of the positive.
# Versions: TensorFlow 2.21.0, Keras 3.15.1, keras-rs 0.4.0, tensorflow-recommenders 0.7.7
# Seen: softmax over three candidates with logits 1, 2, 3. The first is the positive, the second is the same item.
#     no layer: 0.09 0.24 0.67
#     keras_rs: 0.09 0.24 0.67
#     tensorflow_recommenders: 0.12 0.00 0.88

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1 tf_keras==2.21.0 keras-rs==0.4.0 tensorflow-recommenders==0.7.7
export TF_USE_LEGACY_KERAS=1 # for tensorflow_recommenders
cat > "$work/hits.py" <<'PYTHON'
import keras_rs
import tensorflow as tf
from tensorflow_recommenders.layers.loss import RemoveAccidentalHits

logits, labels = tf.constant([[1.0, 2.0, 3.0]]), tf.constant([[1.0, 0.0, 0.0]])
items = tf.constant([7, 7, 8])
for name, masked in (
    ("no layer", logits),
    ("keras_rs", keras_rs.layers.RemoveAccidentalHits()(logits, labels, items)),
    ("tensorflow_recommenders", RemoveAccidentalHits()(labels, logits, items)),
):
    print(f"{name}:", *(f"{share:.2f}" for share in tf.nn.softmax(masked)[0]))
PYTHON
expect_header "$(run_python hits.py)"
