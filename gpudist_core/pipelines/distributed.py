"""Feed a pipeline to the replicas of a strategy: per-replica batches, on their devices before they are requested.

The unit is the global batch, not the batch of a replica. Which examples are in it follows from the seed, the epoch and its
number alone (`plan`). The topology decides only where it is cut. So each host computes by itself which rows its replicas
get, without a word to the others, and a run that continues on another topology takes the same global batches.

`tf.data` and `Strategy.experimental_distribute_dataset` are not used for it:

- They split files or elements among hosts. What is in a global batch then depends on the number of hosts, and hosts may
  have different numbers of batches.
- Their order comes from generators whose state is in the iterator. A saved iterator belongs to one topology and one
  version.
- A distributed dataset makes an iterator for each epoch, which takes 35 ms a replica (TensorFlow 2.21).

The price is Python in the path of each batch. `LookAhead` makes the next batches in threads, up to the copy to the devices.

A stream has no row numbers to begin with: an example is known by its place among those before it. So every host reads all
of a stream and keeps its own part. That is right only if all hosts read the same examples, so they take each batch of a
stream together and compare (`cross_host_check.Alike`). What the hosts were given is compared once in any case, before the
first batch: a host that was given a part of the data would take only its share of that part, and no host would take the
other examples.

The position counts what the training loop has taken, not what was made ahead. It is moved when a batch is handed over, so
that a checkpoint in the body of the loop has the batch of that body behind it. What was made ahead is made again after a
restore. There is one position for a pipeline, so only one iteration may move it. Each iteration has a number
(`Position.turn`), and an earlier one is refused rather than continued. After an error on one of several hosts the others
may have had the batch that is missing here, and no host can tell. So the position is no longer valid (`Position.is_apart`)
until it is restored on all.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.pipelines.cross_host_check import Alike, told_by_all
from gpudist_core.pipelines.lookahead import LookAhead
from gpudist_core.pipelines.mapping import Mapper, RowCache
from gpudist_core.pipelines.plan import HostShare, Plan, Position, Positioned, identity_of, placed
from gpudist_core.pipelines.sources.access import Rows, digest
from gpudist_core.pipelines.weighting import label_component
from gpudist_core.replicas import per_replica, replicas_of


class Rowwise:
    """Process the examples of a share before they are placed on devices: cache, functions, weights.

    Args:
        plan: What the pipeline does.
    """

    def __init__(self, plan: Plan) -> None:
        places = [i for i, stage in enumerate(plan.stages) if stage.function is None]
        end = places[-1] if places else 0
        self._plan = plan
        self._cache = RowCache() if places else None
        self._before = Mapper([stage for stage in plan.stages[:end] if stage.function], plan.source.spec, 0)
        after = [stage for stage in plan.stages[end:] if stage.function]
        self._after = Mapper(after, self._before.spec, 0)
        self.spec, self._label = self._after.spec, None
        if plan.weighting is None:
            return
        by_class = plan.weighting.of_rows is None
        self._label = label_component(self.spec) if by_class else None
        if not isinstance(self.spec, tuple) or len(self.spec) != 2:
            raise UsageError(
                "Weights need examples of the form (x, y)", "Return (x, y) from the last map, without a weight.", row=self.spec
            )
        shape = tf.nest.flatten(self.spec[1])[0].shape[:-1] if by_class else ()
        self.spec = (*self.spec, tf.TensorSpec(shape, plan.weighting.dtype))

    def __call__(self, share: HostShare) -> Rows:
        """Return the examples of a share as the replicas get them, flattened."""
        make = partial(self._made, share)
        parts = self._cache.get(share.rows, make) if self._cache is not None else make(None)
        parts = self._after(parts, self._plan.seed, share.epoch, share.rows, share.repeats)
        if self._plan.weighting is None:
            return parts
        labels = None if self._label is None else parts[self._label]
        return [*parts, self._plan.weighting.weights(share.rows, labels)]

    def _made(self, share: HostShare, places: Any) -> Rows:
        if share.parts is None:
            raw = self._plan.source.take(share.rows if places is None else share.rows[places])
        else:
            raw = share.parts if places is None else [part[places] for part in share.parts]
        rows, repeats = (share.rows, share.repeats) if places is None else (share.rows[places], share.repeats[places])
        return self._before(raw, self._plan.seed, share.epoch, rows, repeats)


class Distributed(Positioned):
    """Iterate over the batches of a pipeline for the replicas of a strategy. Each iteration is the next epoch.

    Each element has the structure of a batch, with a `PerReplica` for each component (plain tensors with one replica). The
    examples of the replicas, in order, are the global batch. A replica without examples gets tensors of length 0. After an
    early exit, the next iteration continues there. A new iteration ends the previous one.

    Args:
        plan: What the pipeline does.
        position: The position, shared with the pipeline.
        strategy: The strategy whose replicas get the batches.
        allow_idle: Whether every batch may have fewer examples than there are replicas.

    Example:
        >>> data = gd.Pipeline.from_arrays(np.arange(5.0), global_batch_size=4)
        >>> [x.shape[0] for x in data.distribute(tf.distribute.get_strategy())]
        [4, 1]
    """

    def __init__(self, plan: Plan, position: Position, strategy: tf.distribute.Strategy, *, allow_idle: bool = False) -> None:
        super().__init__(plan, position)
        self.strategy = strategy
        self._replicas = replicas_of(strategy)
        self._latest: Callable[[], Any] = lambda: None  # a weak reference: an iterator that is dropped must end its threads
        self._is_of_all = not self.has_several_hosts  # whether all hosts were given the same data; never unset
        if plan.global_batch_size < self._replicas.total and not allow_idle:
            raise UsageError(
                "A global batch must have at least one example for each replica (the last batch of an epoch may have fewer)",
                "Use a larger global batch or fewer devices.",
                global_batch_size=plan.global_batch_size,
                replicas=self._replicas.total,
            )
        self._rowwise = Rowwise(plan)

    @property
    def element_spec(self) -> Any:
        """Return the structure of a batch, with a `tf.TensorSpec` of an unknown number of examples for each component."""
        return batch_spec(self._rowwise.spec)

    @property
    def has_several_hosts(self) -> bool:
        """Return whether other hosts take their shares of the same batches."""
        return self._replicas.num_hosts > 1

    def __iter__(self) -> Iterator[Any]:
        if not tf.executing_eagerly():
            raise UsageError(
                "A pipeline must be iterated in Python",
                "Move the loop out of the tf.function, and pass the batches to it.",
                inside="tf.function",
            )
        latest = self._latest()
        if latest is not None:
            latest.close()
        epoch = RestOfEpoch(self, self._position)
        self._latest = weakref.ref(epoch)
        return epoch

    def epoch_batches(self, epoch: int = 0, start: int = 0) -> LookAhead[Any] | Alike:
        """Return the batches of one epoch without moving the position: an evaluation sees the same examples each time.

        On the first call all hosts must ask, and they compare the data that they were given. For a stream, which every host
        reads, all hosts take each batch together and compare it.

        Args:
            epoch: The number of the epoch.
            start: The number of the first global batch.

        Returns:
            An iterator. `close()` stops its threads, and so does dropping it.
        """
        if not self._is_of_all:
            check_same_data(self._plan, self.strategy)
            self._is_of_all = True
        shares = self._plan.shares(self._replicas, epoch, start)
        # One thread is enough to copy; several may be in the user's functions and files.
        wished = self._plan.ahead if self._plan.stages or not hasattr(self._plan.source, "parts") else 1
        workers = min(wished, max(1, os.cpu_count() or 1))
        if self._plan.at_random or not self.has_several_hosts:
            return LookAhead((partial(self._made, share) for share in shares), self._plan.ahead, workers)
        look_ahead = LookAhead((partial(self._known, share) for share in shares), self._plan.ahead, workers)
        return Alike(look_ahead, self.strategy, digest(*identity_of(self._plan).values(), epoch))

    def _known(self, share: HostShare) -> tuple[str, Any]:
        """Return the fingerprint of a batch, and the batch."""
        return share.digest, self._made(share)

    def _made(self, share: HostShare) -> Any:
        parts = [np.asarray(part) if isinstance(part, np.memmap) else part for part in self._rowwise(share)]
        # A distributed dataset would make an iterator for each epoch, which takes 35 ms a replica (TensorFlow 2.21).
        values = placed(parts, share.cuts, self._replicas.devices)
        return per_replica(self.strategy, [tf.nest.pack_sequence_as(self._rowwise.spec, value) for value in values])


class RestOfEpoch:
    """Iterate over the rest of an epoch. Each batch moves the position.

    Args:
        distributed: The source of the batches.
        position: The position to move.
    """

    def __init__(self, distributed: Distributed, position: Position) -> None:
        if position.is_apart:
            raise UsageError(
                "All hosts must continue from one position: after an error on one host, the others may have had the missing "
                "batch",
                "Restore a saved position on all hosts, or make the pipeline again.",
                epoch=position.epoch,
                batch=position.batch,
            )
        position.turn += 1
        self._distributed = distributed
        self._position = position
        self._turn = position.turn
        self._batches = distributed.epoch_batches(position.epoch, position.batch)
        self._at_start = True
        self._over = False

    def __iter__(self) -> RestOfEpoch:
        return self

    def __next__(self) -> Any:
        if self._turn != self._position.turn:
            self.close()
            raise UsageError(
                "Only the last iteration of a pipeline can continue, and no iteration can continue after a restore",
                "Start a new iteration. For an evaluation in between use a second pipeline, or epoch_batches().",
                iteration=self._turn,
                last=self._position.turn,
            )
        if self._over:
            raise StopIteration
        try:
            batch = self._next()
        except BaseException as error:
            self._over = True
            self._position.is_apart = self._distributed.has_several_hosts and not isinstance(error, StopIteration)
            raise
        self._position.batch += 1
        return batch

    def _next(self) -> Any:
        at_start, self._at_start = self._at_start, False
        try:
            return next(self._batches)
        except StopIteration:
            left = at_start and self._position.batch > 0
            self._position.epoch, self._position.batch = self._position.epoch + 1, 0
            if not left:
                raise
        # The iteration before this one was left at the very end of its epoch.
        self._batches = self._distributed.epoch_batches(self._position.epoch)
        return next(self._batches)

    def close(self) -> None:
        """Stop the threads. The position stays."""
        self._over = True
        self._batches.close()


def batch_spec(row: Any) -> Any:
    """Return the structure of a batch of such examples."""
    return tf.nest.map_structure(lambda spec: tf.TensorSpec((None, *spec.shape), spec.dtype), row)


_TOLERANCE = 2e-3  # of numbers that each host has computed itself, on a device that adds up in no fixed order


def check_same_data(plan: Plan, strategy: Any) -> None:
    """Raise unless all hosts were given the same data in the same order.

    Args:
        plan: What a pipeline does on this host.
        strategy: The strategy of the hosts. All of them must ask.

    Raises:
        UsageError: If the hosts have different data.
    """
    own = identity_of(plan) | {"data": plan.source.looks}
    numbers = getattr(plan.source, "numbers", [])
    texts = told_by_all(strategy, "data", json.dumps([own, numbers]), _are_alike)
    if texts is None:
        return
    hosts, looked_at = zip(*map(json.loads, texts), strict=True)
    differing = {name: [host[name] for host in hosts] for name in own if any(host[name] != hosts[0][name] for host in hosts)}
    if not differing:
        differing = {
            "data": [host["data"] for host in hosts],
            "looked_at": [[round(x, 3) for x in some[:4]] for some in looked_at],
        }
    raise UsageError(
        "All hosts must be given the same data, in the same order: each takes the examples of its replicas",
        "Pass all of the data on each host: gpudist_core splits it. Code that draws, splits or shuffles it before needs a seed "
        "that is the same on all hosts.",
        **differing,
    )


def _are_alike(texts: list[str]) -> bool:
    (first, numbers), *others = map(json.loads, texts)
    return all(
        other == first and all(abs(a - b) <= _TOLERANCE for a, b in zip(of_other, numbers, strict=True))
        for other, of_other in others
    )
