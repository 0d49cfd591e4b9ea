"""Turn runs into a verdict: reference, replay, noise floor, comparison, data ledger and causes.

The package is also the public function of its name: `emulate.verify(program, ...)` is `emulate.verify.verify(program, ...)`.
"""

import inspect
import sys
from types import ModuleType
from typing import Any

from emulate.verify.api import changes_of_training, compare_traces, verify
from emulate.verify.noise import FACTOR
from emulate.verify.verdict import Difference, Farthest, Finding, Fix, Reference, Run, Samples, StepGraph, StepsRun, Verdict

__all__ = [
    "FACTOR",
    "Difference",
    "Farthest",
    "Finding",
    "Fix",
    "Reference",
    "Run",
    "Samples",
    "StepGraph",
    "StepsRun",
    "Verdict",
    "changes_of_training",
    "compare_traces",
    "verify",
]


class _CallablePackage(ModuleType):
    """Let the package be called: importing it binds it to the name of the public function."""

    __doc__ = verify.__doc__
    __wrapped__ = staticmethod(verify)

    def __call__(self, *args: Any, **kwargs: Any) -> Verdict:
        return verify(*args, **kwargs)


def _help() -> str:
    """Return the text of `help(emulate.verify)`: the function's docstring with its signature, where a package has its own."""
    summary, _, rest = inspect.cleandoc(verify.__doc__ or "").partition("\n\n")
    head, _, options = str(inspect.signature(verify)).partition(", *, ")
    return f"{summary}\n\nemulate.verify{head}, *,\n    {options.replace(', ', ',' + chr(10) + '    ')}\n\n{rest}"


sys.modules[__name__].__class__ = _CallablePackage
__doc__ = _help()
