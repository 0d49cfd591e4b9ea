"""Mark what `make test` leaves to `make slow`: of a table of programs it judges few."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


def few(cases: Iterable[Case], fast: Collection[str], name: Callable[[Case], str] = str) -> list[Any]:
    """Return all cases as parameters of a test, with their names as ids: slow, unless they are named.

    Args:
        cases: The whole table.
        fast: The names of the cases that `make test` judges.
        name: Returns the name of a case.

    Raises:
        ValueError: When a name is not that of a case: a program that was renamed must not leave `make test` unnoticed.
    """
    named = {name(case): case for case in cases}
    if unknown := set(fast) - set(named):
        raise ValueError(f"Each fast case must be in the table. Received: fast={sorted(unknown)}. Use names of {list(named)}.")
    return [pytest.param(case, id=key, marks=() if key in fast else pytest.mark.slow) for key, case in named.items()]
