"""What faults need of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from emulate.cluster.isolation import find_capability

TUN = Path("/dev/net/tun")


def _missing() -> str | None:
    if find_capability().network:
        return f"no network of its own here: {find_capability().network}"
    return None if os.access(TUN, os.R_OK | os.W_OK) else f"{TUN} may not be opened here"


needs_links = pytest.mark.skipif(_missing() is not None, reason=_missing() or "")
