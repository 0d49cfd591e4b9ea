"""Run a training program on emulated multi-GPU topologies, and tell whether it trains the same model.

Importing it imports neither TensorFlow nor anything else that is slow; what is public is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emulate import faults
    from emulate.cluster import Cluster, Pool
    from emulate.errors import ByDesignWarning
    from emulate.report import assert_equivalent
    from emulate.topology import Topology
    from emulate.verify import Verdict, verify

__all__ = ["ByDesignWarning", "Cluster", "Pool", "Topology", "Verdict", "assert_equivalent", "faults", "verify"]

_HOMES = {
    "ByDesignWarning": "emulate.errors",
    "Cluster": "emulate.cluster",
    "Pool": "emulate.cluster",
    "Topology": "emulate.topology",
    "Verdict": "emulate.verify",
    "assert_equivalent": "emulate.report",
    "faults": "emulate.faults",
    "verify": "emulate.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'emulate' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    return home if name in ("faults", "verify") else getattr(home, name)  # emulate.verify is a package that can be called


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
