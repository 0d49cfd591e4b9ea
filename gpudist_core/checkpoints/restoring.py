"""Find the newest complete checkpoint that fits, and restore its values."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpudist_core.checkpoints import files
from gpudist_core.checkpoints.files import Entry, Manifest
from gpudist_core.checkpoints.items import Array, Item
from gpudist_core.errors import Damaged, Foreign


@dataclass(frozen=True)
class Opened:
    """Hold a complete checkpoint.

    Args:
        path: Its folder.
        manifest: Its manifest.
    """

    path: Path
    manifest: Manifest

    def assign(self, items: Iterable[Item]) -> None:
        """Assign its values to items that fit."""
        for item in items:
            entry = self.manifest.entries[item.name]
            item.assign(functools.partial(rows_of, self.path, entry), entry.rows)

    def state(self, name: str) -> Any:
        """Return one of its states, including arrays; None if it has no such state."""
        kept = self.manifest.states.get(name)
        return None if kept is None else files.decode_state(kept, self.array)

    def array(self, name: str) -> Array:
        """Return a whole array by its name."""
        entry = self.manifest.entries[name]
        return np.array(rows_of(self.path, entry, 0, entry.rows))


def open_checked(path: Path, items: Sequence[Item], needed_states: Iterable[str]) -> Opened:
    """Open a checkpoint, and check that everything this host needs is there, complete and fits.

    Args:
        path: Its folder.
        items: The items to restore.
        needed_states: The states to restore.

    Returns:
        The checkpoint.

    Raises:
        Damaged: If it was changed after it was written.
        Foreign: If it belongs to another run.
    """
    opened = Opened(path, files.read_manifest(path))
    _check_fits(opened.manifest, items, needed_states)
    for item in items:
        entry = opened.manifest.entries[item.name]
        for start, stop in item.wanted(entry.rows):
            _check_rows(path, item.name, entry, start, stop)
    for name, entry in opened.manifest.entries.items():
        if name.startswith(("state/", "random/")):
            _check_rows(path, name, entry, 0, entry.rows)
    return opened


def rows_of(path: Path, entry: Entry, start: int, stop: int) -> Array:
    """Return rows of an array that may be in several pieces; the whole array if it has no axis."""
    if entry.axis is None:
        return files.load_piece(path, entry.pieces[0], entry.dtype, entry.shape)
    pieces = []
    for piece in _overlapping(entry, start, stop):
        values = files.load_piece(path, piece, entry.dtype, _shape(entry, piece.stop - piece.start))
        rows = slice(max(start, piece.start) - piece.start, min(stop, piece.stop) - piece.start)
        index = (*[slice(None)] * entry.axis, rows)
        pieces.append(values[index])
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, entry.axis)


def _overlapping(entry: Entry, start: int, stop: int) -> list[files.Piece]:
    pieces = sorted(
        (piece for piece in entry.pieces if piece.start < stop and piece.stop > start), key=lambda piece: piece.start
    )
    reached = start
    for piece in pieces:
        if piece.start > reached:
            break
        reached = max(reached, piece.stop)
    if reached < stop:
        raise Damaged(f"rows {reached} to {stop} of an array are missing")
    return pieces


def _shape(entry: Entry, rows: int) -> tuple[int, ...]:
    assert entry.axis is not None
    return (*entry.shape[: entry.axis], rows, *entry.shape[entry.axis + 1 :])


def _check_rows(path: Path, name: str, entry: Entry, start: int, stop: int) -> None:
    """Check the bytes that hold some rows; along another axis than the first, the whole pieces."""
    if entry.axis is None:
        files.check_blocks(path, name, entry.pieces[0])
        return
    for piece in _overlapping(entry, start, stop):
        if entry.axis == 0 and piece.stop > piece.start:
            row = piece.size // (piece.stop - piece.start)
            first, last = max(start, piece.start) - piece.start, min(stop, piece.stop) - piece.start
            files.check_blocks(path, name, piece, first * row, last * row)
        else:
            files.check_blocks(path, name, piece)


def _check_fits(kept: Manifest, items: Sequence[Item], needed_states: Iterable[str]) -> None:
    """Check that names, shapes and dtypes are those of the run. Groups that the run does not have are ignored."""
    groups = {item.name.split("/")[0] for item in items}
    there = {name for name in kept.entries if name.split("/")[0] in groups}
    asked = {item.name: item for item in items}
    problems = []
    if only := sorted(there - asked.keys()):
        problems.append(f"only the checkpoint has {_some(only)}")
    if only := sorted(asked.keys() - there):
        problems.append(f"only this run has {_some(only)}")
    for name in sorted(there & asked.keys()):
        item, entry = asked[name], kept.entries[name]
        if not item.fits(entry.shape) or item.dtype != entry.dtype or (item.axis is None) != (entry.axis is None):
            problems.append(f"{name} is {_kind(entry)} in the checkpoint and {_kind(item)} in this run")
    missing = [name for name in needed_states if name not in kept.states]
    if missing:
        problems.append(f"it has no state for {_some(missing)}")
    if problems:
        raise Foreign("it is of something else: " + ", ".join(problems[:4]) + (", ..." if len(problems) > 4 else ""))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _kind(value: Item | Entry) -> str:
    return f"{value.dtype}{list(value.shape)}" + ("" if value.axis is None else " in slices")
