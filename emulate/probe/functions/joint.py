"""Evaluate a step for the shares of a batch together: what it sums over the replicas is summed over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emulate.probe.functions.parts import Part, Parts
from emulate.probe.functions.state import State

Key = tuple[Any, ...]
Values = dict[Key, Any]
Records = list[Values]
"""What a step gives: one dictionary for each of its records."""
_Tensors = Sequence[Any]
_Sum = Callable[[list[_Tensors]], _Tensors]
"""Returns what all shares have after a sum over the replicas, from what each of them has before it."""


@dataclass(frozen=True)
class Reduction:
    """Hold a sum, or a mean, over the replicas inside of a step.

    Attributes:
        backward: It adds up gradients.
        before: The names of its tensors before.
        after: And after.
    """

    averages: bool
    backward: bool
    before: Sequence[str]
    after: Sequence[str]


class Share:
    """Hold what one share of a batch has made of a step so far.

    Args:
        state: The state of the step; each share makes its own of it.
        parts: Of the step.
        values: Tensors by name.
        is_alone: What it assigns is the state of the step from then on; else other shares begin with the same state.

    Attributes:
        assigned: What it has assigned to variables, by their number; nothing where it is alone.
    """

    def __init__(self, state: State, parts: Parts, values: Mapping[str, Any], *, is_alone: bool = False) -> None:
        self.values = dict(values)
        self._state, self._parts, self._is_alone = state, parts, is_alone
        self.assigned: dict[int, Any] = {}

    def copy(self) -> Share:
        """Return another one that goes on from here."""
        other = Share(self._state, self._parts, self.values)
        other.assigned = dict(self.assigned)
        return other

    def make(self, part: Part) -> None:
        """Add what a part gives, and leave the state as it is for other shares, if there are some."""
        import tensorflow as tf

        def given(name: str) -> Any:
            dtype, _ = self._parts.spec(name)
            return tf.constant(self.values[name]) if dtype == "string" else tf.cast(self.values[name], dtype)

        assigns = [] if self._is_alone else part.assigns  # copies of all weights in each step are not made for nothing
        before = self._state.read({*assigns, *self.assigned})
        try:
            self._state.assign(self.assigned)
            made = part.function(*map(given, part.inputs))
            self.assigned |= self._state.read(assigns)
        finally:
            self._state.assign(before)
        self.values |= zip(part.fetched, made, strict=True)


@dataclass(frozen=True)
class Route:
    """Hold what leads to records of a step: a part before each sum over the replicas, and a last one.

    Attributes:
        fetched: Of each record what the last part gives: the names of its tensors, by key.
    """

    parts: Sequence[Part]
    reductions: Sequence[Reduction]
    fetched: Sequence[Mapping[Key, str]]

    def followed(self, shares: Sequence[Share]) -> list[Records]:
        """Return what each share gives."""
        return self._followed(shares, range(len(self.reductions)), _sum)

    def followed_by_loss(self, shares: Sequence[Share]) -> list[list[Records]]:
        """Return for each share what all of them give if its loss alone counts.

        A backward pass is linear in the gradients that it begins with and gets from other shares. A share whose loss does not
        count gives what it gives with its loss, less what it gives with its loss and nothing from others.
        """
        first = next((place for place, reduction in enumerate(self.reductions) if reduction.backward), len(self.reductions))
        backward = range(first, len(self.reductions))
        for place in range(first):
            self._join(shares, place, _sum)
        from_own: list[list[_Tensors]] = []

        def nothing(before: list[_Tensors]) -> _Tensors:
            from_own.append(before)
            return [0 * value for value in before[0]]

        own = self._followed([share.copy() for share in shares], backward, nothing)
        return [self._of_loss(loss, [share.copy() for share in shares], backward, from_own, own) for loss in range(len(shares))]

    def _of_loss(
        self, loss: int, shares: Sequence[Share], backward: range, from_own: list[list[_Tensors]], own: list[Records]
    ) -> list[Records]:
        left = iter(from_own)

        def total(before: list[_Tensors]) -> _Tensors:
            less = next(left)
            counted = (v if s == loss else [a - b for a, b in zip(v, less[s], strict=True)] for s, v in enumerate(before))
            return _sum(list(counted))

        made = self._followed(shares, backward, total)
        return [v if s == loss else list(map(_less, v, own[s])) for s, v in enumerate(made)]

    def _followed(self, shares: Sequence[Share], reductions: range, total: _Sum) -> list[Records]:
        for place in reductions:
            self._join(shares, place, total)
        for share in shares:
            share.make(self.parts[-1])
        return [[{key: share.values[name] for key, name in names.items()} for names in self.fetched] for share in shares]

    def _join(self, shares: Sequence[Share], place: int, total: _Sum) -> None:
        reduction = self.reductions[place]
        for share in shares:
            share.make(self.parts[place])
        whole = total([[share.values[name] for name in reduction.before] for share in shares])
        after = [value / len(shares) if reduction.averages else value for value in whole]
        for share in shares:
            share.values |= zip(reduction.after, after, strict=True)


def _sum(of_shares: list[_Tensors]) -> _Tensors:
    return [sum(values[1:], values[0]) for values in zip(*of_shares, strict=True)]


def _less(values: Values, others: Values) -> Values:
    """Return gradients and the objective less others; everything else as it is."""
    kinds = ("gradient", "sparse-gradient", "taped", "objective")
    return {key: value - others[key] if key[0] in kinds else value for key, value in values.items()}
