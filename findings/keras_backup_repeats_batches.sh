#!/usr/bin/env bash
# BackupAndRestore with a save_freq of batches trains on the first part of the interrupted epoch again.
#
# Guess: a backup in the middle of an epoch is there to go on in the middle: the next fit begins with the batch after it.
# What happens: weights and optimizer are those of the middle, but the epoch begins with its first batch. So the batches before the backup
# are trained on twice, and the schedule of the learning rate and Adam's corrections are ahead by as many steps.
# Why: `BackupAndRestore._save_model` in keras/src/callbacks/backup_and_restore.py writes "epoch" and "batch" into
# training_metadata.json. `_load_model` reads "epoch" and nothing reads "batch".
# Workaround: `save_freq="epoch"`, or a pipeline that begins at `optimizer.iterations`.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: how often each of the 6 batches of one epoch was trained on, after a stop behind batch 3 and a second fit; iterations.
#     not interrupted: 1 1 1 1 1 1 iterations 6
#     interrupted: 2 2 2 2 1 1 iterations 10

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/resume.py" <<'PYTHON'
import sys

import keras
import numpy as np

x, y = np.eye(6, dtype="float32"), np.zeros((6, 1), "float32")  # batch i alone moves weight i, by 1


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            raise KeyboardInterrupt


def fit(folder, *callbacks):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(1.0), lambda y_true, y_pred: -y_pred)
    backup = keras.callbacks.BackupAndRestore(folder, save_freq=2)
    model.fit(x, y, batch_size=1, shuffle=False, verbose=0, callbacks=[backup, *callbacks])
    counts = (round(float(count)) for count in model.layers[0].kernel.numpy().ravel())
    return f"{' '.join(map(str, counts))} iterations {int(model.optimizer.iterations.numpy())}"


print("not interrupted:", fit(sys.argv[1] + "/a"))
try:
    fit(sys.argv[1] + "/b", Stop())
except KeyboardInterrupt:
    print("interrupted:", fit(sys.argv[1] + "/b"))
PYTHON
expect_header "$(run_python resume.py "$work")"
