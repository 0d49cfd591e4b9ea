"""Define the options that several commands share, read their texts, and take what `[tool.gpudist]` sets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from emulate.errors import UsageError, did_you_mean
from emulate.program import working_directory
from emulate.told import Told, told
from emulate.topology import Topology

DEFAULT_TOPOLOGY = "1x4"
DEFAULT_STEPS = "auto"
DEFAULT_TIMEOUT = "300"
DEFAULT_RESTARTS = 3
DEFAULT_GRACE = "30"
"""As in Kubernetes and in Slurm (KillWait)."""


DEVICES = ("cpu", "gpu", "auto")
NETWORKS = ("own", "host")
ALL_REDUCES = ("auto", "ring", "hierarchical", "one-device")
PRECISIONS = ("float32", "float64")


_COMMON_TOPOLOGIES = ("1x2", "1x4", "1x8", "2x1", "2x2", "2x4", "4x1", "4x2", "2x1+1ps")
"""The topologies that shell completion offers. Any HxD is valid."""


def completes(*values: str) -> Callable[[str], list[str]]:
    """Return what a shell asks for the values that begin so."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def complete_code(incomplete: str) -> list[str]:
    """Return the codes of causes that begin so."""
    from emulate.verify.causes import all_causes

    return completes(*(cause.code for cause in all_causes()))(incomplete)


def option(name: str, metavar: str, text: str, completion: Callable[[str], list[str]] | None = None) -> Any:
    """Return an option that takes a value."""
    return typer.Option(name, metavar=metavar, autocompletion=completion, help=text)


def flag(name: str, text: str) -> Any:
    """Return an option without a value."""
    return typer.Option(name, help=text)


def choice(name: str, values: tuple[str, ...], text: str) -> Any:
    """Return an option that takes one of a few values."""
    return option(name, f"[{'|'.join(values)}]", text, completes(*values))


def topology_option(text: str) -> Any:
    """Return the option `--topology`, with its help."""
    return option("--topology", "HxD", text, completes(*_COMMON_TOPOLOGIES))


ProgramArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PROGRAM", show_default=False, help="train.py, train.ipynb, train.py:function or package.module:function"
    ),
]
ModuleOption = Annotated[str | None, option("-m", "MODULE", "Run a module instead of PROGRAM, like python -m.")]
DeviceOption = Annotated[
    str, choice("--device", DEVICES, "Device type. auto: GPUs if each device gets its own GPU, otherwise the CPU.")
]
AllowOption = Annotated[
    list[str],
    option("--allow", "CODE", "Accept a cause: it is reported, but does not change the verdict. Repeatable.", complete_code),
]
StrictOption = Annotated[bool, flag("--strict/--no-strict", "The verdict by-design also gives exit code 1.")]
TimeoutOption = Annotated[str, option("--timeout", "S", "Time limit of each run, in seconds.")]
NetworkOption = Annotated[
    str,
    choice("--network", NETWORKS, "Network of several hosts. own: a private network; host: the network of this machine."),
]
AllReduceOption = Annotated[
    str, choice("--all-reduce", ALL_REDUCES, "All-reduce algorithm. auto: one that works for every program.")
]
PrecisionOption = Annotated[
    str, choice("--precision", PRECISIONS, "Compute in this float type. float64 makes rounding errors smaller.")
]
FaultOption = Annotated[
    list[str],
    option(
        "--fault",
        "FAULT",
        "Inject a fault, such as kill:host=1,step=5,phase=all-reduce. 'gpudist faults' lists all. Repeatable.",
    ),
]
GraceOption = Annotated[str, option("--grace", "S", "Seconds that the program has after SIGTERM to save and exit.")]


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


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_KEYS: dict[str, tuple[str, Callable[[Any], bool], str, Callable[[Any], object]]] = {
    "topologies": ("topology", _are_texts, "a list of texts", topologies),
    "steps": (
        "steps",
        lambda value: value in ("all", "auto") or type(value) is int,
        'a whole number, "all" or "auto"',
        number_of_steps,
    ),
    "allow": ("allow", _are_texts, "a list of texts", check_codes),
    "strict": ("strict", lambda value: type(value) is bool, "true or false", bool),
    "timeout": ("timeout", lambda value: type(value) in (int, float), "a number of seconds", number_of_seconds),
}
"""By key the parameter of the command, whether a value is of its kind, the kind in words, and the check of the command line."""


def fill_from_file(context: typer.Context, **given: Any) -> tuple[dict[str, Any], tuple[Told, ...]]:
    """Take from `[tool.gpudist]` what the command line does not say.

    Args:
        context: Of the command.
        **given: Its parameters as they are without the file.

    Returns:
        The parameters, and a sentence that says which of them the file has set; empty where none.

    Raises:
        UsageError: Where the file has a key that does not exist, or a value that cannot be meant.
    """
    file, table = find_file(working_directory())
    if file is None:
        return given, ()
    said = {_KEYS[key][0]: (key, _value_of(key, value, file)) for key, value in table.items() if _checked(key, file)}
    sources = {name: context.get_parameter_source(name) for name in given if name in said}
    used = {name: said[name] for name, source in sources.items() if source is None or source.name != "COMMANDLINE"}
    keys = ", ".join(key for key, _ in used.values())
    note = (told("set-by-file")(f"Set by [tool.gpudist] of {file}: {keys}."),) if used else ()
    return {**given, **{name: value for name, (_, value) in used.items()}}, note


def find_file(folder: Path) -> tuple[Path | None, Mapping[str, Any]]:
    """Find the nearest pyproject.toml upwards that has a `[tool.gpudist]`, as ruff finds its own.

    Args:
        folder: Where to begin.

    Returns:
        The file and its table; None where there is none.

    Raises:
        UsageError: Where a pyproject.toml on the way cannot be read.
    """
    for place in (folder, *folder.parents):
        file = place / "pyproject.toml"
        if file.is_file():
            try:
                content = tomllib.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise UsageError(f"{file.name} must be valid TOML. Received: {str(file)!r} ({error}).") from None
            if (table := content.get("tool", {}).get("gpudist")) is not None:
                return file, table
    return None, {}


def _checked(key: str, file: Path) -> bool:
    if key in _KEYS:
        return True
    hint = did_you_mean(key, _KEYS) or f"Possible keys: {', '.join(_KEYS)}."
    raise UsageError(f"A key of [tool.gpudist] must be one that gpudist knows. Received: {key} in {file}. {hint}")


def _value_of(key: str, value: Any, file: Path) -> Any:
    """Return a value as the command line would give it."""
    _, is_of_kind, kind, check = _KEYS[key]
    where = f"({key} of [tool.gpudist] in {file})"
    if not is_of_kind(value):
        raise UsageError(f"{key} must be {kind}. Received: {key} = {value!r}. {where}")
    given = value if isinstance(value, (list, bool)) else str(value)
    try:
        check(given)
    except UsageError as error:
        raise UsageError(f"{error} {where}") from None
    return given
