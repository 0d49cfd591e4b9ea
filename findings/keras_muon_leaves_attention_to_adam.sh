#!/usr/bin/env bash
# Muon trains no attention layer: all four kernels of MultiHeadAttention get AdamW.
#
# Guess: in a transformer Muon trains the matrices of attention and of the feed-forward layers, as in its paper; embeddings, biases and
# the output layer get AdamW.
# What happens: Keras's attention keeps its kernels with an axis for the heads, so they have three axes, and Muon takes two axes alone. The
# attention of a model is trained by AdamW, with the learning rate that was chosen for Muon, and so are convolutions. The feed-forward
# layers get Muon. Nothing says so.
# Why: `Muon._should_use_adamw` in keras/src/optimizers/muon.py: `if len(variable.shape) != 2: return True`. The kernels are those of
# `EinsumDense` in keras/src/layers/attention/multi_head_attention.py. The comment above speaks of flattening; no code does it.
# Workaround: an attention layer of your own made of Dense layers, or set `adam_lr_ratio` with this in mind.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: which rule Muon has for each kernel of a block of a transformer.
#     attention/query/kernel 3 axes AdamW
#     attention/key/kernel 3 axes AdamW
#     attention/value/kernel 3 axes AdamW
#     attention/attention_output/kernel 3 axes AdamW
#     feed_forward/kernel 2 axes Muon

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/rules.py" <<'PYTHON'
import keras

inputs = keras.Input((8, 16))
hidden = keras.layers.MultiHeadAttention(2, 8, name="attention")(inputs, inputs)
model = keras.Model(inputs, keras.layers.Dense(16, name="feed_forward")(hidden))
optimizer = keras.optimizers.Muon()
optimizer.build(model.trainable_variables)
for variable, velocity in zip(model.trainable_variables, optimizer.adam_velocities):
    if variable.name == "kernel":
        print(variable.path, len(variable.shape), "axes", "Muon" if velocity is None else "AdamW")
PYTHON
expect_header "$(run_python rules.py)"
