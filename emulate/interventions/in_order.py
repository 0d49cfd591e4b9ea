"""Change what a step computes, in one order.

A plan (`emulate.recorder.ProbePlan`) says what a run gets in place of its own. A step meets the changes in this order, and the
order is part of what a run means:

1. *Examples* of another run, share after share, each with the number of its replica (`rows.py`, `numbers.py`). They come
   before everything that is made of examples, so that all of that belongs to the examples that the step really gets.
2. Their *order*, or half of them. It comes after their exchange: a noise run of a replay permutes what was exchanged, each row
   within its share, because a program that normalizes each share computes something else where a row changes its share.
3. *Draws*, which follow the rows and not their places (`recorder/row_keys.py`), so that neither 1 nor 2 changes what an
   example gets.
4. *First values* of weights, when a step is about to use a variable for the first time: only then it has the value that the
   program gives it.
5. *Gradients of tapes*: those of several shares become one with the last share. That is recorded. Then those of the replicas
   are reduced: the record shows what this replica's step has computed.
6. *Gradients of optimizers*: shares become one; then units in the last place are added; then they are recorded; then those of
   a run that is followed take their place. Rounding comes before the record, since the record of a noise run must show its
   rounding. Following comes after it: what is recorded are the run's own gradients at the weights of the other run.

Not of one step, and in place before the first one: the numbers of replicas and workers that a program is told (`numbers.py`),
switches of layers, policies, clipping and learning rates (`switches.py`). Clipping by `tf.clip_by_*` is switched off where a
step calls it (`emulate/instrument/operations.py`).

An evaluation of kept functions (`emulate/evaluate`) has no program to wrap. It takes examples from the same `Rows`, orders
them by the same rule, and changes the gradients of optimizers by the same code. Weights off by units in the last place it has
alone: in a run of the program, the order of the rows does what they do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emulate.imports import tf
from emulate.interventions import rows
from emulate.interventions.gradients import Following, Pairs, RoundedGradients
from emulate.interventions.switches import splits_of
from emulate.recorder import TAPES_JOINED, Body, ProbePlan
from emulate.trace import Array
from emulate.upstream import Names

_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")


class Interventions:
    """Change what a step gets, as a plan says.

    Args:
        plan: What is changed.
        names: The variables' names.

    Attributes:
        rows: The examples of another run; None where the run has its own.
    """

    def __init__(self, plan: ProbePlan, names: Names) -> None:
        self._plan = plan
        self.rows = rows.Rows(plan.replay) if plan.replay else None
        self._rounding, self._following = RoundedGradients(plan, names), Following(plan, names)

    def call(self, body: Body, once: rows.Call, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the program's function by `once`: with its own examples, or those of another run, share after share."""
        takes_rows = body.label not in self._plan.apply_only and (not self._plan.taping or body.label in self._plan.taping)
        if self.rows is not None and takes_rows:
            return self.rows.call(body, once, function, args, kwargs)
        return once(function, args, kwargs)

    def examples(self, label: str, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Return a function's arguments with its examples in another order, or half of them, and the order if it is another."""
        order = None
        if label in self._plan.apply_only:
            return args, kwargs, order
        if self._plan.permute:
            args, kwargs, order = rows.in_another_order(self._plan.noise_seed, args, kwargs, splits_of(self._plan.switches))
        if self._plan.halves:
            args, kwargs = rows.first_half(args, kwargs)
        return args, kwargs, order

    def taped_of_shares(self, body: Body, sources: list[Any], gradients: list[Any]) -> list[Any]:
        """Return a tape's gradients of variables: with the last of several shares those of all."""
        plan = self._plan.replay
        if plan is None or not plan.taped or body.share is None or not are_variables(sources):
            return gradients
        return rows.taped(plan, body, gradients)

    def taped_of_replicas(self, sources: list[Any], gradients: list[Any]) -> list[Any]:
        """Return a tape's gradients of variables, reduced over the replicas: what is computed of them is of all."""
        asked = [how for how, switch in TAPES_JOINED.items() if switch in self._plan.switches]
        context = tf.distribute.get_replica_context()
        if not asked or context is None or context.num_replicas_in_sync == 1 or not are_variables(sources):
            return gradients
        there = [gradient for gradient in gradients if gradient is not None]
        joined = iter(context.all_reduce(asked[0].upper(), there))
        return [None if gradient is None else next(joined) for gradient in gradients]

    def applied_of_shares(self, body: Body | None, optimizer: str, pairs: Pairs) -> Pairs:
        """Return an optimizer's gradients with their variables: with the last of several shares all, before it none."""
        if body is None or body.share is None or self._plan.replay is None:
            return pairs
        return rows.applied(self._plan.replay, body, optimizer, pairs)

    def applied(self, optimizer: str, own: Pairs, replica: int = 0) -> tuple[Pairs, Pairs]:
        """Return an optimizer's gradients with their variables: as they are recorded, and as the optimizer is given them."""
        recorded = self._rounding.changed(optimizer, own)
        return recorded, self._following.applied(optimizer, own, recorded, replica)

    def first_value(self, value: Array) -> Array:
        """Return what a variable starts from in place of a value of another run.

        Where each step has that run's weights, nothing else shows what rounding of the forward pass makes of the first step.
        """
        is_followed = self._plan.follow is not None and self._plan.follow.each
        return self._rounding.changed("", [(value, None)])[0][0] if is_followed else value

    def without_clipping(self, *optimizers: Any) -> None:
        """Take clipping out of optimizers."""
        for optimizer in optimizers if "no-clipping" in self._plan.switches else ():
            for setting in _CLIPPING:
                if getattr(optimizer, setting, None) is not None:
                    setattr(optimizer, setting, None)


def are_variables(sources: list[Any]) -> bool:
    """Return whether gradients are taken of variables."""
    return bool(sources) and all(hasattr(source, "assign") for source in sources)
