"""Gradients that are made in one run and applied in another: the step is the runs' whose gradients it applies."""

from __future__ import annotations

from collections import Counter
from typing import Any

MOST_RUNS = 256
"""So many runs may be applied together."""

Run = dict[str, Any]


class Taped:
    """Runs in which gradients were taken and not applied: they belong to the step that applies them.

    Several runs may be applied together (accumulation), and several optimizers may apply one run's gradients, each once.
    """

    def __init__(self) -> None:
        self._runs: dict[int, list[Run]] = {}
        self._takers: dict[int, set[str]] = {}

    def add(self, replica: int, run: Run, kept_by: str | None) -> None:
        """A run made gradients, and kept them in variables if `kept_by` names the program's function that did."""
        if self._takers.pop(replica, None):
            self._runs.pop(replica)
        kept: dict[str, Any] = {name: run[name] for name in ("replica", "rows", "objective", "draws") if name in run}
        kept["kept_by"] = kept_by
        self._runs.setdefault(replica, []).append(kept)
        del self._runs[replica][:-MOST_RUNS]

    def take(self, optimizer: str, replicas: list[int] | None = None) -> list[Run]:
        """The runs whose gradients an optimizer applies, replica after replica; all replicas' unless some are named."""
        chosen = sorted(self._runs) if replicas is None else replicas
        return [run for replica in chosen for run in self._take(optimizer, replica, self._runs.get(replica, []))]

    def take_kept(self, optimizer: str, replica: int, kept_by: str) -> list[Run]:
        """Those of a replica in which the same function of the program kept its gradients."""
        return self._take(optimizer, replica, [run for run in self._runs.get(replica, []) if run["kept_by"] == kept_by])

    def _take(self, optimizer: str, replica: int, runs: list[Run]) -> list[Run]:
        if not runs or optimizer in self._takers.get(replica, set()):
            return []
        self._takers.setdefault(replica, set()).add(optimizer)
        return runs


def joined(runs: list[Run]) -> dict[str, Any]:
    """The rows of several runs together, the sum of their objectives where all have one, and how many a replica made."""
    if not runs:
        return {}
    found: dict[str, Any] = {"rows": [row for run in runs for row in run.get("rows", [])]}
    found["runs"] = max(Counter(run["replica"] for run in runs).values())
    found["draws"] = [draw for run in runs for draw in run.get("draws", [])]
    if all("objective" in run for run in runs):
        found["objective"] = sum(run["objective"] for run in runs)
    return found
