"""Read examples with random access: records of TFRecord files, or files of any kind with the user's own function.

The headers of a TFRecord file give the places of its records, and only requested records are read. TensorFlow's own reader of
single records reads a whole buffer for each (186 us for 1 KB), and TensorFlow exports no CRC-32C, their checksum.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.pipelines.hashing import FILES, Integers, permutation
from gpudist_core.pipelines.sources.access import Rows, all_in_type, digest, evenly, numpy_type, spec_of, stacked

_READERS = 8


class _Files:
    """Hold files and the function that reads one.

    Args:
        files: The paths.
        read: A function from a path to what is in the file.
    """

    def __init__(self, files: Any, read: Callable[[str], Any]) -> None:
        self._files = paths_of(files)
        self._read = read

    @cached_property
    def fingerprint(self) -> str:
        """Return a fingerprint of these examples."""
        return digest([os.path.basename(path) for path in self._files])

    @cached_property
    def looks(self) -> str:
        """Return the text that hosts compare before they start: the names of all files, and of a few the size and the middle.

        Start and end of a file are not used: they may contain its date.
        """
        content = []
        for path in (self._files[place] for place in evenly(len(self._files))):
            if not tf.io.gfile.isdir(path):  # a row may be a folder
                with _opened(path) as (read, size):
                    content.append((size, read(size // 2, _LOOKED_AT_OF_FILE)))
        names = [os.path.basename(path) for path in self._files]
        return f"{len(names)} files from {names[0]!r} on: {digest(names, content)[:8]}"


class FileRows(_Files):
    """Provide files that are one example each, with random access. A host reads only the files of its examples.

    Args:
        files: The paths, in the order of the examples.
        read: A function from a path to the example: a structure of arrays or scalars with the same shapes for every file.
    """

    @property
    def num_rows(self) -> int:
        """Return the number of examples."""
        return len(self._files)

    @cached_property
    def spec(self) -> Any:
        """Return the structure of one example, taken from the first file."""
        return tf.nest.map_structure(spec_of, self._read(self._files[0]))

    def take(self, rows: Integers) -> Rows:
        # Files are waited for, not computed: several at once, whatever the number of cores.
        with ThreadPoolExecutor(min(_READERS, max(1, len(rows)))) as pool:
            rows_of_files = list(pool.map(lambda row: tf.nest.flatten(self._read(self._files[row])), rows.tolist()))
        return stacked(rows_of_files, tf.nest.flatten(self.spec))


class FileStream(_Files):
    """Provide files with many examples each. Every host reads all of them, one after the other.

    Args:
        files: The paths.
        read: A function from a path to the examples: a structure of arrays with equal first axes.
    """

    num_rows: int | None = None

    @cached_property
    def spec(self) -> Any:
        """Return the structure of one example, taken from the first file."""

        def row(value: Any) -> Any:
            whole = spec_of(value)
            return tf.TensorSpec(whole.shape[1:], whole.dtype)

        return tf.nest.map_structure(row, self._read(self._files[0]))

    def chunks(self, size: int, seed: int | None, epoch: int) -> Iterator[Rows]:
        numbers = range(len(self._files)) if seed is None else permutation(len(self._files), seed, FILES, epoch).tolist()
        for number in numbers:
            parts = self._rows(self._files[number])
            # The same number in each epoch, whatever the order of the files and the length of the others.
            numbered = [np.arange(len(parts[0])) + (number << 32), *parts]
            for start in range(0, len(parts[0]), size):
                yield [part[start : start + size] for part in numbered]

    def keeping(self) -> FileStream:
        """Return the same examples; each file is read once."""
        return FileStream(self._files, cache(self._read))

    def _rows(self, path: str) -> Rows:
        parts = [np.asarray(part) for part in tf.nest.flatten(self._read(path))]
        specs = tf.nest.flatten(self.spec)
        shapes: Sequence[Any] = [part.shape for part in parts]
        if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
            raise UsageError(
                "read must return arrays with the same number of examples along their first axes",
                "Return such arrays, or use row_per_file=True if a file is one example.",
                file=path,
                shapes=shapes,
            )
        if [shape[1:] for shape in shapes] != [tuple(spec.shape) for spec in specs]:
            raise UsageError(
                "The examples of all files must have one shape",
                "Bring them to one shape where they are read.",
                file=path,
                rows=[shape[1:] for shape in shapes],
                first_file=[tuple(spec.shape) for spec in specs],
            )
        return [all_in_type(part, numpy_type(spec), place) for place, (part, spec) in enumerate(zip(parts, specs, strict=True))]


# A record is its length (8 bytes), the checksum of that (4), its data, and the checksum of those (4).
_HEADER, _FOOTER = 12, 4
_LOOKED_AT, _LOOKED_AT_OF_FILE = 1 << 16, 256
Read = Callable[[int, int], bytes]


class RecordSource:
    """Provide the records of TFRecord files, file after file. Each example is one string.

    Args:
        files: Paths of uncompressed TFRecord files. Paths with a scheme (`gs://`) are read with `tf.io.gfile`.

    Raises:
        UsageError: If there is no file or no record, or a file is missing, compressed or damaged.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self.spec = tf.TensorSpec((), tf.string)
        self._files = paths_of(files)
        if folders := [path for path in self._files if tf.io.gfile.isdir(path)]:
            raise UsageError(
                "A TFRecord file must not be a folder", "Pass the files in the folder: sorted(glob.glob(...)).", folders=folders
            )
        indexes = [_index(path) for path in self._files]
        self._offsets = np.concatenate([offsets for offsets, _ in indexes])
        self._lengths = np.concatenate([lengths for _, lengths in indexes])
        self._file_of_row = np.repeat(np.arange(len(indexes)), [len(offsets) for offsets, _ in indexes])
        self.num_rows = len(self._offsets)
        if self.num_rows == 0:
            raise UsageError("The files must hold at least one record", "Pass files with records.", files=self._files)

    def take(self, rows: Integers) -> Rows:
        records = np.empty(len(rows), object)
        for number in np.unique(self._file_of_row[rows]):
            places = np.flatnonzero(self._file_of_row[rows] == number)
            records[places] = self._take_from(self._files[number], rows[places])
        return [records]

    def _take_from(self, path: str, rows: Integers) -> Any:
        offsets, lengths = self._offsets[rows].tolist(), self._lengths[rows].tolist()
        with _opened(path) as (read, _):
            raw = [read(offset + _HEADER, length + _FOOTER) for offset, length in zip(offsets, lengths, strict=True)]
        data = np.empty(len(raw), object)
        data[:] = [record[:-_FOOTER] for record in raw]
        stored = np.frombuffer(b"".join(record[-_FOOTER:] for record in raw), "<u4")
        for wrong in np.flatnonzero(stored != masked_crc32c(data)):
            raise _damaged(path, offsets[wrong], "the data does not match its checksum")
        return data

    @cached_property
    def fingerprint(self) -> str:
        """Return a fingerprint of these examples."""
        return digest([os.path.basename(path) for path in self._files], self._offsets.tobytes(), self._lengths.tobytes())

    @cached_property
    def looks(self) -> str:
        """Return the text that hosts compare before they start: the lengths of all records, and a few records.

        The comparison ignores the order of the fields in a record: a host that wrote the files itself may have another order.
        """
        places = np.asarray(evenly(self.num_rows))
        offsets, lengths = self._offsets[places].tolist(), self._lengths[places].tolist()
        content = []
        for number, offset, length in zip(self._file_of_row[places].tolist(), offsets, lengths, strict=True):
            with _opened(self._files[number]) as (read, _):
                content.append(bytes(sorted(read(offset + _HEADER, min(length, _LOOKED_AT)))))
        checksum = digest(self._lengths.tobytes(), *content)
        return (
            f"{self.num_rows} records of {len(self._files)} files from {os.path.basename(self._files[0])!r} on: {checksum[:8]}"
        )


