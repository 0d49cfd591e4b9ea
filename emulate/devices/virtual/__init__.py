"""Let many replicas take turns in one process: each one's step by one compiled function, their collectives by arithmetic."""

from emulate.devices.virtual.hosts import ASKED_FOR_HOST, install_virtual
from emulate.devices.virtual.replicas import in_ring_order

__all__ = ["ASKED_FOR_HOST", "in_ring_order", "install_virtual"]
