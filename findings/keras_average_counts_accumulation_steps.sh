#!/usr/bin/env bash
# With gradient_accumulation_steps the moving average of the weights (use_ema) forgets once for each small batch.
#
# Guess: the average moves once for each update of the weights, so ema_momentum means the same with and without accumulation.
# What happens: it moves in each call of `apply`, also where the weights stay as they are. With four accumulation steps a momentum of 0.9 is
# one of `0.9 ** 4`, 0.66. The first update is not averaged at all. The averaged model is what fit leaves behind, so another model is saved.
# Why: `BaseOptimizer._backend_apply_gradients` in keras/src/optimizers/base_optimizer.py calls
# `_update_model_variables_moving_average` behind the condition that asks for an update step, not in it. `iterations` counts updates.
# Workaround: `ema_momentum=momentum ** (1 / gradient_accumulation_steps)`.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: a weight that each update lowers by 1, and its average at momentum 0.5, after each small batch.
#     no accumulation: -1:-1.000 -2:-1.500 -3:-2.250 -4:-3.125
#     2 steps: 0:0.000 -1:-1.000 -1:-1.000 -2:-1.500 -2:-1.750 -3:-2.375

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/average.py" <<'PYTHON'
import keras
import tensorflow as tf

for name, accumulate, batches in (("no accumulation", None, 4), ("2 steps", 2, 6)):
    weight = keras.Variable(0.0)
    optimizer = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5, gradient_accumulation_steps=accumulate)
    optimizer.build([weight])
    seen = []
    for _ in range(batches):
        optimizer.apply([tf.constant(1.0)])
        seen.append(f"{float(weight):.0f}:{float(optimizer._model_variables_moving_average[0]):.3f}")
    print(f"{name}:", *seen)
PYTHON
expect_header "$(run_python average.py)"
