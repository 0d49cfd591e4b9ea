"""Prepare a host's pytest where it differs from one that a user starts."""

from __future__ import annotations

import functools
import random
import re
import sys
from typing import Any

import pytest

from emulate.errors import UsageError
from emulate.pool import keep_meeting
from emulate.pytest_plugin.wire import SessionPlan

_LATE = re.compile(r"cannot be modified after (being )?initializ|must be configured at program startup")
"""TensorFlow's words for a setting that comes after the first operation of a process."""


def host_options(plan: SessionPlan, folder: str, name: str) -> dict[str, Any]:
    """Return the user's options, without those that concern the run as a whole."""
    options = {
        **plan.options,
        "basetemp": folder,
        "plugins": [*plan.options.get("plugins", []), "no:terminal"],
        "usepdb": False,
        "trace": False,
        "maxfail": 0,
        "pyargs": False,
        "keyword": "",
        "markexpr": "",
        "deselect": None,
        "lf": False,
        "failedfirst": False,
        "newfirst": False,
        "stepwise": False,
        "stepwise_skip": False,
        "cacheclear": False,
        "looponfail": False,
        "dist": "no",
        "loadgroup": False,
        "distload": False,
        "numprocesses": None,
        "maxprocesses": None,
        "tx": [],
        "cov_source": [],  # pytest-cov begins while options are read, by deleting what others have measured
    }
    options.pop("file_or_dir", None)  # argparse warns of it
    if options.get("log_file"):
        options["log_file"] = f"{options['log_file']}.{name}"
    return options


def refuse_debugger(*args: Any, **kwargs: Any) -> None:
    """Replace `breakpoint` and `pdb.set_trace`."""
    __tracebackhide__ = True
    raise UsageError(
        "A debugger needs a terminal, and a host has none. Received: breakpoint() or pdb.set_trace() in a test that runs on "
        "hosts. Run a test on 1xN in pytest's own process: pytest --gpudist-in-process -k 1x2."
    )


def find_each_other() -> None:
    """Let the hosts meet: TensorFlow wants that before its runtime is up, and the module of a test may start it."""
    import gpudist_core

    gpudist_core.make_strategy()
    keep_meeting()


def seed_everything(seed: int) -> None:
    """Seed every generator a test may use."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(seed)
    for name in ("keras", "tf_keras"):
        if name in sys.modules:
            sys.modules[name].utils.set_random_seed(seed)


def make_strategy(kind: str | None) -> Any:
    """Return the strategy of a test. Its mark names the kind."""
    if kind == "default":
        import tensorflow as tf

        return tf.distribute.get_strategy()
    import gpudist_core

    return gpudist_core.make_strategy(kind or "auto")


def logical_devices(host: int) -> list[Any]:
    """Return the devices that a program sees on a host. TensorFlow lists those of a whole cluster."""
    import tensorflow as tf

    # Asked from a frame that is not ours: to gpudist's own calls TensorFlow tells the truth, to tests what is emulated.
    for kind in ("GPU", "CPU"):
        call = pytest.CallInfo.from_call(functools.partial(tf.config.list_logical_devices, kind), "setup", reraise=Exception)
        own = [device for device in call.result or [] if "/task:" not in device.name or f"/task:{host}/" in device.name]
        if own:
            return own
    return []


def about_late_call(error: str) -> str:
    """Return what to do about a setting that an earlier test on the same host made impossible; empty for another error."""
    if not _LATE.search(error):
        return ""
    return (
        "TensorFlow allows this setting only before the first operation of a process. Received: a host that has run other "
        'tests of this file. Give the test hosts of its own: @pytest.mark.topology("1x2", fresh=True).'
    )


def is_of_tensorflow(error: BaseException | None) -> bool:
    """Return whether TensorFlow raised the exception, or one that led to it."""
    while error is not None:
        if type(error).__module__.startswith("tensorflow."):
            return True
        error = error.__cause__ or error.__context__
    return False
