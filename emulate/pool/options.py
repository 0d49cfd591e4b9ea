"""Hold the options of all clusters of a pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from emulate.errors import UsageError

_POSSIBLE = {
    "network": ("own", "host"),
    "all_reduce": ("auto", "ring", "hierarchical", "one-device"),
    "device": ("cpu", "gpu", "auto"),
}


@dataclass(frozen=True)
class Options:
    """Hold the options of all clusters of a pool.

    Raises:
        UsageError: If an option is not valid.
    """

    max_hosts: int = 12
    environment: Mapping[str, str] = field(default_factory=dict)
    network: str = "own"
    all_reduce: str = "auto"
    device: str = "cpu"
    keeps_gpus: bool = True

    def __post_init__(self) -> None:
        for name, possible in _POSSIBLE.items():
            value = getattr(self, name)
            if value not in possible:
                one_of = ", ".join(possible)
                raise UsageError(f"{name} must be one of {one_of}. Received: {name}={value!r}. Choose one of them.")
        if not (isinstance(self.max_hosts, int) and self.max_hosts >= 1):
            raise UsageError(
                f"A pool keeps at least one host. Received: max_hosts={self.max_hosts!r}. Give a number of processes, 12 say."
            )
