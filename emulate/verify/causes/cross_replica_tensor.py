"""Detect operations of a replica that take a tensor of another replica."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.causes.text import GENERAL
from emulate.verify.lines import Blame


def _search(case: Case) -> Sign | None:
    crossings = case.lines.crossings()
    if not crossings:
        return None
    first = crossings[0]
    case.cut(0, "a replica computes with another replica's tensor")
    operations = "operation" if first["number"] == 1 else "operations"
    return Sign(
        f"Replica {first['replica']} computes its loss with a tensor of replica {first['of']}.",
        (
            f"{first['number']} {operations} of one replica (first {first['operation']}) take, from no collective, a "
            "tensor that another replica has made of its own examples"
        ),
        [GENERAL, _OF_KERAS] if case.facts.compiled else None,
    )


_OF_KERAS = "With losses that Keras keeps on layers"


def _lines(case: Case) -> list[dict[str, object]]:
    return [entry for event in case.lines.crossings() for entry in event["lines"]]


CROSS_REPLICA_TENSOR = Cause("cross-replica-tensor", _search, blame=(Blame("loss", _lines),))
