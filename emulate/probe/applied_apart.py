"""Join gradients that one run makes to the run that applies them: they belong to that run's step."""

from __future__ import annotations

from collections import Counter
from typing import Any

MOST_RUNS = 256
"""So many runs may be applied together."""

Run = dict[str, Any]


class Taped:
    """Hold runs whose gradients were taken but not applied: they belong to the step that applies them.

    Several runs may be applied together (accumulation), and several optimizers may apply one run's gradients, each once.
    """

    def __init__(self) -> None:
        self._runs: dict[int, list[Run]] = {}
        self._takers: dict[int, set[str]] = {}

    def add(self, replica: int, run: Run, kept_by: str | None) -> None:
        """Add a run that made gradients. `kept_by` names the program's function that stored them in variables."""
        if self._takers.pop(replica, None):
            self._runs.pop(replica)
        entry: dict[str, Any] = {name: run[name] for name in ("replica", "rows", "objective", "draws") if name in run}
        entry["kept_by"] = kept_by
        self._runs.setdefault(replica, []).append(entry)
        del self._runs[replica][:-MOST_RUNS]

    def take(self, optimizer: str, replicas: list[int] | None = None) -> list[Run]:
        """Return the runs whose gradients an optimizer applies, replica after replica. Default: those of all replicas."""
        chosen = sorted(self._runs) if replicas is None else replicas
        return [run for replica in chosen for run in self._take(optimizer, replica, self._runs.get(replica, []))]

    def take_kept(self, optimizer: str, replica: int, kept_by: str) -> list[Run]:
        """Return the runs of a replica in which the same function of the program stored its gradients."""
        return self._take(optimizer, replica, [run for run in self._runs.get(replica, []) if run["kept_by"] == kept_by])

    def _take(self, optimizer: str, replica: int, runs: list[Run]) -> list[Run]:
        if not runs or optimizer in self._takers.get(replica, set()):
            return []
        self._takers.setdefault(replica, set()).add(optimizer)
        return runs


def joined(runs: list[Run]) -> dict[str, Any]:
    """Return the examples of several runs together, the sum of their objectives if all have one, and the runs per replica."""
    if not runs:
        return {}
    fields: dict[str, Any] = {"rows": [row for run in runs for row in run.get("rows", [])]}
    fields["runs"] = max(Counter(run["replica"] for run in runs).values())
    fields["draws"] = [draw for run in runs for draw in run.get("draws", [])]
    if all("objective" in run for run in runs):
        fields["objective"] = sum(run["objective"] for run in runs)
    return fields
