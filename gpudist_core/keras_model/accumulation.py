"""Support `gradient_accumulation_steps` of Keras's optimizers: decide while tracing which application makes an update.

As in Keras on one device, the learning rate schedule counts every `apply`. Every k-th one makes an update with the mean of the
k gradients. `optimizer.iterations` counts updates. Keras decides inside a `cond`, where collectives do not work. So the
applications of a step are counted here while it is traced. A step is traced once for each possible place of the update among
them: twice if it applies once. A batch that a loss scale skips does not count. That is known only after its step, so with a
loss scale each batch waits for the previous one.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.gradients import scale
from gpudist_core.replicas import replicas_of
from gpudist_core.steps.accumulators import Accumulators
from gpudist_core.upstream import optimizers


class Accumulation:
    """Keep what one optimizer has accumulated since its last update.

    Args:
        optimizer: The result of `exact_optimizer`, with `gradient_accumulation_steps`.
        strategy: The strategy of its variables.
    """

    def __init__(self, optimizer: Any, strategy: tf.distribute.Strategy) -> None:
        self._pending = 0
        self.every = int(optimizers.accumulates(optimizer))
        self._before = 0  # what was pending before the step that is traced
        self._most = 1  # applications that a step was seen to have
        self._applied: dict[int, int] = {}  # by each replica in the step that was traced last
        self._graphs: dict[int, Any] = {}  # that each replica's step is traced into
        self._to_optimizer = weakref.ref(optimizer)  # which keeps this object
        self._replicas = int(strategy.num_replicas_in_sync)
        self._sums = Accumulators(strategy)
        self._several_hosts = replicas_of(strategy).num_hosts > 1
        optimizers.accumulate_by(optimizer, self)

    @property
    def _optimizer(self) -> Any:
        return self._to_optimizer()

    @property
    def pending(self) -> int:
        """Return how many gradients were accumulated since the last update.

        A gradient that a loss scale skipped does not count.
        """
        if optimizers.may_skip(self._optimizer):
            return optimizers.num_applied(self._optimizer) % self.every
        return self._pending

    @property
    def is_built(self) -> bool:
        """Return whether the sums exist already."""
        return self._sums.is_built

    def next(self) -> int:
        """Start a step.

        Returns:
            The number of the application that makes the next update, from 1. If no known application of this step does, one
            more than their number.
        """
        self._take_over()
        self._before = self.pending
        return min(self.every - self._before, self._most + 1)

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Count the applications of one replica's step while it is traced, or run without a graph."""
        replica = _replica()
        self._applied[replica] = 0
        self._graphs[replica] = tf.compat.v1.get_default_graph()
        try:
            yield
        finally:
            del self._graphs[replica]

    @property
    def applied(self) -> int:
        """Return how often the last traced step applies the optimizer."""
        return max(self._applied.values(), default=0)

    def end(self, applied: int) -> bool:
        """End a step.

        Args:
            applied: How often it applied the optimizer.

        Returns:
            Whether that is more than in any earlier step, so that the result of `next` was too small for it.
        """
        self._pending = (self._pending + applied) % self.every
        is_news, self._most = applied > self._most, max(self._most, applied)
        return is_news

    def _take_over(self) -> None:
        """Continue with what Keras has loaded into the optimizer, or has trained it with before."""
        sums = optimizers.sums_taken_over(self._optimizer)
        if sums is not None:
            pending = optimizers.num_applied(self._optimizer) % self.every
            self.restore({"pending": pending, "sums": {"sums": sums, "weight": float(pending)}})

    def build(self) -> None:
        """Create the sums outside of a step, once the optimizer knows its variables. A second call does nothing."""
        trained = optimizers.trained_by(self._optimizer)
        if trained:
            self._sums.build(trained)

    def __call__(self, grads: list[Any], variables: list[Any], *, reduced: bool) -> list[Any] | None:
        """Process the gradients of a batch, in a replica's context.

        Args:
            grads: The gradients of this replica's examples, or of all examples if `reduced`.
            variables: The variables, in the same order.
            reduced: Whether the gradients are already summed over the replicas.

        Returns:
            The mean of the gradients since the last update; None if they are only accumulated.
        """
        places = [optimizers.place_of(self._optimizer, variable) for variable in variables]
        every: list[Any] = [None] * len(optimizers.trained_by(self._optimizer))
        # What is kept is a sum over replicas: of what all have alike each has its part.
        part = 1 / self._replicas if reduced else 1.0
        for place, gradient in zip(places, grads, strict=True):
            every[place] = gradient if part == 1.0 else scale(gradient, part)
        if not self._updates():
            self._sums.add(every, 1.0 / self._replicas)
            return None
        sums, count = self._sums.take(every, 1.0 / self._replicas)
        return [scale(sums[place], 1 / (part * self._replicas * count)) for place in places]

    def check_none_was_skipped(self) -> None:
        """Refuse a second check of a loss scale in one traced step, in a replica's context.

        Raises:
            UsageError: If the loss scale has already checked other gradients in this step.
        """
        number = self._applied.get(_replica(), 0) + 1
        if number > 1 and not tf.executing_eagerly():
            raise UsageError(
                "An optimizer with a loss scale and gradient_accumulation_steps must be applied once in a step: the first "
                "may be skipped",
                "Apply it once, leave gradient_accumulation_steps out, or compile with run_eagerly=True.",
                applied=number,
                gradient_accumulation_steps=self.every,
            )

    def _updates(self) -> bool:
        """Count an application of the step, and return whether it makes an update."""
        replica = _replica()
        number = self._applied[replica] = self._applied.get(replica, 0) + 1
        graph = tf.compat.v1.get_default_graph()
        if self._graphs.get(replica, graph) is not graph and not optimizers.may_skip(self._optimizer):
            raise optimizers.not_in_a_branch()  # which is made some other number of times than it is traced
        return (self._before + number) % self.every == 0

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"pending": self.pending, "sums": self._sums.state() if self.pending else {}}

    def state_here(self) -> dict[str, Any] | None:
        """Return what one host alone can report: everything but sums that are spread over several hosts."""
        self._take_over()
        return None if self._several_hosts and self.pending else self.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, on any topology.

        Args:
            state: The result of `state`.

        Raises:
            UsageError: If it comes from an optimizer with other `gradient_accumulation_steps`.
        """
        pending = int(state["pending"])
        if pending >= self.every:
            raise UsageError(
                "The state must come from an optimizer with the same gradient_accumulation_steps",
                "Restore it there.",
                pending=pending,
                gradient_accumulation_steps=self.every,
            )
        self._pending = pending
        if pending:
            self.build()
            self._sums.restore(state["sums"])


class Accumulations:
    """Hold the accumulations of all optimizers of a model.

    Args:
        accumulating: The optimizers of a model that accumulate.
        strategy: Its strategy.
    """

    def __init__(self, accumulating: list[Any], strategy: tf.distribute.Strategy) -> None:
        self._each = [optimizers.accumulation_of(optimizer) or Accumulation(optimizer, strategy) for optimizer in accumulating]

    def next(self) -> tuple[int, ...]:
        """Start a step: return for each optimizer which application makes the next update. See `Accumulation.next`."""
        for accumulation in self._each:
            accumulation.build()
        return tuple(accumulation.next() for accumulation in self._each)

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Count the applications of one replica's step while it is traced, or run without a graph."""
        with contextlib.ExitStack() as stack:
            for accumulation in self._each:
                stack.enter_context(accumulation.during())
            yield

    @property
    def applied(self) -> tuple[tuple[tuple[()], ...], ...]:
        """Return the number of applications of each optimizer as a structure without tensors, which a graph can return."""
        return tuple(((),) * accumulation.applied for accumulation in self._each)

    def end(self, applied: tuple[tuple[tuple[()], ...], ...]) -> bool:
        """End a step.

        Args:
            applied: The value of `applied` when it was traced.

        Returns:
            Whether it applies one of them more often than any earlier step.
        """
        news = [accumulation.end(len(times)) for accumulation, times in zip(self._each, applied, strict=True)]
        return any(news)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {str(place): accumulation.state() for place, accumulation in enumerate(self._each)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, on any topology.

        Args:
            state: The result of `state`.
        """
        for place, accumulation in enumerate(self._each):
            accumulation.restore(state[str(place)])


def _replica() -> int:
    """Return the number of this replica. Its thread is another one while a loss scale decides."""
    context = tf.distribute.get_replica_context()
    return 0 if context is None else int(tf.get_static_value(context.replica_id_in_sync_group))
