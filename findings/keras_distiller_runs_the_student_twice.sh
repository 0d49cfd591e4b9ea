#!/usr/bin/env bash
# With FeatureDistillation the student runs twice in each step, and sample weights have no effect on any Distiller.
#
# Guess: a step of Distiller is one forward pass of the student, from which it takes the output and the features. class_weight and
# sample_weight of fit weigh the labels' loss.
# What happens: the features come from a second pass with training=True. BatchNormalization updates its moving statistics twice, with the
# effect of a squared momentum, and the two terms of the loss see different masks of Dropout. Weights of examples are dropped in
# silence: with all of them zero the same model is trained.
# Why: `Distiller.compute_loss` in keras/src/distillation/distiller.py is given y_pred, and calls `_extract_all_student_features`, which
# calls another functional model made of the same layers. Its argument sample_weight is "currently unused".
# Workaround: make the student return its features as a second output, and write `compute_loss` yourself.
# Versions: TensorFlow 2.21.0, Keras 3.15.1
# Seen: after one step of a constant batch of 1, the student's moving mean (momentum 0.5), and the loss.
#     logits: moving mean 0.50 loss 1.00
#     features: moving mean 0.75 loss 1.00
#     logits, sample_weight of zeros: moving mean 0.50 loss 1.00

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/train.py" <<'PYTHON'
import keras
import numpy as np

x, y = np.ones((8, 1), "float32"), np.ones((8, 1), "float32")


def network():
    inputs = keras.Input((1,))
    features = keras.layers.BatchNormalization(momentum=0.5, name="features")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(features))


def step(name, distill, **options):
    teacher, student = network(), network()
    model = keras.distillation.Distiller(teacher, student, distill, student_loss_weight=0.9999)
    model.compile(keras.optimizers.SGD(0.0), loss="mse")
    loss = model.fit(x, y, batch_size=8, verbose=0, **options).history["student_loss"][0]
    mean = float(student.get_layer("features").moving_mean.numpy()[0])
    print(f"{name}: moving mean {mean:.2f} loss {loss:.2f}")


of_logits = keras.distillation.LogitsDistillation(loss="mse")
of_features = keras.distillation.FeatureDistillation("mse", "features", "features")
step("logits", of_logits)
step("features", of_features)
step("logits, sample_weight of zeros", of_logits, sample_weight=np.zeros(8, "float32"))
PYTHON
expect_header "$(run_python train.py)"
