#!/usr/bin/env bash
# With SwapEMAWeights(swap_on_epoch=True) a fit that stops early ends with the raw weights, not with the average.
#
# Guess: fit with use_ema ends with the averaged weights, whether its epochs run out or EarlyStopping ends it.
# What happens: with the callback it ends with the average only after the last of `epochs`. After an early stop it ends with the raw weights,
# while what was validated and monitored in that epoch was the average.
# Why: `SwapEMAWeights.on_epoch_end` in keras/src/callbacks/swap_ema_weights.py swaps, and repairs the average only if
# `epoch == self.params["epochs"] - 1`. Then `finalize_variable_values` in keras/src/optimizers/base_optimizer.py copies the average into
# the model at the end of fit: after an early stop this "average" holds the raw weights.
# Workaround: leave swap_on_epoch out. Then fit ends with the average in both cases.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: which of the weights of its last epoch fit leaves in the model.
#     epochs ran out: average
#     stopped early: raw
#     stopped early, no swap_on_epoch: average

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/stop.py" <<'PYTHON'
import keras
import numpy as np

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x[:, :1] + 1


class Look(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["worse"] = epoch
        self.raw = self.model.layers[0].kernel.numpy()
        self.average = self.model.optimizer._model_variables_moving_average[0].numpy()


for name, patience, swap in (("epochs ran out", 9, True), ("stopped early", 1, True), ("stopped early, no swap_on_epoch", 1, False)):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9), "mse")
    look, stop = Look(), keras.callbacks.EarlyStopping("worse", mode="min", patience=patience)
    model.fit(x, y, epochs=4, verbose=0, callbacks=[look, keras.callbacks.SwapEMAWeights(swap_on_epoch=swap), stop])
    kernel = model.layers[0].kernel.numpy()
    print(f"{name}:", *(kind for kind in ("raw", "average") if np.allclose(kernel, getattr(look, kind), atol=1e-6)))
PYTHON
expect_header "$(run_python stop.py)"