def paths_of(files: Any) -> list[str]:
    """Return existing paths, given as one or several paths.

    Args:
        files: A path, or several paths in the order of their examples.

    Returns:
        The paths.

    Raises:
        UsageError: If there is no path, or a file does not exist.
    """
    paths = [os.fspath(path) for path in ([files] if isinstance(files, (str, os.PathLike)) else files)]
    if not paths:
        raise UsageError(
            "files must name at least one file",
            "Pass the paths of the files. A pattern without a match gives none.",
            files=files,
        )
    missing = [path for path in paths if not tf.io.gfile.exists(path)]
    if missing:
        patterns = " Patterns are not expanded: sorted(glob.glob(...))." if any("*" in path for path in missing) else ""
        raise UsageError(
            "Each file must exist on every host", f"Use paths that every host can read.{patterns}", missing=missing
        )
    return paths


@contextmanager
def _opened(path: str) -> Iterator[tuple[Read, int]]:
    """Open a file: yield a function that reads (offset, size), and the size of the file."""
    if "://" in path:
        with tf.io.gfile.GFile(path, "rb") as remote:

            def read(offset: int, size: int) -> bytes:
                remote.seek(offset)
                return bytes(remote.read(size))

            yield read, int(remote.size())
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield lambda offset, size: os.pread(descriptor, size, offset), os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _index(path: str) -> tuple[Integers, Integers]:
    """Return the offset of each record in a file, and the length of its data."""
    offsets, lengths, headers = [], [], []
    with _opened(path) as (read, size):
        offset, fault = 0, None
        while offset < size and fault is None:
            header = read(offset, _HEADER)
            length = struct.unpack("<Q", header[:8])[0] if len(header) == _HEADER else size
            if offset + _HEADER + length + _FOOTER > size:
                fault = "the file ends inside a record"
            offsets.append(offset)
            lengths.append(length)
            headers.append(header)
            offset += _HEADER + length + _FOOTER
        _check(path, offsets, headers, fault)
    return np.asarray(offsets, np.int64), np.asarray(lengths, np.int64)


def _check(path: str, offsets: list[int], headers: list[bytes], fault: str | None) -> None:
    """Raise for the first record with a wrong header, if any: after a wrong length all further offsets are wrong."""
    whole = [header for header in headers if len(header) == _HEADER]
    stored = np.frombuffer(b"".join(header[8:] for header in whole), "<u4")
    wrong = np.flatnonzero(stored != masked_crc32c([header[:8] for header in whole]))
    if len(wrong):
        compressed = wrong[0] == 0 and headers[0][:1] in {b"\x1f", b"\x78"}
        raise _damaged(
            path, offsets[wrong[0]], "it looks compressed" if compressed else "the length does not match its checksum"
        )
    if fault:
        raise _damaged(path, offsets[-1], fault)


def _damaged(path: str, offset: int, fault: str) -> UsageError:
    return UsageError(
        "A TFRecord file must contain complete, uncompressed records",
        "Write the file again, or leave it out. Read a compressed file with from_dataset(tf.data.TFRecordDataset(...)).",
        file=path,
        offset=offset,
        found=fault,
    )


def masked_crc32c(records: Iterable[bytes]) -> npt.NDArray[np.uint32]:
    """Return the checksum of each record in the form in which TFRecord stores it."""
    sums = np.fromiter(map(google_crc32c.value, records), np.uint32)
    masked: npt.NDArray[np.uint32] = ((sums >> np.uint32(15)) | (sums << np.uint32(17))) + np.uint32(0xA282EAD8)
    return masked
