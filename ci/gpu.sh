#!/usr/bin/env bash
# The job of a GPU runner: the tests that run emulated elsewhere, on real GPUs. Nothing may fall back or be skipped.
#   ci/gpu.sh                     with the python of the environment in which gpudist[gpu] and the test group are installed
#   PYTHON=/path/python ci/gpu.sh
# A machine with one GPU suffices: topologies with more devices run on slices of it.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
# TensorFlow's own log is of use only when something is wrong.
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
# Seconds for one run: on Hopper and later the first ones of a machine wait until the driver has compiled TensorFlow's kernels.
LIMIT=${LIMIT:-3600}

echo "1. What there is"
"$PYTHON" ci/see_gpus.py
"$PYTHON" -m emulate devices

echo "2. What needs a GPU, and what decides who gets which"
"$PYTHON" -m pytest -q tests/emulate/devices/test_gpu_machine.py tests/emulate/devices/test_sharing.py \
    --gpudist-device gpu --gpudist-strict --gpudist-deadline "$LIMIT"

echo "3. The tests of the example project, which run emulated on a laptop"
"$PYTHON" -m pytest -q fixtures/outsider --gpudist-device gpu --gpudist-strict --gpudist-deadline "$LIMIT"

echo "4. A correct program is equivalent, a wrong one is not, and both verdicts are of GPUs"
verdicts=$(mktemp -d)
trap 'rm -rf "$verdicts"' EXIT
"$PYTHON" -m emulate verify fixtures/programs/multiworker_loop.py --device gpu --topology 1x2 --topology 2x1 \
    --timeout "$LIMIT" --json "$verdicts/right.json"
"$PYTHON" -m emulate verify fixtures/programs/custom_loop_cnn.py --device gpu --topology 1x2 \
    --timeout "$LIMIT" --json "$verdicts/convolution.json"
code=0
"$PYTHON" -m emulate verify fixtures/bugs/loss_scaling_multiworker.py --device gpu --topology 1x2 \
    --timeout "$LIMIT" --json "$verdicts/wrong.json" || code=$?
test "$code" -eq 1 || { echo "A divergence (exit code 1) was expected of a wrong program. Received: exit code $code." >&2; exit 70; }
"$PYTHON" - "$verdicts"/*.json <<'CHECK'
import json
import sys

for path in sys.argv[1:]:
    with open(path, encoding="utf-8") as file:
        device = json.load(file)["device"]
    if device != "gpu":
        sys.exit(f"A verdict of a GPU runner must be of GPUs. Received: device={device!r} in {path}.")
CHECK
echo "On GPUs, all of it."
