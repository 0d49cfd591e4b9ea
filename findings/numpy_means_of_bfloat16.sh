#!/usr/bin/env bash
# np.mean of 4,096 ones in bfloat16 is 0.06, and np.std of noise is twice too large.
#
# Guess: np.mean adds 16-bit floats in float32, as it does with float16, and np.sum adds in pairs. So a metric that is computed in NumPy
# from a bfloat16 tensor is right within 1 %.
# What happens: NumPy does so for its own float16 alone. bfloat16 comes from the package ml_dtypes: its sum is one running sum in bfloat16,
# where 256 + 1 is 256. mean, average, nanmean, sum, std and var of `tensor.numpy()` are wrong from some hundred values on, and no
# warning is given. dot, median and argmax are right.
# Why: `_mean` in numpy/_core/_methods.py takes float32 `if issubclass(arr.dtype.type, nt.float16)`; bfloat16 is no such type, and
# `np.issubdtype(bfloat16, np.floating)` is false. `UFunc::CallImpl` in ml_dtypes/_src/ufuncs.h
# adds one value after the other.
# Workaround: `tensor.numpy().astype("float32")`, or `tf.cast` before `.numpy()`.
# Versions: NumPy 2.4.6, ml_dtypes 0.6.0 (what TensorFlow 2.21.0 installs)
# Seen: of 4,096 ones, and of 4,096 normal numbers with mean 5 and deviation 1.
#     bfloat16: mean of ones 0.0625, sum of ones 256, mean 0.5039, deviation 2
#     float16: mean of ones 1, sum of ones 4096, mean 4.984, deviation 0.9976
#     float32: mean of ones 1, sum of ones 4096, mean 4.984, deviation 0.9976

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment numpy==2.4.6 ml_dtypes==0.6.0
cat > "$work/means.py" <<'PYTHON'
import ml_dtypes
import numpy as np

for dtype in (ml_dtypes.bfloat16, np.float16, np.float32):
    ones = np.ones(4096, dtype)
    numbers = np.random.default_rng(0).normal(5, 1, size=4096).astype(dtype)
    results = {"mean of ones": ones.mean(), "sum of ones": ones.sum(), "mean": numbers.mean(), "deviation": numbers.std()}
    print(f"{np.dtype(dtype).name}:", ", ".join(f"{name} {float(result):.4g}" for name, result in results.items()))
PYTHON
expect_header "$(run_python means.py)"
