#!/usr/bin/env bash
# The job of a GPU runner: the tests that run on emulated GPUs elsewhere, here on real ones. No test may be skipped or use the CPU.
#   ci/gpu.sh                     uses python3, which needs gpudist[gpu] and the test group
#   PYTHON=/path/python ci/gpu.sh
# One GPU is enough: topologies with more devices run on slices of it.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
# TensorFlow's own log helps only when something fails.
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
# Seconds for one run. On Hopper and later, the first runs of a machine wait while the driver compiles TensorFlow's kernels.
LIMIT=${LIMIT:-3600}

echo "1. Look for GPUs"
"$PYTHON" ci/see_gpus.py
"$PYTHON" -m emulate devices

echo "2. Run the tests that need a GPU, and those that assign GPUs to processes"
"$PYTHON" -m pytest -q tests/emulate/devices/test_gpu_machine.py tests/emulate/devices/test_sharing.py \
    --gpudist-device gpu --gpudist-strict --gpudist-deadline "$LIMIT"

echo "3. Run the tests of the example project"
"$PYTHON" -m pytest -q fixtures/outsider --gpudist-device gpu --gpudist-strict --gpudist-deadline "$LIMIT"

echo "4. Verify two correct programs and a wrong one on GPUs"
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
        sys.exit(f"Each verdict must come from GPUs. Received: device={device!r} in {path}.")
CHECK
echo "Passed. All of it ran on GPUs."
