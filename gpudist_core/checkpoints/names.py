"""Name variables in a way that is equal in every run: the path in the model without Keras's counters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


class Numbered:
    """Replace the counters in paths by new ones: a second model in a process has `dense_2` instead of `dense`."""

    def __init__(self) -> None:
        self._by_base: dict[str, dict[str, int]] = {}

    def __call__(self, path: str) -> str:
        """Return the path with each part's counter replaced by the number of earlier parts of that name.

        Args:
            path: A path such as `sequential_3/dense_7/kernel`.

        Returns:
            A path such as `sequential/dense/kernel`.
        """
        return "/".join(self._part(part) for part in path.split("/"))

    def _part(self, part: str) -> str:
        base = re.sub(r"_\d+$", "", part)
        numbers = self._by_base.setdefault(base, {})
        number = numbers.setdefault(part, len(numbers))
        return base if number == 0 else f"{base}_{number}"


def unique(names: Iterable[str]) -> list[str]:
    """Return the names, with `#2`, `#3` appended to repeated ones."""
    taken: dict[str, int] = {}
    result = []
    for name in names:
        taken[name] = taken.get(name, 0) + 1
        result.append(name if taken[name] == 1 else f"{name}#{taken[name]}")
    return result


def path_of(variable: Any) -> str:
    """Return the path of a Keras variable in its model, or the name of a tf.Variable."""
    path = getattr(variable, "path", None) or getattr(variable, "name", None) or "variable"
    return str(path).removesuffix(":0")


def of_variables(variables: Iterable[Any], numbered: Numbered) -> list[str]:
    """Return unique names for a model's variables, in order."""
    return unique(numbered(path_of(variable)) for variable in variables)


def of_slots(variables: Iterable[Any], model_names: Mapping[str, str], numbered: Numbered) -> list[str]:
    """Return unique names for an optimizer's variables. A slot is named after its variable.

    Args:
        variables: The optimizer's variables, in order.
        model_names: The names of the model's variables by their paths.
        numbered: The counters for the optimizer.

    Returns:
        Names such as `adam/iteration` and `adam/sequential/dense/kernel/momentum`.
    """
    owners = {path.replace("/", "_"): name for path, name in model_names.items()}
    return unique(_slot(path_of(variable), owners, numbered) for variable in variables)


def owner_of(path: str, owners: Mapping[str, Any]) -> str | None:
    """Return the longest flattened path that is a prefix of a slot's path; None if the slot belongs to no variable."""
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
