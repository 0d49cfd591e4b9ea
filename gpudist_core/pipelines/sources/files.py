"""Read examples from files of any kind with the user's own function."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.pipelines.hashing import Integers, permutation
from gpudist_core.pipelines.order import FILES
from gpudist_core.pipelines.sources.access import Rows, all_in_type, digest, numpy_type, spec_of, stacked
from gpudist_core.pipelines.sources.records import looks_of, paths_of

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
        """Return the text that hosts compare before they start."""
        return looks_of(self._files)


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
