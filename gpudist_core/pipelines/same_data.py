"""Check once, before the first batch, that all hosts were given the same data.

A host that was given a part of the data would take only its share of that part, and no host would take the other examples.
"""

from __future__ import annotations

import json
from typing import Any

from gpudist_core.errors import UsageError
from gpudist_core.pipelines.cross_host_check import told_by_all
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
    own = identity_of(plan) | {"data": plan.source.looks}
    numbers = getattr(plan.source, "numbers", [])
    texts = told_by_all(strategy, "data", json.dumps([own, numbers]), _are_alike)
    if texts is None:
        return
    hosts, looked_at = zip(*map(json.loads, texts), strict=True)
    differing = {name: [host[name] for host in hosts] for name in own if any(host[name] != hosts[0][name] for host in hosts)}
    if not differing:
        differing = {
            "data": [host["data"] for host in hosts],
            "looked_at": [[round(x, 3) for x in some[:4]] for some in looked_at],
        }
    raise UsageError(
        "All hosts must be given the same data, in the same order: each takes the examples of its replicas",
        "Pass all of the data on each host: gpudist_core splits it. Code that draws, splits or shuffles it before needs a seed "
        "that is the same on all hosts.",
        **differing,
    )


def _are_alike(texts: list[str]) -> bool:
    (first, numbers), *others = map(json.loads, texts)
    return all(
        other == first and all(abs(a - b) <= _TOLERANCE for a, b in zip(of_other, numbers, strict=True))
        for other, of_other in others
    )
