"""Names of variables that are the same in every run: the path in the model without Keras's counters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


class Numbered:
    """Paths whose counters begin anew: the second model of a process has `dense_2` where the first has `dense`."""

    def __init__(self) -> None:
        self._by_base: dict[str, dict[str, int]] = {}

    def __call__(self, path: str) -> str:
        """The path with each part's counter replaced by how many parts of that name came before.

        Args:
            path: As `sequential_3/dense_7/kernel`.

        Returns:
            As `sequential/dense/kernel`.
        """
        return "/".join(self._part(part) for part in path.split("/"))

    def _part(self, part: str) -> str:
        base = re.sub(r"_\d+$", "", part)
        seen = self._by_base.setdefault(base, {})
        number = seen.setdefault(part, len(seen))
        return base if number == 0 else f"{base}_{number}"


def unique(names: Iterable[str]) -> list[str]:
    """The names, those that came before numbered `#2`, `#3`."""
    taken: dict[str, int] = {}
    result = []
    for name in names:
        taken[name] = taken.get(name, 0) + 1
        result.append(name if taken[name] == 1 else f"{name}#{taken[name]}")
    return result


def path_of(variable: Any) -> str:
    """Where a Keras variable stands in its model; a tf.Variable's name."""
    path = getattr(variable, "path", None) or getattr(variable, "name", None) or "variable"
    return str(path).removesuffix(":0")


def of_variables(variables: Iterable[Any], numbered: Numbered) -> list[str]:
    """Unique names for a model's variables, in order."""
    return unique(numbered(path_of(variable)) for variable in variables)


def of_slots(variables: Iterable[Any], model_names: Mapping[str, str], numbered: Numbered) -> list[str]:
    """Unique names for an optimizer's variables: a slot is named for the variable it belongs to.

    Args:
        variables: The optimizer's variables, in order.
        model_names: The names of the model's variables by their paths.
        numbered: Counters of its own.

    Returns:
        As `adam/iteration` and `adam/sequential/dense/kernel/momentum`.
    """
    owners = {path.replace("/", "_"): name for path, name in model_names.items()}
    return unique(_slot(path_of(variable), owners, numbered) for variable in variables)


def owner_of(path: str, owners: Mapping[str, Any]) -> str | None:
    """The longest of the flattened paths that a slot's path continues, None where it belongs to no variable."""
    prefix = path.rsplit("/", 1)[-1]
    while "_" in prefix:
        prefix = prefix.rpartition("_")[0]
        if prefix in owners:
            return prefix
    return None


def _slot(path: str, owners: Mapping[str, str], numbered: Numbered) -> str:
    flat = owner_of(path, owners)
    first, _, last = path.rpartition("/")
    optimizer = numbered((first or "optimizer").lower())
    return f"{optimizer}/{last.lower() if flat is None else owners[flat] + '/' + last[len(flat) + 1 :]}"
