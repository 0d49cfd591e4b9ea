"""Define the options that several commands share, and how their texts are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Literal

import typer

from emulate.errors import UsageError, did_you_mean
from emulate.topology import Topology

DEFAULT_TOPOLOGY = "1x4"
DEFAULT_STEPS = "auto"
DEFAULT_TIMEOUT = 300.0
DEFAULT_RESTARTS = 3
DEFAULT_GRACE = "30"
"""As in Kubernetes and in Slurm (KillWait)."""


DEVICES = ("cpu", "gpu", "auto")
NETWORKS = ("own", "host")
ALL_REDUCES = ("auto", "ring", "hierarchical", "one-device")
PRECISIONS = ("float32", "float64")


COMMON_TOPOLOGIES = ("1x2", "1x4", "1x8", "2x1", "2x2", "2x4", "4x1", "4x2", "2x1+1ps")
"""The topologies that shell completion offers. Any HxD is valid."""


def completes(*values: str) -> Callable[[str], list[str]]:
    """Return what a shell asks for the values that begin so."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def complete_code(incomplete: str) -> list[str]:
    """Return the codes of causes that begin so."""
    from emulate.verify.causes import all_causes

    return completes(*(cause.code for cause in all_causes()))(incomplete)


def _choice(*names: str) -> str:
    """Return the possible values for the help."""
    return f"[{'|'.join(names)}]"


ProgramArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PROGRAM", show_default=False, help="train.py, train.ipynb, train.py:function or package.module:function"
    ),
]
ModuleOption = Annotated[
    str | None,
    typer.Option("-m", metavar="MODULE", show_default=False, help="Run a module instead of PROGRAM, like python -m."),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        metavar=_choice(*DEVICES),
        autocompletion=completes(*DEVICES),
        help="Device type. auto: GPUs if each device gets its own GPU, otherwise the CPU.",
    ),
]
AllowOption = Annotated[
    list[str],
    typer.Option(
        "--allow",
        metavar="CODE",
        autocompletion=complete_code,
        help="Accept a cause: it is reported, but does not change the verdict. Repeatable.",
    ),
]
StrictOption = Annotated[
    bool,
    typer.Option("--strict/--no-strict", help="The verdict by-design also gives exit code 1."),
]
VirtualOption = Annotated[
    bool,
    typer.Option(
        "--virtual",
        help="Run all replicas one after the other in one process, without TensorFlow's collectives. "
        "For large topologies, such as 1x1024.",
    ),
]
NetworkOption = Annotated[
    str,
    typer.Option(
        "--network",
        metavar=_choice(*NETWORKS),
        autocompletion=completes(*NETWORKS),
        help="Network of several hosts. own: a private network; host: the network of this machine.",
    ),
]
AllReduceOption = Annotated[
    str,
    typer.Option(
        "--all-reduce",
        metavar=_choice(*ALL_REDUCES),
        autocompletion=completes(*ALL_REDUCES),
        help="All-reduce algorithm. auto: one that works for every program.",
    ),
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar=_choice(*PRECISIONS),
        autocompletion=completes(*PRECISIONS),
        help="Compute in this float type. float64 makes rounding errors smaller.",
    ),
]
FaultOption = Annotated[
    list[str],
    typer.Option(
        "--fault",
        metavar="FAULT",
        help="Inject a fault, such as kill:host=1,step=5,phase=all-reduce. 'gpudist faults' lists all. Repeatable.",
    ),
]

GraceOption = Annotated[
    str,
    typer.Option("--grace", metavar="S", help="Seconds that the program has after SIGTERM to save and exit."),
]


def program_target(program: str | None, module: str | None) -> str:
    """Return the program for `Program.find`. Raise UsageError if none was given, or two."""
    if module is None and program is None:
        raise UsageError("A PROGRAM must be given. Received: none. Name one: train.py, -m package.module or train.py:function.")
    if module is not None and program is not None:
        raise UsageError(
            f"One program can be given. Received: -m {module} and {program!r}. "
            "Arguments of the program itself go after '--', the last thing on the line."
        )
    return program if program is not None else f"-m {module}"


def topologies(texts: Sequence[str], *, is_virtual: bool = False) -> list[Topology]:
    """Return the requested topologies, each once, in order. Default: `1x4`. Raise UsageError for an invalid one."""
    return list(dict.fromkeys(Topology.parse(text, is_virtual=is_virtual) for text in texts or [DEFAULT_TOPOLOGY]))


def number_of_steps(text: str) -> int | Literal["auto"] | None:
    """Return the number of `--steps`, None for all; raise UsageError when it is not a positive number, `all` or `auto`."""
    if text == "auto":
        return "auto"
    if text == "all":
        return None
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(f"--steps must be a positive whole number, 'all' or 'auto'. Received: --steps {text!r}. Try --steps 20.")


def number_of_seed(text: str) -> int:
    """Return the number of `--seed`. Raise UsageError for a number that NumPy does not take."""
    if text.isdecimal() and int(text) < 2**32:
        return int(text)
    raise UsageError(f"--seed must be a whole number from 0 to {2**32 - 1}. Received: --seed {text!r}. Try --seed 0.")


def number_of_seconds(text: str, option: str = "--timeout") -> float:
    """Return the number of an option. Raise UsageError if it is not positive."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds > 0:
        return seconds
    raise UsageError(f"{option} must be a positive number of seconds. Received: {option} {text!r}. Try {option} 60.")


def number_of_restarts(text: str | None, faults: Sequence[str]) -> int:
    """Return the number of `--restarts`. Raise UsageError for an invalid one, or without a fault."""
    if text is None:
        return DEFAULT_RESTARTS
    if not text.isdecimal():
        raise UsageError(
            f"--restarts must be a whole number, 0 or more. Received: --restarts {text!r}. Try --restarts {DEFAULT_RESTARTS}."
        )
    if not faults:
        raise UsageError(
            f"--restarts goes with --fault. Received: --restarts {text!r} alone. "
            "Name a fault ('gpudist faults' lists them), or leave the option out."
        )
    return int(text)


def check_choices(**values: str) -> None:
    """Check the options of which each has one of a few values; they are named as parameters are."""
    possible = {"device": DEVICES, "network": NETWORKS, "all_reduce": ALL_REDUCES, "precision": PRECISIONS}
    for name, value in values.items():
        option = "--" + name.replace("_", "-")
        if value not in possible[name]:
            those = ", ".join(possible[name])
            raise UsageError(f"{option} must be one of {those}. Received: {option} {value!r}. Choose one of them.")


def check_codes(codes: Sequence[str]) -> None:
    """Check that every `--allow` names a cause."""
    if codes:
        from emulate.verify.causes import all_causes

        all_codes = [cause.code for cause in all_causes()]
        for code in codes:
            known_code(code, all_codes, "--allow")


def known_code(code: str, codes: Iterable[str], option: str) -> str:
    """Return a cause's code. Raise UsageError if there is no such cause."""
    all_codes = list(codes)
    if code in all_codes:
        return code
    hint = did_you_mean(code, all_codes, 0.6) or "'gpudist causes' lists them."
    raise UsageError(f"{option} must be the code of a cause. Received: {option} {code!r}. {hint}")
