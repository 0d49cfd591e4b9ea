"""The verdict as an assertion, for tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from emulate.report.terminal import render

if TYPE_CHECKING:
    from emulate.program import Program
    from emulate.topology import Topology


def assert_equivalent(
    program: str | os.PathLike[str] | Callable[[], Any] | Program,
    topology: str | Topology | Sequence[str | Topology] = "1x4",
    **options: Any,
) -> None:
    """Raise AssertionError with the report unless the program trains the same model on every topology.

    Args:
        program: As for `emulate.verify`.
        topology: As for `emulate.verify`.
        **options: As for `emulate.verify`.

    Raises:
        AssertionError: With the whole report as its text.

    Example:
        >>> assert_equivalent("train.py", topology="2x2")  # doctest: +SKIP
    """
    from emulate.verify import verify

    verdict = verify(program, topology, **options)
    if not verdict.is_equivalent:
        raise AssertionError(render(verdict))
