"""Write one checkpoint: every host writes its own file, the first one the manifest and the name; all or nothing.

It is written in the background, one at a time, with its failure reported at the next call. The training waits only for the
copy of its values (`Held`). After that the values may change.

Three things make this more than a file that is written and renamed:

- Each host has a part that no other host has: its slices of large tables, and the state of its process. To bring all to one
  host first would need its memory, and a collective of the training's size. So each host writes what it has, into a folder
  that all see, and only descriptions are exchanged.
- The hosts talk in a thread, beside the training. A collective of TensorFlow is not possible there: collectives must be in
  the same order on all hosts, and one from a thread would come between those of the steps in another place on each host. So
  the hosts exchange small texts by the key-value store of the job (`hosts.TextExchange`), which needs no order.
- A host may fail, or be killed, in any line. A checkpoint is one that has its final name. Everything before that is done
  under a name that no reader looks for (`Folder.begun`), and the last act is one rename. The folder is flushed to the disk
  before it gets its name, and the name after it (`Folder.commit`).

All hosts pass three places together, and at each one a failure of one host is a failure of all (`_all_well`):

1. The first host has made the folder, and removed what a killed run has left. Before that no host may write.
2. Every host has written its part, and tells the checksum of its description. Before that no manifest may be written.
3. The first host has read all descriptions, written the manifest, and renamed the folder. Before that no host may report
   success: a run that is told so may be stopped right after it.

The first host compares each description with the checksum that was told. They differ where the hosts do not see the same
folder. Without this, such a checkpoint would look complete until it is restored.

Checkpoints of later steps are set aside before the rename. They are there if a run was restored from an older one on
purpose. A later start must not take them for the newest of this run. They are kept, as the user may still want them.

What is one too many is removed last, and a failure of it is no failure of the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpudist_core.checkpoints.files import DataFile, Entry, Manifest, write_json, write_manifest
from gpudist_core.checkpoints.folder import Folder
from gpudist_core.checkpoints.hosts import TextExchange
from gpudist_core.checkpoints.items import Array
from gpudist_core.errors import SaveFailed

Pieces = Sequence[tuple[int, int, Array]]


@dataclass(frozen=True)
class Held:
    """Hold one item's values on this host, copied so that the training can continue."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    axis: int | None
    pieces: Pieces


@dataclass(frozen=True)
class Snapshot:
    """Hold what this host writes of one checkpoint.

    Attributes:
        step: The step of the checkpoint.
        held: The arrays; those without pieces here belong to another host.
        states: The states that all hosts share, with names in place of arrays.
        own: The state of this host alone.
        info: Topology, versions, time and reason.
    """

    step: int
    held: Sequence[Held]
    states: Mapping[str, Any]
    own: Any
    info: Mapping[str, Any]


def write(snapshot: Snapshot, folder: Folder, exchange: TextExchange, keep: int) -> Path:
    """Write a checkpoint together with the other hosts.

    Args:
        snapshot: This host's part of it.
        folder: The folder of the checkpoints.
        exchange: The hosts that write. The first makes the folder and gives it its name.
        keep: Number of checkpoints to keep, including this one.

    Returns:
        Its path.

    Raises:
        SaveFailed: If any host could not write. Nothing of it is left.
        HostMissing: If a host did not take part in time.
    """
    name = f"saving step {snapshot.step}"
    is_first = exchange.host == 0
    try:
        _all_well(exchange, f"{name}: making its folder", snapshot.step, _try(is_first, lambda: folder.begin(snapshot.step)))
        part, failure = 0, ""
        try:
            part = _write_part(snapshot, folder.begun(snapshot.step), exchange.host)
        except OSError as error:
            failure = _text(error)
        parts = _all_well(exchange, f"{name}: writing", snapshot.step, failure, part)
        _all_well(exchange, f"{name}: naming it", snapshot.step, _try(is_first, lambda: _finish(snapshot, folder, parts, keep)))
    except BaseException:
        if is_first:
            folder.abandon(snapshot.step)
        raise
    return folder.of(snapshot.step)


