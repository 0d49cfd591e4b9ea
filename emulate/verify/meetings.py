"""Find files outside of each run's own folders, which several runs of a verification share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Met:
    """Hold the paths that runs have in common with others.

    Attributes:
        found: They read there what only another run can have written.
        read_back: They had written it themselves when they read it, and another run may have written it since.
        written: They wrote it.
    """

    found: tuple[str, ...] = ()
    read_back: tuple[str, ...] = ()
    written: tuple[str, ...] = ()

    @classmethod
    def of(cls, read: Mapping[str, bool], written: Collection[str], by_others: Collection[str]) -> Met:
        """Make the object for one run.

        Args:
            read: What it read, and whether it had written it itself by then.
            written: What it wrote.
            by_others: What other runs wrote.

        Returns:
            Where it met them.
        """
        shared = sorted(path for path in read if path in by_others)
        return cls(
            tuple(path for path in shared if not read[path]),
            tuple(path for path in shared if read[path]),
            tuple(sorted(path for path in written if path in by_others)),
        )

    @classmethod
    def together(cls, several: Iterable[Met]) -> Met:
        """Combine the paths of several runs."""
        every = list(several)
        parts = [[getattr(met, name) for met in every] for name in cls.__dataclass_fields__]
        return cls(*(tuple(dict.fromkeys(path for paths in part for path in paths)) for part in parts))

    @property
    def read(self) -> tuple[str, ...]:
        """Return what they read, starting with what only another run can have written."""
        return tuple(dict.fromkeys((*self.found, *self.read_back)))

    @property
    def paths(self) -> tuple[str, ...]:
        """Return all of the paths."""
        return tuple(dict.fromkeys((*self.read, *self.written)))
