"""What all tests share: an environment that says nothing of its own about clusters, devices or Keras."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from emulate.cluster import Preload
from emulate.devices import find_gpus

pytest_plugins = ["pytester"]  # for the tests of the pytest plugin

# Every test says itself what its hosts are told and how wide and colourful what is printed may be; the shell must not decide.
_DECIDE = ("TF_CONFIG", "TF_USE_LEGACY_KERAS", "KERAS_BACKEND", "PYTHONHASHSEED", "PYTHONUNBUFFERED")
_COLOUR = ("GITHUB_ACTIONS", "FORCE_COLOR", "NO_COLOR", "PY_COLORS", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE")
_SCREEN = ("TERM", "COLUMNS", "LINES")
for name in [*_DECIDE, *_COLOUR, *_SCREEN, *(name for name in os.environ if name.startswith("SLURM_"))]:
    os.environ.pop(name, None)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# A shell starts what runs in its background deaf to Ctrl-C, and whatever a test starts and interrupts would be so, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A deadline is a timed assertion, and two cores shared with other tests keep none.
settings.register_profile("gpudist", deadline=None)
settings.load_profile("gpudist")


def pytest_configure(config: pytest.Config) -> None:
    """Tests are about emulated devices, on a machine with GPUs too, unless these are asked for (ci/gpu.sh)."""
    if config.getoption("gpudist_device", None) != "gpu":
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if find_gpus().gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


@pytest.fixture(scope="session")
def preload() -> Iterator[Preload]:
    """A parent that has imported TensorFlow and Keras, and what verifies: one for all tests of a process."""
    with Preload(modules=("emulate.verify",)) as parent:
        yield parent
