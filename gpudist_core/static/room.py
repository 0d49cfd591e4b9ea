"""Whether a tensor fits, asked before anything is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpudist_core.errors import Unavailable
from gpudist_core.upstream import static as upstream

MIB = 1 << 20


def check_room(needed: Mapping[str, int], advice: str) -> None:
    """Raise where a device has not the room for what is about to be allocated on it.

    Args:
        needed: Bytes by the device's full name.
        advice: What to do, a sentence.

    Raises:
        Unavailable: With the numbers.
    """
    by_place: Counter[str] = Counter()
    for device, size in needed.items():
        by_place[_place(device)] += size
    available = available_bytes(list(by_place))
    for place, size in by_place.items():
        room = available.get(place)
        if room is not None and size > room:
            raise Unavailable(
                f"A static tensor must fit where it is kept. Received: needed={_text(size)} on {place}, available={_text(room)}. "
                + advice
            )


def available_bytes(places: Sequence[str]) -> dict[str, int]:
    """Bytes that are free; a place of which nothing is known is left out.

    Args:
        places: `host`, or an accelerator as `GPU:0`.

    Returns:
        Bytes by place.
    """
    found = {"host": room} if "host" in places and (room := host_bytes()) is not None else {}
    accelerators = [place for place in places if place != "host"]
    limits = upstream.memory_limits() if accelerators else {}
    return found | {place: limits[place] - _used(place) for place in accelerators if place in limits}


def host_bytes() -> int | None:
    """Bytes of host memory that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    free = [kib << 10] if kib is not None else []
    group = Path("/sys/fs/cgroup")  # a container's own limit (cgroup 2)
    try:
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no such limit, or "max"
        pass
    return min(free, default=None)


def _place(device: str) -> str:
    """`host` for every CPU, also where it is split into several logical devices: they share its memory."""
    name = device.rpartition("/device:")[2]
    return "host" if name.upper().startswith("CPU") or not name else name


def _used(place: str) -> int:
    import tensorflow as tf

    return int(tf.config.experimental.get_memory_info(place)["current"])


def _text(size: int) -> str:
    return f"{size} bytes ({size / MIB:.1f} MiB)"
