"""Which replica holds which part of a table: slices of equal height, the last ones shorter or empty."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShardInfo:
    """How a table lies over the replicas; the variable with the slices carries it as `_gpudist_shard`.

    Attributes:
        axis: The dimension that is split.
        rows: The size of the whole table along it.
        total_replicas: Replicas in all, over all hosts.

    Example:
        >>> ShardInfo(axis=0, rows=10, total_replicas=4).span(3)
        (9, 10)
    """

    axis: int
    rows: int
    total_replicas: int

    @property
    def height(self) -> int:
        """What each replica has room for, the same on all; where there are fewer rows the rest is padding, never read."""
        return -(-self.rows // self.total_replicas)

    def span(self, replica: int) -> tuple[int, int]:
        """The first row of a replica and the first after its last.

        Args:
            replica: The replica's number, counted over all hosts.

        Returns:
            (start, stop), equal where it holds none.
        """
        return min(self.rows, replica * self.height), min(self.rows, (replica + 1) * self.height)

    def slice_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each replica's variable.

        Args:
            shape: The shape of the whole table.

        Returns:
            The same with `height` along the axis.
        """
        return (*shape[: self.axis], self.height, *shape[self.axis + 1 :])
