"""`gradient_accumulation_steps` of Keras's optimizers: which batch makes an update is decided before a step is compiled.

As in Keras on one device, every batch calls `apply` and counts in the schedule of the rate, every k-th one makes the update
with the mean of the k gradients, and `optimizer.iterations` counts updates. A batch that a loss scale skips is none of the k;
that it did is known after its step alone, so with a loss scale each batch waits for the one before. Keras decides inside a
`cond`, where replicas cannot meet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from gpudist_core.errors import WrongUse
from gpudist_core.gradients.reduction import scale
from gpudist_core.replicas import replicas_of
from gpudist_core.steps.accumulators import Accumulators
from gpudist_core.upstream import optimizers, saved_sums


class Accumulation:
    """What one optimizer has added up since its last update.

    Args:
        optimizer: What `exact_optimizer` returned, with `gradient_accumulation_steps`.
        strategy: The strategy of its variables.
    """

    def __init__(self, optimizer: Any, strategy: Any) -> None:
        self._pending = 0
        self.every = int(optimizers.accumulates(optimizer))
        self.only_holds = False
        self._optimizer = optimizer
        self._replicas = int(strategy.num_replicas_in_sync)
        self._sums = Accumulators(strategy)
        self._several_hosts = replicas_of(strategy).num_hosts > 1
        optimizers.accumulate_by(optimizer, self)

    @property
    def pending(self) -> int:
        """How many batches were added up since the last update; one that a loss scale has skipped is none of them."""
        if optimizers.may_skip(self._optimizer):
            return optimizers.num_applied(self._optimizer) % self.every
        return self._pending

    def next(self) -> bool:
        """Count a batch.

        Returns:
            Whether it makes no update yet.
        """
        self._take_over()
        self._pending = (self.pending + 1) % self.every
        return self._pending != 0

    def _take_over(self) -> None:
        """Go on with what Keras has loaded into the optimizer, or has trained it with before."""
        sums = saved_sums.taken_over(self._optimizer)
        if sums is not None:
            pending = optimizers.num_applied(self._optimizer) % self.every
            self.restore({"pending": pending, "sums": {"sums": sums, "weight": float(pending)}})

    def build(self) -> None:
        """Make the sums, outside a step; again does nothing."""
        self._sums.build(optimizers.trained_by(self._optimizer))

    def __call__(self, grads: list[Any], variables: list[Any], *, reduced: bool) -> list[Any] | None:
        """What the optimizer does with the gradients of a batch, in a replica's context.

        Args:
            grads: Of this replica's rows, or of all where they are `reduced`.
            variables: The variables, in the same order.
            reduced: Whether the gradients are those of all replicas already.

        Returns:
            The mean of the gradients since the last update; None where they are only kept.
        """
        places = [optimizers.place_of(self._optimizer, variable) for variable in variables]
        every: list[Any] = [None] * len(optimizers.trained_by(self._optimizer))
        # What is kept is a sum over replicas: of what all have alike each has its part.
        part = 1 / self._replicas if reduced else 1.0
        for place, gradient in zip(places, grads, strict=True):
            every[place] = gradient if part == 1.0 else scale(gradient, part)
        if self.only_holds:
            self._sums.add(every, 1.0 / self._replicas)
            return None
        sums, count = self._sums.take(every, 1.0 / self._replicas)
        return [scale(sums[place], 1 / (part * self._replicas * count)) for place in places]

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep."""
        return {"pending": self.pending, "sums": self._sums.state() if self.pending else {}}

    def state_here(self) -> dict[str, Any] | None:
        """What can be said on one host alone: all but what several hosts have added up."""
        self._take_over()
        return None if self._several_hosts and self.pending else self.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, on any topology.

        Args:
            state: What `state` returned.

        Raises:
            WrongUse: Where it was taken with another `gradient_accumulation_steps`.
        """
        pending = int(state["pending"])
        if pending >= self.every:
            raise WrongUse(
                "The state must come from an optimizer that accumulates as many batches",
                "Restore it there.",
                pending=pending,
                gradient_accumulation_steps=self.every,
            )
        self._pending = pending
        if pending:
            self.build()
            self._sums.restore(state["sums"])


class Accumulations:
    """Those of all optimizers of a model that accumulate.

    Args:
        accumulating: The optimizers of a model that accumulate.
        strategy: Its strategy.
    """

    def __init__(self, accumulating: list[Any], strategy: Any) -> None:
        self._each = [optimizers.accumulation_of(one) or Accumulation(one, strategy) for one in accumulating]

    def next(self) -> tuple[bool, ...]:
        """Count a batch: for each optimizer, whether it makes no update yet."""
        for one in self._each:
            one.build()
        return tuple(one.next() for one in self._each)

    @contextlib.contextmanager
    def during(self, only_hold: tuple[bool, ...]) -> Iterator[None]:
        """While a step is traced: which of the optimizers only keep gradients.

        Args:
            only_hold: What `next` returned.
        """
        for one, holds in zip(self._each, only_hold, strict=True):
            one.only_holds = holds
        yield

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep."""
        return {str(place): one.state() for place, one in enumerate(self._each)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, on any topology.

        Args:
            state: What `state` returned.
        """
        for place, one in enumerate(self._each):
            one.restore(state[str(place)])
