"""What all tests share: an environment that says nothing of its own about clusters, devices or Keras."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from jsonschema import Draft202012Validator

from emulate.cluster import Preload
from emulate.devices import find_gpus
from emulate.verify.verdict import Verdict

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


@pytest.fixture(scope="session", autouse=True)
def every_verdict_keeps_the_published_schema() -> Iterator[None]:
    """Check each verdict that a test's own process makes against the JSON Schema of the documentation."""
    schema = json.loads((Path(__file__).parents[1] / "docs" / "reference" / "verdict.schema.json").read_text())
    validator = Draft202012Validator(schema)
    real = Verdict.__init__

    def init(self: Verdict, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        validator.validate(json.loads(json.dumps(self.to_json())))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Verdict, "__init__", init)
        yield


@pytest.fixture(scope="session")
def preload() -> Iterator[Preload]:
    """A parent that has imported TensorFlow and Keras, and what verifies: one for all tests of a process."""
    with Preload(modules=("emulate.verify",)) as parent:
        yield parent
