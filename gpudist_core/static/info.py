"""Describe which replica holds which part of a table: slices of equal height, the last ones shorter or empty."""

from __future__ import annotations

from dataclasses import dataclass

from gpudist_core.errors import UsageError
from gpudist_core.values import is_whole


@dataclass(frozen=True)
class ShardInfo:
    """Describe how a table is split over the replicas.

    Attributes:
        axis: The dimension that is split.
        rows: The size of the whole table along that dimension.
        total_replicas: Number of replicas on all hosts.

    Example:
        >>> ShardInfo(axis=0, rows=10, total_replicas=4).span(3)
        (9, 10)
    """

    axis: int
    rows: int
    total_replicas: int

    @property
    def height(self) -> int:
        """Return the allocated height of each slice, equal on all replicas. Unused rows are padding that is never read."""
        return -(-self.rows // self.total_replicas)

    def span(self, replica: int) -> tuple[int, int]:
        """Return the first row of a replica and the first row after its last.

        Args:
            replica: The replica's number, counted over all hosts.

        Returns:
            (start, stop), equal if the replica holds no rows.
        """
        return min(self.rows, replica * self.height), min(self.rows, (replica + 1) * self.height)

    def slice_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of each replica's variable.

        Args:
            shape: The shape of the whole table.

        Returns:
            The same shape with `height` along the split dimension.
        """
        return (*shape[: self.axis], self.height, *shape[self.axis + 1 :])


def checked_axis(axis: int, shape: tuple[int, ...]) -> int:
    """Return the number of an axis, counted from 0."""
    if not is_whole(axis) or not -len(shape) <= axis < len(shape):
        raise UsageError("axis must be an axis of the tensor", "Axes count from 0.", axis=axis, shape=shape)
    return axis % len(shape)


def without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Return a shape without one of its axes."""
    return (*shape[:axis], *shape[axis + 1 :])
