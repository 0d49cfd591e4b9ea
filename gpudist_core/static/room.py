"""Check that a tensor fits into memory before anything is allocated."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import tensorflow as tf

from gpudist_core.errors import Unavailable
from gpudist_core.upstream import static as upstream

MIB = 1 << 20


def check_room(needed: Mapping[str, int], advice: str) -> None:
    """Raise if a device does not have enough free memory for an allocation.

    Args:
        needed: Bytes by the device's full name.
        advice: What to do, a sentence.

    Raises:
        Unavailable: With the numbers.
    """
    limits = upstream.memory_limits()
    by_place: Counter[str] = Counter()
    for device, size in needed.items():
        name = device.rpartition("/device:")[2]
        # Several logical devices of one CPU share its memory, and so do devices that are emulated on it.
        by_place[name if name in limits else "host"] += size
    for place, size in by_place.items():
        room = host_bytes() if place == "host" else limits[place] - _used(place)
        if room is not None and size > room:
            raise Unavailable(
                f"A static tensor must fit into the memory of its device. Received: needed={_text(size)} on {place}, "
                f"available={_text(room)}. {advice}"
            )


def host_bytes() -> int | None:
    """Return the bytes of host memory that are available without swapping; None if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    free = [kib << 10] if kib is not None else []
    group = Path("/sys/fs/cgroup")  # a container's own limit (cgroup 2)
    with contextlib.suppress(OSError, ValueError):  # there is no such limit, or it is "max"
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(free, default=None)


def _used(place: str) -> int:
    return int(tf.config.experimental.get_memory_info(place)["current"])


def _text(size: int) -> str:
    return f"{size} bytes ({size / MIB:.1f} MiB)"
