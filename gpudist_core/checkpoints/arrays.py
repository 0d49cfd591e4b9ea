"""Store arrays in a data file: raw little-endian values in C order, with a checksum for each block.

Blocks of 4 MiB are counted from the start of an array, so that some rows of a large table can be read and checked without the
rest. `numpy.memmap(file, dtype, "r", offset, shape)` reads an array without this module. bfloat16 is the upper half of a
float32.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gpudist_core.checkpoints.errors import Damaged

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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

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
        for block in _blocks(data):
            crc32.append(zlib.crc32(block))
            self._file.write(block)
        return Piece(self._path.name, offset, len(data), tuple(crc32), start, stop)

    def close(self) -> int:
        """Flush everything to the disk, and return the file's size in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._file.close()
        return size

    def abandon(self) -> None:
        """Close the file in its present state."""
        with contextlib.suppress(OSError):  # what could not be written before cannot be written now either
            self._file.close()


def _blocks(data: memoryview) -> Iterator[memoryview]:
    for first in range(0, len(data), BLOCK):
        yield data[first : first + BLOCK]


def check(folder: Path, name: str, piece: Piece, first: int = 0, last: int | None = None) -> None:
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


def load(folder: Path, piece: Piece, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
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
