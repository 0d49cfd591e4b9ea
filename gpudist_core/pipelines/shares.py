"""Compute how many examples of a global batch each replica gets."""

from __future__ import annotations

from gpudist_core.errors import UsageError


def shares(rows: int, total: int) -> list[int]:
    """Return how many examples of a global batch each replica gets: contiguous shares, as equal as possible.

    The first `rows % total` replicas get one example more than the others. The shares, in the order of the replicas, are the
    global batch.

    Args:
        rows: Number of examples in the global batch, 0 or more.
        total: Number of replicas, 1 or more.

    Returns:
        The number of examples of each replica.

    Raises:
        UsageError: If `rows` is negative, or `total` is below 1.

    Examples:
        >>> from gpudist_core.pipelines import shares
        >>> shares(10, 4), shares(3, 4)
        ([3, 3, 2, 2], [1, 1, 1, 0])
    """
    if rows < 0 or total < 1:
        raise UsageError("shares needs rows >= 0 and total >= 1", rows=rows, total=total)
    each, more = divmod(rows, total)
    return [each + 1] * more + [each] * (total - more)


def cuts(rows: int, total: int, replicas: range) -> list[int]:
    """Return the boundaries between the shares of consecutive replicas: one number more than there are replicas."""
    each, more = divmod(rows, total)
    return [replica * each + min(replica, more) for replica in range(replicas.start, replicas.stop + 1)]
