#!/usr/bin/env bash
# A LoRA layer that loads its weights never learns again: both factors are zero.
#
# Guess: a checkpoint of a model with enable_lora has the factors A and B, so fine-tuning goes on after load_weights.
# What happens: the file has the kernel with A B added, and loading sets both factors to zero. Where A and B are zero, so are both gradients:
# A's has the factor B, and B's has the factor A. SGD never moves them; fit goes on with biases alone, without a warning. Predictions
# are right. BackupAndRestore and ModelCheckpoint use the same method. So do EinsumDense, Embedding and convolutions.
# Why: `Dense.load_own_variables` in keras/src/layers/core/dense.py ends with `self.lora_kernel_a.assign(ops.zeros(...))` and the same for
# lora_kernel_b. Merging at saving is meant (keras#23244). A new layer is alive, since `enable_lora` draws A from he_uniform.
# Workaround: after loading draw A anew: `layer.lora_kernel_a.assign(keras.initializers.HeUniform()(layer.lora_kernel_a.shape))`.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: the loss of a model with one layer before and after 50 more steps of SGD.
#     went on: 2.98 2.10
#     loaded: 2.98 2.98, factors all zero
#     loaded, A drawn anew: 2.98 1.58

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/lora.py" <<'PYTHON'
import sys

import keras
import numpy as np

keras.utils.set_random_seed(0)
draw = np.random.default_rng(0)
x = draw.normal(size=(64, 6)).astype("float32")
y = (x @ draw.normal(size=(6, 3))).astype("float32")


def tuned():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, use_bias=False)])
    model.layers[0].enable_lora(1)
    model.compile(keras.optimizers.SGD(0.02), "mse")
    return model


def loss_before_and_after(model):
    before = model.evaluate(x, y, verbose=0)
    model.fit(x, y, batch_size=64, epochs=50, shuffle=False, verbose=0)
    return f"{before:.2f} {model.evaluate(x, y, verbose=0):.2f}"


first = tuned()
first.fit(x, y, batch_size=64, epochs=50, shuffle=False, verbose=0)
first.save_weights(sys.argv[1])
print("went on:", loss_before_and_after(first))
loaded = tuned()
loaded.load_weights(sys.argv[1])
zero = all(not np.any(variable.numpy()) for variable in loaded.trainable_variables)
print("loaded:", loss_before_and_after(loaded) + (", factors all zero" if zero else ""))
loaded.load_weights(sys.argv[1])
factor = loaded.layers[0].lora_kernel_a
factor.assign(keras.initializers.HeUniform(seed=1)(factor.shape))
print("loaded, A drawn anew:", loss_before_and_after(loaded))
PYTHON
expect_header "$(run_python lora.py "$work/lora.weights.h5")"
