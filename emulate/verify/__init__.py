"""Reference, replay, noise floor, comparison, data ledger and causes: from runs to a verdict.

The package is also the public function of its name: `emulate.verify(program, ...)` is `emulate.verify.verify(program, ...)`.
"""

import sys
from types import ModuleType
from typing import Any

from emulate.verify.api import compare_traces, verify
from emulate.verify.noise import FACTOR
from emulate.verify.verdict import Difference, Farthest, Finding, Reference, Run, Samples, StepsRun, Verdict

__all__ = [
    "FACTOR",
    "Difference",
    "Farthest",
    "Finding",
    "Reference",
    "Run",
    "Samples",
    "StepsRun",
    "Verdict",
    "compare_traces",
    "verify",
]


class _CallablePackage(ModuleType):
    """Importing a package binds it to its name in the parent, where the public function has the same name."""

    __doc__ = verify.__doc__
    __wrapped__ = staticmethod(verify)

    def __call__(self, *args: Any, **kwargs: Any) -> Verdict:
        return verify(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
