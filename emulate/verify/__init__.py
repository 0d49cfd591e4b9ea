"""Reference, replay, noise floor, comparison, data ledger and causes: from runs to a verdict."""

from emulate.verify.session import assert_equivalent, compare_traces, verify
from emulate.verify.verdict import Difference, Finding, Reference, Run, Samples, Verdict

__all__ = [
    "Difference",
    "Finding",
    "Reference",
    "Run",
    "Samples",
    "Verdict",
    "assert_equivalent",
    "compare_traces",
    "verify",
]
