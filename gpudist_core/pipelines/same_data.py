"""Check once, before the first batch, that all hosts were given the same data.

A host that was given a part of the data would take only its share of that part, and no host would take the other examples.
"""

from __future__ import annotations

import json
from typing import Any

from gpudist_core.errors import UsageError
from gpudist_core.pipelines.alike import told_by_all
from gpudist_core.pipelines.plan import Plan
from gpudist_core.pipelines.position import identity_of

_TOLERANCE = 2e-3  # of numbers that each host has computed itself, on a device that adds up in no fixed order


def check(plan: Plan, strategy: Any) -> None:
    """Raise unless all hosts were given the same data in the same order.

    Args:
        plan: What a pipeline does on this host.
        strategy: The strategy of the hosts. All of them must ask.

    Raises:
        UsageError: If the hosts have different data.
    """
    known = identity_of(plan) | {"data": plan.source.looks}
    numbers = getattr(plan.source, "numbers", [])
    told = told_by_all(strategy, "data", json.dumps([known, numbers]), _are_alike)
    if told is None:
        return
    hosts, looked_at = zip(*map(json.loads, told), strict=True)
    differing = {name: [one[name] for one in hosts] for name in known if any(one[name] != hosts[0][name] for one in hosts)}
    if not differing:
        differing = {"data": [one["data"] for one in hosts], "looked_at": [[round(x, 3) for x in one[:4]] for one in looked_at]}
    raise UsageError(
        "All hosts must be given the same data, in the same order: each takes the examples of its replicas",
        "Pass all of the data on each host: gpudist_core splits it. Code that draws, splits or shuffles it before needs a seed "
        "that is the same on all hosts.",
        **differing,
    )


def _are_alike(told: list[str]) -> bool:
    (first, numbers), *others = map(json.loads, told)
    return all(
        known == first and all(abs(a - b) <= _TOLERANCE for a, b in zip(found, numbers, strict=True)) for known, found in others
    )
