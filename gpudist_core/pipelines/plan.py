"""Describe what a pipeline does, in a form that does not depend on the order of the user's calls.

Its position is the batches that the training loop has taken, without those made ahead. The examples of a stream are shuffled in
a buffer of fixed size, and cut into batches, as arrays. The examples of a global batch are split into one part for each
replica, on its device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from gpudist_core.errors import UsageError, is_whole
from gpudist_core.pipelines import hashing
from gpudist_core.pipelines.cross_host_check import digest_of
from gpudist_core.pipelines.mapping import Stage
from gpudist_core.pipelines.sources import RowSource, StreamSource
from gpudist_core.pipelines.sources.access import Rows
from gpudist_core.pipelines.weighting import Weighting
from gpudist_core.replicas import Replicas


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


def placed(parts: Rows, cuts: list[int], devices: tuple[str, ...]) -> list[Rows]:
    """Place the examples of each replica on its device.

    Args:
        parts: The examples of the host, flattened, as arrays or tensors on the CPU.
        cuts: The boundaries between the replicas' examples.
        devices: The device of each replica.

    Returns:
        The tensors of each replica.
    """
    return [
        [_on(device, part, start, stop) for part in parts] for device, start, stop in zip(devices, cuts, cuts[1:], strict=False)
    ]


def _on(device: str, part: Any, start: int, stop: int) -> Any:
    if isinstance(part, np.ndarray):
        # Strings stay in the memory of the host: no device has them.
        with tf.device("CPU:0" if part.dtype.kind in "OSU" else device):
            return tf.convert_to_tensor(part[start:stop])
    with tf.device("CPU:0"):
        rows = part if stop - start == part.shape[0] else rows_between(part, start, stop)
    if rows.dtype == tf.string:
        return rows
    # Strategies copy no values: what is given to one replica stays on the device where it was made (TensorFlow 2.21).
    with tf.device(device):
        return tf.identity(rows)


def rows_between(part: Any, start: int, stop: int) -> Any:
    """Return some rows of an array or a tensor. Sparse tensors are supported.

    Args:
        part: An array or tensor of shape (rows, ...).
        start: The first row.
        stop: The first row after the last.

    Returns:
        The rows.
    """
    if isinstance(part, tf.SparseTensor):
        return tf.sparse.slice(part, [start, *[0] * (part.shape.rank - 1)], [stop - start, *part.dense_shape[1:]])
    return part[start:stop]


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
    rows: hashing.Integers
    repeats: hashing.Integers
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
    labels: hashing.Integers | None = None
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
        source: RowSource = self.source
        if self.labels is not None:
            drawn = hashing.balanced(self.labels, self.epoch_rows or 0, self.seed, epoch)
        else:
            drawn = hashing.shuffled(source.num_rows, self.seed, epoch) if self.shuffle else hashing.in_order(source.num_rows)
        for batch in range(start, self.num_batches or 0):
            first = batch * self.global_batch_size
            inner = cuts(min(self.global_batch_size, len(drawn.rows) - first), replicas.total, replicas.local)
            mine = drawn.part(first + inner[0], first + inner[-1])
            yield HostShare(batch, epoch, mine.rows, mine.repeats, [cut - inner[0] for cut in inner], None)

    def _streamed_shares(self, replicas: Replicas, epoch: int) -> Iterator[HostShare]:
        source: StreamSource = self.source
        # The first component is the number of each example in the stream.
        chunks = _counted(source.chunks(self.global_batch_size, self.seed if self.buffer else None, epoch), source.num_rows)
        if self.buffer:
            chunks = shuffled_chunks(chunks, self.buffer, self.seed, epoch)
        for batch, parts in enumerate(rebatched(chunks, self.global_batch_size)):
            if len(parts[0]) < self.global_batch_size and self.remainder == "drop":
                continue  # it is the last
            inner = cuts(len(parts[0]), replicas.total, replicas.local)
            mine = [part[inner[0] : inner[-1]] for part in parts]
            digest = digest_of(parts) if replicas.num_hosts > 1 else ""
            yield HostShare(batch, epoch, mine[0], np.zeros_like(mine[0]), [cut - inner[0] for cut in inner], mine[1:], digest)


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


_FORMAT = "gpudist.pipeline/1"


@dataclass
class Position:
    """Hold the position of a pipeline.

    Attributes:
        epoch: The number of the epoch, from 0.
        batch: The number of its global batches that were taken.
        turn: A counter of iterations and restores: an iterator with an earlier number is over.
        is_apart: Whether the other hosts may have had a batch that this host could not make.
    """

    epoch: int = 0
    batch: int = 0  # at most the batches of an epoch: the first batch of the next one is (epoch + 1, 0) once it is asked for
    turn: int = 0  # never goes down
    is_apart: bool = False  # never with one host


def identity_of(plan: Plan) -> dict[str, Any]:
    """Return a fingerprint of a pipeline's examples and their order."""
    return {
        "data": plan.source.fingerprint,
        "rows": -1 if plan.num_rows is None else plan.num_rows,
        "global_batch_size": plan.global_batch_size,
        "order": _order(plan),
        "seed": plan.seed,
        "remainder": plan.remainder,
    }


def _order(plan: Plan) -> str:
    if plan.labels is not None:
        return "balanced"
    return "shuffled" if plan.shuffle else f"buffer {plan.buffer}" if plan.buffer else "as it stands"


class UnknownLength(UsageError, TypeError):
    """Report that a stream has no length. It is a `TypeError`, because `list()` asks for a length and continues without one."""


