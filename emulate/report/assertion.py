"""Provide the verdict as an assertion, for tests."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from emulate.errors import ByDesignWarning
from emulate.report.terminal import by_design_text, render

if TYPE_CHECKING:
    from emulate.program import Program
    from emulate.topology import Topology
    from emulate.verify.verdict import Verdict


def assert_equivalent(
    program: str | os.PathLike[str] | Callable[[], Any] | Program,
    topology: str | Topology | Sequence[str | Topology] = "1x4",
    **options: Any,
) -> None:
    """Raise AssertionError with the report unless the program trains the same model on every topology.

    The verdict `by-design` passes with a `ByDesignWarning`; with `strict=True` it fails.

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

    check_equivalent(verify(program, topology, **options))


def check_equivalent(verdict: Verdict) -> None:
    """Raise AssertionError with the report unless a verdict passes. Warn if it passes only by design.

    Args:
        verdict: The result of `emulate.verify`.

    Raises:
        AssertionError: With the whole report as its text.
    """
    __tracebackhide__ = True
    if not verdict.is_equivalent:
        raise AssertionError(render(verdict))
    if warning := by_design_text(verdict):
        warnings.warn(f"{warning} strict=True makes it fail.", ByDesignWarning, stacklevel=3)
