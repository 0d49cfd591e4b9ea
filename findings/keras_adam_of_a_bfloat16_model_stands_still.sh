#!/usr/bin/env bash
# With dtype "bfloat16" Adam, AdamW and Lamb never move a weight, and Nadam makes it NaN: no error, no warning.
#
# Guess: a model in bfloat16 trains coarsely, about as with mixed_bfloat16. The optimizer computes its scalars in float32.
# What happens: the default beta_2 of 0.999 is cast to the type of the weight. In bfloat16 that is 1, so 1 - beta_2 ** step is 0. Adam
# multiplies each update by its root. Lamb divides the second moment by it, so it divides the update by infinity. Nadam computes 0 / 0.
# RMSprop has no bias correction and trains.
# Why: `Adam.update_step` in keras/src/optimizers/adam.py computes `beta_2_power` from `ops.cast(self.beta_2, variable.dtype)`. lamb.py and
# nadam.py do the same. float16 has three more bits: there 0.999 stays below 1.
# Workaround: the policy mixed_bfloat16, which keeps weights in float32, or beta_2=0.99.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: a weight of 0.5 after 300 steps of fit at a learning rate of 0.01; the loss is least at 1.
#     float32: Adam 1.0, AdamW 1.0, Lamb 1.0, Nadam 1.0, RMSprop 1.0
#     bfloat16: Adam 0.5, AdamW 0.5, Lamb 0.5, Nadam nan, RMSprop 1.0
#     mixed_bfloat16: Adam 1.0, AdamW 1.0, Lamb 1.0, Nadam 1.0, RMSprop 1.0
#     bfloat16, beta_2=0.99: Adam 1.0

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/train.py" <<'PYTHON'
import keras
import numpy as np

examples = np.ones((300, 1), "float32")


def trained_weight(dtype, optimizer):
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Constant(0.5), dtype=dtype)
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(optimizer, "mse")
    model.fit(examples, examples, batch_size=1, verbose=0)
    return f"{float(layer.kernel[0, 0]):.1f}"


for dtype in ("float32", "bfloat16", "mixed_bfloat16"):
    optimizers = ("Adam", "AdamW", "Lamb", "Nadam", "RMSprop")
    weights = (trained_weight(dtype, getattr(keras.optimizers, name)(0.01)) for name in optimizers)
    print(f"{dtype}:", ", ".join(f"{name} {weight}" for name, weight in zip(optimizers, weights, strict=True)))
print("bfloat16, beta_2=0.99: Adam", trained_weight("bfloat16", keras.optimizers.Adam(0.01, beta_2=0.99)))
PYTHON
expect_header "$(run_python train.py)"
