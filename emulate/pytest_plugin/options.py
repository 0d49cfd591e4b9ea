"""Read the plugin's options: from the command line, from an ini setting, or the default.

The names that all parts of the plugin use are here, too: the mark, keys of pytest's config, properties of tests.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from emulate.pytest_plugin.host_session import TestHost

NAME = "topology"
"""Name of the mark."""
DESCRIPTION = (
    'topology(shape, ..., strategy="auto", deadline=None, fresh=False): run the test on each of these topologies ("1x4": one '
    "host with four devices). A test that uses `strategy`, `devices`, `shared_path` or no fixture of gpudist runs on every "
    "host. With `cluster`, `topology` or `gpudist` alone it runs once, outside of the hosts. Tests of one file share hosts, "
    "except with fresh=True."
)

HOST: pytest.StashKey[TestHost] = pytest.StashKey()
"""In the config of a pytest that runs on an emulated host."""
IN_PROCESS: pytest.StashKey[TestHost] = pytest.StashKey()
"""In a test that runs in pytest's own process: its host."""

TOPOLOGY, DEVICE, VERDICT, REASON = "gpudist_topology", "gpudist_device", "gpudist_verdict", "gpudist_reason"
NOTE = "gpudist_note"
"""Properties of tests with a topology, as strings: they are in the junit file, and survive pytest-xdist."""
EMULATED, NO_DEVICE = "emulated", "none"

DEVICES = ("auto", "cpu", "gpu")
DEFAULT_POOL_SIZE = 12


class _Kind(NamedTuple):
    metavar: str
    rule: str
    convert: Callable[[str], Any]
    is_right: Callable[[Any], bool]


_DEVICE = _Kind("KIND", "must be one of auto, cpu, gpu", str, lambda kind: kind in DEVICES)
_SECONDS = _Kind("SECONDS", "must be a positive number of seconds", float, lambda seconds: 0 < seconds < math.inf)
_HOSTS = _Kind("HOSTS", "must be a number of hosts, 1 or more", int, lambda count: count >= 1)
_SEED = _Kind("N", "must be a whole number from 0 to 4294967295", int, lambda seed: 0 <= seed < 1 << 32)

_OPTIONS: dict[str, tuple[_Kind, Any, str]] = {
    "device": (_DEVICE, "auto", "What the topologies are made of: cpu (emulated), gpu, auto."),
    "deadline": (_SECONDS, 300.0, "How long a test may take on its hosts before it fails with the stack of each."),
    "patience": (_SECONDS, 10.0, "How long a host may wait in TensorFlow, doing nothing, for one that is done with the test."),
    "pool-size": (
        _HOSTS,
        None,
        f"How many hosts are kept between tests (more if one file needs more), for all workers. Default: {DEFAULT_POOL_SIZE}.",
    ),
    "seed": (_SEED, 0, "Seeds Python, NumPy, TensorFlow and Keras on every host."),
}


def _parser(flag: str, name: str, kind: _Kind) -> Callable[[str], Any]:
    """Return a parser for one option, whose error says what the option must be."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if kind.is_right(value := kind.convert(text)):
                return value
        raise pytest.UsageError(f"{flag} {kind.rule}. Received: {name}={text!r}.")

    return parse


@dataclass(frozen=True)
class PluginSettings:
    """Hold the user's settings.

    Attributes:
        device: `auto`, `cpu` or `gpu`.
        deadline: Seconds that a test may take on its hosts.
        patience: Seconds that a host may wait, doing nothing, for one that is done with the test.
        pool_size: How many hosts are kept between tests; None where nobody said.
        seed: What every host is seeded with before each test.
        strict: Whether a run fails in which a test was skipped or ran on emulated devices.
        in_process: Whether tests of one host run in pytest's own process.
    """

    device: str
    deadline: float
    patience: float
    pool_size: int | None
    seed: int
    strict: bool
    in_process: bool = False


def add_options(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("gpudist", "gpudist: tests on emulated and real topologies")
    for name, (kind, default, text) in _OPTIONS.items():
        flag, ini = f"--gpudist-{name}", f"gpudist_{name.replace('-', '_')}"
        shown = "" if default is None else f" Default: {default:g}." if isinstance(default, float) else f" Default: {default}."
        help_text, parse = f"{text}{shown} Ini: {ini}.", _parser(flag, ini, kind)
        group.addoption(flag, dest=ini, metavar=kind.metavar, default=None, type=parse, help=help_text)
        parser.addini(ini, text, default="")
    text = "Fail the run when a test with a topology was skipped or ran on emulated devices."
    group.addoption(
        "--gpudist-strict", dest="gpudist_strict", action="store_true", default=None, help=f"{text} Ini: gpudist_strict."
    )
    parser.addini("gpudist_strict", text, type="bool", default=False)
    text = "Run tests on 1xN in pytest's own process, where breakpoint(), --pdb and the debugger of an IDE work."
    group.addoption("--gpudist-in-process", dest="gpudist_in_process", action="store_true", help=text)


def settings(config: pytest.Config) -> PluginSettings:
    """Return the user's settings: from the command line, else from the ini file, else the defaults.

    Args:
        config: Pytest's.

    Returns:
        The settings.

    Raises:
        pytest.UsageError: When an ini setting cannot be meant.
    """
    values: dict[str, Any] = {}
    for name, (kind, default, _) in _OPTIONS.items():
        ini = f"gpudist_{name.replace('-', '_')}"
        value = config.getoption(ini)
        if value is None and (text := str(config.getini(ini)).strip()):
            value = _parser(f"The ini setting {ini}", ini, kind)(text)
        values[name.replace("-", "_")] = default if value is None else value
    strict = bool(config.getoption("gpudist_strict") or _strict(config))
    return PluginSettings(strict=strict, in_process=config.getoption("gpudist_in_process"), **values)


def _strict(config: pytest.Config) -> bool:
    try:
        return bool(config.getini("gpudist_strict"))
    except (ValueError, pytest.UsageError) as error:  # as pytest's version has it
        text = str(error).rpartition(" ")[2]
    raise pytest.UsageError(f"The ini setting gpudist_strict must be true or false. Received: gpudist_strict={text}.")
