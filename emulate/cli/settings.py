"""`[tool.gpudist]` of pyproject.toml: what the command line does not say."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from emulate.cli import options
from emulate.errors import UsageError, did_you_mean
from emulate.program import working_directory

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FILE = "pyproject.toml"


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UsageError("must be a list of texts")
    return value


def _topologies(value: Any) -> list[str]:
    options.topologies(_texts(value))
    return _texts(value)


def _allow(value: Any) -> list[str]:
    options.check_codes(_texts(value))
    return _texts(value)


def _steps(value: Any) -> str:
    if value not in ("all", "auto") and type(value) is not int:
        raise UsageError('must be a whole number, "all" or "auto"')
    options.number_of_steps(str(value))
    return str(value)


def _timeout(value: Any) -> str:
    if type(value) not in (int, float):
        raise UsageError("must be a number of seconds")
    options.number_of_seconds(str(value))
    return str(value)


def _strict(value: Any) -> bool:
    if type(value) is not bool:
        raise UsageError("must be true or false")
    return value


_OPTIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "topologies": ("topology", _topologies),
    "steps": ("steps", _steps),
    "allow": ("allow", _allow),
    "strict": ("strict", _strict),
    "timeout": ("timeout", _timeout),
}
"""By key the parameter of the command, and what makes of the value what the command line would give."""


def fill(context: typer.Context, **given: Any) -> tuple[dict[str, Any], str]:
    """Take from `[tool.gpudist]` what the command line does not say.

    Args:
        context: Of the command.
        **given: Its parameters as they are without the file.

    Returns:
        The parameters, and a sentence that says which of them the file has set; empty where none.

    Raises:
        UsageError: Where the file has a key that does not exist, or a value that cannot be meant.
    """
    file, table = find(working_directory())
    if file is None:
        return given, ""
    said = {_OPTIONS[key][0]: (key, _value(key, value, file)) for key, value in table.items() if _checked(key, file)}
    used = {name: said[name] for name in given if name in said and not _is_given(context, name)}
    keys = ", ".join(key for key, _ in used.values())
    note = f"Set by [tool.gpudist] of {file}: {keys}." if used else ""
    return {**given, **{name: value for name, (_, value) in used.items()}}, note


def find(folder: Path) -> tuple[Path | None, Mapping[str, Any]]:
    """Find the nearest pyproject.toml upwards that has a `[tool.gpudist]`, as ruff finds its own.

    Args:
        folder: Where to begin.

    Returns:
        The file and its table; None where there is none.

    Raises:
        UsageError: Where a pyproject.toml on the way cannot be read.
    """
    for place in (folder, *folder.parents):
        file = place / _FILE
        if file.is_file():
            table = _read(file).get("tool", {}).get("gpudist")
            if table is not None:
                return file, table
    return None, {}


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{_FILE} must be valid TOML. Received: {str(file)!r} ({error}).") from None


def _checked(key: str, file: Path) -> bool:
    if key in _OPTIONS:
        return True
    hint = did_you_mean(key, _OPTIONS) or f"Possible keys: {', '.join(_OPTIONS)}."
    raise UsageError(f"A key of [tool.gpudist] must be one that gpudist knows. Received: {key} in {file}. {hint}")


def _value(key: str, value: Any, file: Path) -> Any:
    try:
        return _OPTIONS[key][1](value)
    except UsageError as error:
        said = str(error)
        if said.startswith("must "):
            said = f"{key} {said}. Received: {key} = {value!r}."
        raise UsageError(f"{said} ({key} of [tool.gpudist] in {file})") from None


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
