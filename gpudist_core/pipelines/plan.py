"""Describe what a pipeline does, in a form that does not depend on the order of the user's calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gpudist_core.errors import UsageError
from gpudist_core.pipelines import order
from gpudist_core.pipelines.buffers import rebatched, shuffled_chunks
from gpudist_core.pipelines.cross_host_check import digest_of
from gpudist_core.pipelines.hashing import Integers
from gpudist_core.pipelines.mapping import Stage
from gpudist_core.pipelines.shares import cuts
from gpudist_core.pipelines.sources import Rows, RowSource, StreamSource
from gpudist_core.pipelines.weighting import Weighting
from gpudist_core.replicas import Replicas

Remainder = Literal["keep", "drop"]


@dataclass(frozen=True)
class HostShare:
    """Hold one host's examples of one global batch.

    Attributes:
        batch: The number of the global batch in its epoch.
        epoch: The number of the epoch.
        rows: The number of each example in the data.
        repeats: How often each example was drawn before in this epoch.
        cuts: The boundaries between the examples of this host's replicas: one number more than there are replicas.
        parts: The examples, if they came from a stream; None if they are still to be taken.
        digest: The fingerprint of all examples of the global batch, if several hosts read them from a stream.
    """

    batch: int
    epoch: int
    rows: Integers
    repeats: Integers
    cuts: list[int]
    parts: Rows | None
    digest: str = ""


@dataclass(frozen=True)
class Plan:
    """Describe what a pipeline does.

    Attributes:
        source: The source of the examples.
        global_batch_size: Number of examples in a global batch.
        seed: The seed of everything random.
        remainder: Whether the last examples of an epoch make a smaller batch, or none.
        shuffle: Whether examples with random access are shuffled.
        buffer: Number of examples in the shuffle buffer of a stream; 0 keeps its order.
        labels: The class of each example, if classes are balanced.
        epoch_rows: Number of examples in an epoch, if classes are balanced.
        weighting: The weight of each example, if batches have weights.
        stages: The user's functions and the cache, in the user's order.
        ahead: Number of batches made before they are requested.
    """

    source: Any
    global_batch_size: int
    seed: int
    remainder: Remainder
    shuffle: bool = False
    buffer: int = 0
    labels: Integers | None = None
    epoch_rows: int | None = None
    weighting: Weighting | None = None
    stages: tuple[Stage, ...] = ()
    ahead: int = 2

    @property
    def at_random(self) -> bool:
        """Return whether the source has random access."""
        return hasattr(self.source, "take")

    @property
    def num_rows(self) -> int | None:
        """Return the number of examples in an epoch, or None if it is unknown."""
        return self.epoch_rows if self.labels is not None else self.source.num_rows

    @property
    def num_batches(self) -> int | None:
        """Return the number of global batches in an epoch, or None if it is unknown."""
        if self.num_rows is None:
            return None
        return (
            self.num_rows if self.remainder == "drop" else self.num_rows + self.global_batch_size - 1
        ) // self.global_batch_size

    def shares(self, replicas: Replicas, epoch: int, start: int) -> Iterator[HostShare]:
        """Yield one host's share of each global batch of an epoch.

        Args:
            replicas: The replicas of all hosts, and which of them are this host's.
            epoch: The number of the epoch.
            start: The number of the first global batch.

        Yields:
            One share for each global batch, also if it has no examples.
        """
        parts = self._drawn_shares(replicas, epoch, start) if self.at_random else self._streamed_shares(replicas, epoch)
        for share in parts:
            if share.batch >= start:
                yield share

    def _drawn_shares(self, replicas: Replicas, epoch: int, start: int) -> Iterator[HostShare]:
        drawn = self._drawn(epoch)
        for batch in range(start, self.num_batches or 0):
            first = batch * self.global_batch_size
            inner = cuts(min(self.global_batch_size, len(drawn.rows) - first), replicas.total, replicas.local)
            mine = drawn.part(first + inner[0], first + inner[-1])
            yield HostShare(batch, epoch, mine.rows, mine.repeats, [cut - inner[0] for cut in inner], None)

    def _drawn(self, epoch: int) -> order.Drawn:
        source: RowSource = self.source
        if self.labels is not None:
            return order.balanced(self.labels, self.epoch_rows or 0, self.seed, epoch)
        return order.shuffled(source.num_rows, self.seed, epoch) if self.shuffle else order.in_order(source.num_rows)

    def _streamed_shares(self, replicas: Replicas, epoch: int) -> Iterator[HostShare]:
        for batch, parts in enumerate(self._global_batches(epoch)):
            inner = cuts(len(parts[0]), replicas.total, replicas.local)
            mine = [part[inner[0] : inner[-1]] for part in parts]
            digest = digest_of(parts) if replicas.num_hosts > 1 else ""
            yield HostShare(batch, epoch, mine[0], np.zeros_like(mine[0]), [cut - inner[0] for cut in inner], mine[1:], digest)

    def _global_batches(self, epoch: int) -> Iterator[Rows]:
        """Yield the global batches of a stream. The first component is the number of each example in the stream."""
        source: StreamSource = self.source
        chunks = _counted(source.chunks(self.global_batch_size, self.seed if self.buffer else None, epoch), source.num_rows)
        if self.buffer:
            chunks = shuffled_chunks(chunks, self.buffer, self.seed, epoch)
        for batch in rebatched(chunks, self.global_batch_size):
            if len(batch[0]) == self.global_batch_size or self.remainder == "keep":
                yield batch


def _counted(chunks: Iterator[Rows], expected: int | None) -> Iterator[Rows]:
    count = 0
    for chunk in chunks:
        yield chunk
        count += len(chunk[0])
    if count == 0 or (expected is not None and count != expected):
        raise UsageError(
            "A stream must yield at least one example, and as many as rows= says",
            "Check what it yields in its second iteration. If the number varies, leave rows= out.",
            rows=expected,
            found=count,
        )
