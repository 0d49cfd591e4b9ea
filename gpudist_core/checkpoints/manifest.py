"""Read and write `manifest.json`, which lists what a checkpoint holds, where, and how to check it."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpudist_core.checkpoints.arrays import Piece
from gpudist_core.checkpoints.errors import Damaged

FORMAT = "gpudist.checkpoint/1"
NAME = "manifest.json"


@dataclass(frozen=True)
class Entry:
    """Describe one array.

    Attributes:
        shape: The shape of the whole array.
        dtype: The name of the dtype.
        axis: The axis along which the pieces follow each other; None for one piece.
        pieces: Where the values are stored.
    """

    shape: tuple[int, ...]
    dtype: str
    axis: int | None
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        """Return the number of rows along the axis; 0 without an axis."""
        return 0 if self.axis is None else self.shape[self.axis]

    def as_json(self) -> dict[str, Any]:
        pieces = [piece.as_json() for piece in self.pieces]
        return {"shape": list(self.shape), "dtype": self.dtype, "axis": self.axis, "pieces": pieces}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Entry:
        pieces = tuple(Piece.from_json(piece) for piece in value["pieces"])
        return cls(tuple(value["shape"]), value["dtype"], value["axis"], pieces)


@dataclass(frozen=True)
class Manifest:
    """Describe the content of a checkpoint.

    Attributes:
        step: The step after which it was saved.
        entries: Its arrays by name. A name starts with its group (`model`, `optimizer`, `metrics`, `state`, ...).
        states: The states of the pipeline, the step and others, with names in place of arrays.
        info: Topology, versions, time and reason. They are for people, and not needed to restore.
    """

    step: int
    entries: Mapping[str, Entry]
    states: Mapping[str, Any] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        entries = {name: entry.as_json() for name, entry in self.entries.items()}
        return {"format": FORMAT, "step": self.step, "info": dict(self.info), "states": dict(self.states), "arrays": entries}


def write(folder: Path, manifest: Manifest) -> None:
    """Write a manifest and flush it to the disk."""
    body = manifest.as_json()
    write_json(folder / NAME, {**body, "crc32": _checksum(body)})


def read(folder: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Args:
        folder: The checkpoint.

    Returns:
        The manifest.

    Raises:
        Damaged: If it is missing, was changed after it was written, or has a format that this version does not support.
    """
    try:
        value = json.loads((folder / NAME).read_bytes())
        file_format, crc32 = value["format"], value.pop("crc32", None)
    except FileNotFoundError:
        raise Damaged(f"{NAME} is missing") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Damaged(f"{NAME} is not a manifest") from None
    if crc32 != _checksum(value):
        raise Damaged(f"{NAME} was changed after it was written")
    if file_format != FORMAT:
        raise Damaged(f"{NAME} has format {file_format!r}, this version reads {FORMAT!r}")
    entries = {name: Entry.from_json(entry) for name, entry in value["arrays"].items()}
    return Manifest(value["step"], entries, value["states"], value["info"])


def write_json(path: Path, value: Any) -> int:
    """Write JSON, flush it to the disk, and return its checksum."""
    data = json.dumps(value, indent=1, allow_nan=False).encode()
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return zlib.crc32(data)


def _checksum(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
