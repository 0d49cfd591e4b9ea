"""How many rows of a global batch each replica has."""

from __future__ import annotations

from gpudist_core.errors import WrongUse


def shares(rows: int, total: int) -> list[int]:
    """How many rows of a global batch each replica has: contiguous, and as equal as can be.

    The first `rows % total` replicas have one row more than the others; the rows of the replicas, one after the other in the
    order of the replicas, are the global batch.

    Args:
        rows: Rows of the global batch, 0 or more.
        total: Replicas in all, 1 or more.

    Returns:
        Rows of each replica.

    Raises:
        WrongUse: `rows` is negative, or there is no replica.

    Examples:
        >>> from gpudist_core.pipelines import shares
        >>> shares(10, 4), shares(3, 4)
        ([3, 3, 2, 2], [1, 1, 1, 0])
    """
    if rows < 0 or total < 1:
        raise WrongUse("A share is of 0 or more rows, for 1 or more replicas", "Give both as counts.", rows=rows, total=total)
    each, more = divmod(rows, total)
    return [each + 1] * more + [each] * (total - more)


def cuts(rows: int, total: int, replicas: range) -> list[int]:
    """Where the shares of consecutive replicas begin and end in the global batch: one number more than there are replicas."""
    each, more = divmod(rows, total)
    return [replica * each + min(replica, more) for replica in range(replicas.start, replicas.stop + 1)]
