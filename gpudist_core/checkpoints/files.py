"""Define the files of a checkpoint: arrays in data files, `manifest.json`, and states as JSON with the arrays beside it.

A data file has raw little-endian values in C order, with a checksum for each block. Blocks of 4 MiB are counted from the start
of an array, so that some rows of a large table can be read and checked without the rest. `numpy.memmap(file, dtype, "r",
offset, shape)` reads an array without this module. bfloat16 is the upper half of a float32.

The manifest lists what a checkpoint holds, where, and how to check it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from gpudist_core.errors import Damaged, UsageError

BLOCK = 4 << 20
_ALIGNED_TO = 64


@dataclass(frozen=True)
class Piece:
    """Describe where an array, or some of its rows, are stored.

    Attributes:
        file: The data file's name.
        offset: The start of the values, in bytes.
        size: The size of the values, in bytes.
        crc32: The checksum of each block.
        start: The first row in the piece, along the array's axis; 0 for a whole array.
        stop: The first row after the piece.
    """

    file: str
    offset: int
    size: int
    crc32: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def from_json(cls, value: Any) -> Piece:
        return cls(**{**value, "crc32": tuple(value["crc32"])})


class DataFile:
    """Write a data file.

    Args:
        path: The path; the file must not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb")

    def add(self, values: np.ndarray[Any, Any], start: int = 0, stop: int = 0) -> Piece:
        """Append an array.

        Args:
            values: An array of any shape and any numeric dtype.
            start: The first row, if it is a part of a larger array.
            stop: The first row after the part.

        Returns:
            Where the array is stored.
        """
        offset = self._file.tell()
        self._file.write(b"\0" * (-offset % _ALIGNED_TO))
        offset = self._file.tell()
        data = memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        crc32 = []
        for first in range(0, len(data), BLOCK):
            block = data[first : first + BLOCK]
            crc32.append(zlib.crc32(block))
            self._file.write(block)
        return Piece(self._path.name, offset, len(data), tuple(crc32), start, stop)

    def close(self) -> None:
        """Flush everything to the disk, and close the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close the file in its present state."""
        with contextlib.suppress(OSError):  # what could not be written before cannot be written now either
            self._file.close()


def check_blocks(folder: Path, name: str, piece: Piece, first: int = 0, last: int | None = None) -> None:
    """Compare the blocks that hold some bytes of a piece with their checksums.

    Args:
        folder: The checkpoint's folder.
        name: The array's name, for the message.
        piece: Where it is stored.
        first: The first byte of interest, relative to the piece.
        last: The byte after the last one; None for the end.

    Raises:
        Damaged: If a checksum differs, or the file is too short or missing.
    """
    last = piece.size if last is None else last
    try:
        with (folder / piece.file).open("rb") as file:
            for block in range(first // BLOCK, -(-last // BLOCK)):
                file.seek(piece.offset + block * BLOCK)
                size = min(BLOCK, piece.size - block * BLOCK)
                data = file.read(size)
                if len(data) != size:
                    raise Damaged(f"{piece.file} is cut off in {name}")
                if zlib.crc32(data) != piece.crc32[block]:
                    raise Damaged(f"{piece.file} was changed after it was written, in {name}")
    except FileNotFoundError:
        raise Damaged(f"{piece.file} is missing") from None


def load_piece(folder: Path, piece: Piece, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return a piece as an array that is read on use.

    Args:
        folder: The checkpoint's folder.
        piece: Where it is stored.
        dtype: The dtype's name.
        shape: The shape of the piece.

    Returns:
        The array, read-only.
    """
    if piece.size == 0:
        return np.zeros(shape, dtype_of(dtype))
    raw = np.memmap(folder / piece.file, np.uint8, "r", piece.offset, (piece.size,))
    return np.asarray(raw).view(dtype_of(dtype)).reshape(shape)


def dtype_of(name: str) -> np.dtype[Any]:
    """Return a NumPy dtype by its name, including those of TensorFlow (bfloat16, float8_e5m2, int4)."""
    try:
        return np.dtype(name)
    except TypeError:
        dtype: np.dtype[Any] = np.dtype(tf.as_dtype(name).as_numpy_dtype)
        return dtype


FORMAT = "gpudist.checkpoint/1"
MANIFEST = "manifest.json"


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


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest and flush it to the disk."""
    arrays = {name: asdict(entry) for name, entry in manifest.entries.items()}
    states, info = dict(manifest.states), dict(manifest.info)
    body = {"format": FORMAT, "step": manifest.step, "info": info, "states": states, "arrays": arrays}
    write_json(folder / MANIFEST, {**body, "crc32": _checksum(body)})


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Args:
        folder: The checkpoint.

    Returns:
        The manifest.

    Raises:
        Damaged: If it is missing, was changed after it was written, or has a format that this version does not support.
    """
    try:
        value = json.loads((folder / MANIFEST).read_bytes())
        file_format, crc32 = value["format"], value.pop("crc32", None)
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Damaged(f"{MANIFEST} is not a manifest") from None
    if crc32 != _checksum(value):
        raise Damaged(f"{MANIFEST} was changed after it was written")
    if file_format != FORMAT:
        raise Damaged(f"{MANIFEST} has format {file_format!r}, this version reads {FORMAT!r}")
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


_ARRAY = "$array"


class HasState(Protocol):
    """Have a state that JSON and arrays can hold: as a `Pipeline` does, or an object of the user."""

    def state(self) -> Any:
        """Return the state: see `encode_state`."""

    def restore(self, state: Any) -> None:
        """Restore what `state` returned."""


def encode_state(value: Any, name: str, keep: Callable[[str, np.ndarray[Any, Any]], None]) -> Any:
    """Encode a state as JSON.

    Args:
        value: Dicts with text keys, lists, tuples, numbers, texts, None, NumPy arrays and tensors.
        name: Its place, for the arrays' names and for messages.
        keep: A function that is called with the name and the values of each array.

    Returns:
        A value that JSON supports; tuples become lists.

    Raises:
        UsageError: For anything else.
    """
    if isinstance(value, Mapping):
        # As in a JSON pointer: {"a/b": ...} and {"a": {"b": ...}} are two arrays.
        for key in value:
            if not isinstance(key, str):
                raise UsageError(
                    "The keys of a state must be texts", "Return another form of it in state().", place=name, key=key
                )
        places = {key: f"{name}/{key.replace('~', '~0').replace('/', '~1')}" for key in value}
        return {key: encode_state(inner, places[key], keep) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode_state(inner, f"{name}/{i}", keep) for i, inner in enumerate(value)]
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    values = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    if values.dtype.kind in "OSUM" or values.dtype.hasobject:
        raise UsageError(
            "A state must consist of numbers, texts, lists, dicts and numeric arrays",
            "Return another form of it in state().",
            place=name,
            type=type(value).__name__,
        )
    keep(name, values)
    return {_ARRAY: name}


def decode_state(value: Any, array: Callable[[str], np.ndarray[Any, Any]]) -> Any:
    """Decode a state from `encode_state`. Lists stay lists.

    Args:
        value: The result of `encode_state`.
        array: A function that returns each array by its name.

    Returns:
        The state.
    """
    if isinstance(value, dict):
        return (
            array(value[_ARRAY])
            if set(value) == {_ARRAY}
            else {key: decode_state(inner, array) for key, inner in value.items()}
        )
    return [decode_state(inner, array) for inner in value] if isinstance(value, list) else value


def has_state(value: Any) -> bool:
    """Return whether an object has `state()` and `restore(state)`."""
    return callable(getattr(value, "state", None)) and callable(getattr(value, "restore", None))