def _all_well(exchange: TextExchange, what: str, step: int, failure: str, value: int = 0) -> list[int]:
    """Tell the other hosts whether this host succeeded. A failure of one host is a failure of all."""
    answers = exchange.all_gather(what, [failure, value])
    failures = {f"host {host}": text for host, (text, _) in enumerate(answers) if text}
    if failures:
        raise SaveFailed(
            f"A checkpoint must be written completely. Received: step={step}, "
            + "; ".join(f"{host}: {text}" for host, text in failures.items())
            + ". Nothing of it is left, earlier checkpoints are intact. Free disk space or fix the folder. The training may "
            "continue."
        )
    return [number for _, number in answers]


def _try(is_mine: bool, act: Callable[[], object]) -> str:
    try:
        if is_mine:
            act()
    except OSError as error:
        return _text(error)
    return ""


def _text(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}"


def _write_part(snapshot: Snapshot, path: Path, host: int) -> int:
    """Write this host's data file and its part of the manifest, and return the part's checksum."""
    data = DataFile(path / f"host-{host:03}.bin")
    try:
        entries = {
            held.name: Entry(
                held.shape, held.dtype, held.axis, tuple(data.add(values, start, stop) for start, stop, values in held.pieces)
            )
            for held in snapshot.held
        }
        data.close()
    except BaseException:
        data.abandon()
        raise
    described = {name: asdict(entry) for name, entry in entries.items() if entry.pieces}
    return write_json(_part(path, host), {"arrays": described, "own": snapshot.own})


def _part(path: Path, host: int) -> Path:
    return path / f"host-{host:03}.json"


def _finish(snapshot: Snapshot, folder: Folder, parts: Sequence[int], keep: int) -> None:
    """Write, on the first host, one manifest of all parts, then give the checkpoint its name."""
    path = folder.begun(snapshot.step)
    entries: dict[str, Entry] = {}
    parts_of_hosts = []
    for host, crc32 in enumerate(parts):
        data = _part(path, host).read_bytes()
        if zlib.crc32(data) != crc32:
            raise OSError(f"host {host}'s part was changed after it was written: the hosts do not see the same folder")
        parts_of_hosts.append(json.loads(data))
        for name, value in parts_of_hosts[-1]["arrays"].items():
            entry = Entry.from_json(value)
            before = entries[name].pieces if name in entries else ()
            entries[name] = Entry(entry.shape, entry.dtype, entry.axis, (*before, *entry.pieces))
    states = {**snapshot.states, "hosts": [part["own"] for part in parts_of_hosts]}
    write_manifest(path, Manifest(snapshot.step, entries, states, snapshot.info))
    for host in range(len(parts)):
        _part(path, host).unlink()
    for step in folder.steps():
        if step > snapshot.step:
            folder.set_aside(step)
    folder.commit(snapshot.step)
    with contextlib.suppress(OSError):  # what is one too many is removed the next time
        folder.prune(keep)


class Background:
    """Run one action at a time in a thread."""

    def __init__(self) -> None:
        # Both belong to the thread that calls `start` and `join`; the action sets the failure before it ends.
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None  # None while no action was started, and once it was told

    def start(self, act: Callable[[], Any]) -> None:
        """Start an action. The previous one must be over (`join`)."""
        assert self._thread is None

        def run() -> None:
            try:
                act()
            except BaseException as error:  # told by whoever joins
                self._failure = error

        # Not a daemon: a process that ends by itself ends after its last checkpoint.
        self._thread = threading.Thread(target=run, name="checkpoints: writing")
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Return whether an action was started and has ended."""
        return self._thread is not None and not self._thread.is_alive()

    def join(self) -> BaseException | None:
        """Wait for the action, and return its exception once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        return failure
