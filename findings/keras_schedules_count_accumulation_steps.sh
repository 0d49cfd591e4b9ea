#!/usr/bin/env bash
# With gradient_accumulation_steps=N a learning rate schedule runs N times too fast, though optimizer.iterations counts updates.
#
# Guess: with accumulation everything in the optimizer counts updates: iterations, Adam's corrections and the schedule.
# What happens: iterations and Adam's corrections count updates. The schedule is asked with the number of small batches. With four
# accumulation steps a decay over 1,000 updates is over after 250, and a warm-up is four times too short. There is no warning.
# Why: `BaseOptimizer._get_current_learning_rate` in keras/src/optimizers/base_optimizer.py passes `self._iterations`, the counter of
# calls. The property `iterations` there divides it by gradient_accumulation_steps.
# Workaround: multiply decay_steps, warmup_steps and boundaries by gradient_accumulation_steps.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: the learning rate of each of four updates by SGD, with a linear decay from 1 to 0 over four updates; iterations behind them.
#     no accumulation: 1.00 0.75 0.50 0.25, iterations 4
#     4 accumulation steps: 0.25 0.00 0.00 0.00, iterations 4
#     4 accumulation steps, decay_steps=16: 0.81 0.56 0.31 0.06, iterations 4

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/schedule.py" <<'PYTHON'
import keras
import numpy as np

UPDATES = 4


def rates(accumulation_steps, decay_steps):
    """Return the size of each update: the gradient is -1, so it is the learning rate."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    schedule = keras.optimizers.schedules.PolynomialDecay(1.0, decay_steps, end_learning_rate=0.0)
    model.compile(keras.optimizers.SGD(schedule, gradient_accumulation_steps=accumulation_steps), lambda y_true, y_pred: -y_pred)
    kernels, ones = [0.0], np.ones((accumulation_steps or 1, 1), "float32")
    for _ in range(UPDATES):
        model.fit(ones, ones, batch_size=1, verbose=0)
        kernels.append(float(model.get_weights()[0][0, 0]))
    return " ".join(f"{size:.2f}" for size in np.diff(kernels)) + f", iterations {int(model.optimizer.iterations)}"


print("no accumulation:", rates(None, UPDATES))
print("4 accumulation steps:", rates(4, UPDATES))
print("4 accumulation steps, decay_steps=16:", rates(4, 4 * UPDATES))
PYTHON
expect_header "$(run_python schedule.py)"