class Positioned:
    """Know what a pipeline does, and which of its batches come next.

    Args:
        plan: What the pipeline does.
        position: Its position.
    """

    def __init__(self, plan: Plan, position: Position) -> None:
        self._plan = plan
        self._position = position

    def __len__(self) -> int:
        if self._plan.num_batches is None:
            raise UnknownLength(
                "A length needs a known number of examples",
                "Pass rows=... where the pipeline is made.",
                source=type(self._plan.source).__name__,
            )
        return self._plan.num_batches

    @property
    def num_batches(self) -> int | None:
        """Return the number of global batches in an epoch, or None for a stream of unknown length."""
        return self._plan.num_batches

    @property
    def epoch(self) -> int:
        """Return the number of the epoch that the next batch belongs to, from 0."""
        return self._position.epoch

    def state(self) -> dict[str, Any]:
        """Return the position: the global batches that the training loop has taken, without those made ahead.

        Returns:
            Plain values for JSON. They are valid on any topology, and in any process with the same data.
        """
        plan, position = self._plan, self._position
        # After the last batch of an epoch the next one is meant, also while the loop is still in the body for that batch.
        over = plan.num_batches is not None and position.batch >= plan.num_batches
        epoch, batch = (position.epoch + 1, 0) if over else (position.epoch, position.batch)
        return {"format": _FORMAT, "epoch": epoch, "batch": batch, **identity_of(plan)}

    def restore(self, state: Any) -> None:
        """Continue from a position: the next iteration returns the rest of that epoch.

        Args:
            state: The result of `state()` of a pipeline over the same data.

        Raises:
            UsageError: If it is not such a state, or belongs to other data, another order or other batches.
        """
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise UsageError("state must be a result of Pipeline.state()", state=state)
        for name, value in identity_of(self._plan).items():
            saved = state.get(name)
            if not _is(value, saved):
                raise UsageError(
                    f"A state must be restored over the same data in the same order: `{name}` must be what it was",
                    "Make the pipeline as it was when the state was saved, or start again without restoring.",
                    **{name: value, "saved": saved},
                )
        epoch, batch = state.get("epoch"), state.get("batch")
        most = self._plan.num_batches
        if not is_whole(epoch, 0) or not is_whole(batch, 0) or (most is not None and int(batch) > most):
            raise UsageError(
                f"A state must count epochs and batches from 0{'' if most is None else f', with {most} batches in an epoch'}",
                "Pass the result of Pipeline.state().",
                epoch=epoch,
                batch=batch,
            )
        position = self._position
        position.epoch, position.batch = int(epoch), int(batch)
        position.is_apart = False
        position.turn += 1


def _is(value: Any, saved: Any) -> bool:
    """Return whether a saved value, perhaps with another number type, is equal."""
    try:
        return saved is not None and bool(type(value)(saved) == value)
    except (TypeError, ValueError):
        return False


def rebatched(chunks: Iterator[Rows], size: int) -> Iterator[Rows]:
    """Yield the same examples in the same order, `size` at a time. The remainder comes last.

    Args:
        chunks: Examples, in chunks of any size.
        size: Examples of a batch.

    Yields:
        The batches.
    """
    held: list[Rows] = []
    count = 0
    for chunk in chunks:
        held.append(chunk)
        count += len(chunk[0])
        if count < size:
            continue
        whole = _joined(held)
        for start in range(0, count - size + 1, size):
            yield [part[start : start + size] for part in whole]
        count %= size
        held = [[part[len(part) - count :] for part in whole]] if count else []
    if count:
        yield _joined(held)


def _joined(chunks: list[Rows]) -> Rows:
    return chunks[0] if len(chunks) == 1 else [np.concatenate(parts) for parts in zip(*chunks, strict=True)]


def shuffled_chunks(chunks: Iterator[Rows], size: int, seed: int, epoch: int) -> Iterator[Rows]:
    """Yield the same examples, each swapped with a random one in a buffer of `size` examples.

    The remainder comes last, shuffled.

    Args:
        chunks: Examples, in chunks of any size.
        size: Examples in the buffer.
        seed: The seed of the pipeline.
        epoch: The number of the epoch.

    Yields:
        Chunks of examples.
    """
    slots: Rows = []  # examples, in numbered slots
    order: list[int] = []  # the slot of each example in the buffer, at most `size` of them
    free: list[int] = []  # the slots that hold no example of the buffer
    for number, chunk in enumerate(chunks):
        count = len(chunk[0])
        if len(free) < count:
            old = len(slots[0]) if slots else 0
            more = max(count - len(free), old)
            room = [np.empty((more, *values.shape[1:]), values.dtype) for values in chunk]
            slots = [np.concatenate(pair) for pair in zip(slots, room, strict=True)] if slots else room
            free += range(old, old + more)
        entering = [free.pop() for _ in range(count)]
        for part, values in zip(slots, chunk, strict=True):
            part[entering] = values
        draws = hashing.words(seed, hashing.BUFFER, epoch, number, np.arange(count))
        leaving = []
        for slot, place in zip(entering, (draws % np.uint64(size)).tolist(), strict=True):
            if len(order) < size:
                order.append(slot)
            else:
                leaving.append(order[place])
                order[place] = slot
        free += leaving
        if leaving:
            yield [part[leaving] for part in slots]
    if order:
        rest = np.asarray(order)[hashing.permutation(len(order), seed, hashing.BUFFER_REST, epoch)]
        yield [part[rest] for part in slots]
