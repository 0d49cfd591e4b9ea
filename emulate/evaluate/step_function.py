"""Evaluate the function of a step at a given state: for given rows and gradients, or for the shares of a batch together.

What the recorder has kept of a step (`emulate/recorder/functions.py`) is one graph, from examples and variables to everything
that was recorded. It is not evaluated in one piece:

- *Before and after the update.* Gradients are fetched first, and given back, changed or not, for the update: an optimizer is
  judged on gradients that are not its own. So the graph is cut at what optimizers are given, for each optimizer of the step in
  turn, since a later one may read what an earlier one has written.
- *At sums over the replicas.* Shares of a batch are evaluated one after the other, as replicas do it side by side. Where the
  step itself adds something up over the replicas (statistics of a batch, a count of labels, gradients), what follows needs the
  sum of all shares. So the graph is cut before each sum. Every share makes a part, then the sum is taken, then every share
  makes the next one. To evaluate the whole graph once for each sum, from its beginning, was tried: the time grows with the
  square of the number of sums, so that there had to be a limit; and what a step draws or assigns would happen several times.
- *Each node once on the way to a record.* For the same reason a part gives everything that a later one needs, not only what
  was asked for.

Three rules hold throughout:

- Shares begin with the same state, as replicas do. What a share assigns is taken back before the next one (`Share.make`), and
  becomes one value afterwards (`_together`). One share alone changes the state for good in the update: to copy all weights of
  a step in order to restore them costs as much as the step in small models.
- A gradient by a share's own loss needs no other graph. A backward pass is linear in the gradients that it begins with, and in
  those that it gets from other shares. Evaluated once with sums of zero, it shows what comes from the own loss alone; the
  difference is what comes from elsewhere (`Route.followed_by_loss`).
- Names of tensors are those of the graph that TensorFlow has traced. They are stable within a trace, and mean nothing between
  two of them: keys (`("gradient", name of the variable)`) do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from emulate.evaluate.parts import Part, Parts, State, described, graph_of
from emulate.imports import tf
from emulate.trace import Array, Step

Key = tuple[Any, ...]
Values = dict[Key, Any]
Records = list[Values]
"""The results of a step: one dictionary for each of its records."""
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


GIVEN = ("gradient", "sparse-gradient", "sparse-rows")
"""Kinds of tensors that an optimizer is given, and that can be given to it in place of the step's own."""
_AFTER = ("weight", "variable", "result")
OF_THE_FORWARD_PASS = (*GIVEN, "sparse-shape", "taped", "objective", "draw")


@dataclass(frozen=True)
class Fetched:
    """Describe one record that a function makes: its kind, what is said of it, and the name of the tensor of each key."""

    kind: str
    about: dict[str, Any]
    tensors: Mapping[Key, str]

    @property
    def inputs(self) -> list[Key]:
        """Return the keys of the examples, in the order of the step's arguments."""
        return sorted(key for key in self.tensors if key[0] == "input")


class StepFunction:
    """Evaluate one function of a run.

    Args:
        trace: The folder of the run's trace.
        number: The function's number.
        state: Its variables.
    """

    def __init__(self, trace: Path, number: int, state: State) -> None:
        about = described(trace, number)
        by_record = [[(tuple(key), *rest) for key, *rest in record["tensors"]] for record in about["records"]]
        self.records = [
            Fetched(record["kind"], record["about"], {key: name for key, name, *_ in tensors})
            for record, tensors in zip(about["records"], by_record, strict=True)
        ]
        whole = [(tuple(key), *rest) for key, *rest in about["whole"]]
        self._specs = {name: (dtype, _of_any_rows(key, shape)) for tensors in by_record for key, name, dtype, shape in tensors}
        self._specs |= {name: (dtype, shape and [None, *shape[1:]]) for _, name, dtype, shape in whole}
        self._whole = {name: key for key, name, *_ in whole}
        self._reductions = [
            Reduction(r["averages"], r["backward"], *zip(*(pair[:2] for pair in r["tensors"]), strict=True))
            for r in about["reductions"]
        ]
        self._specs |= {name: (dtype, shape) for r in about["reductions"] for _, name, dtype, shape in r["tensors"]}
        self._rows = {key: name for record in self.records for key, name in record.tensors.items() if key[0] == "input"}
        self._captures, self._updates = about["captures"], about["updates"]
        self._state = state
        self._routes: dict[tuple[int, tuple[str, ...], bool], Route] = {}
        self._to_updates: dict[tuple[bool, Sequence[str]], Route] = {}
        graph, constants = graph_of(trace, number)
        self._parts = Parts(graph, self._specs, self._captures, constants, state)

    def fits(self, rows: Mapping[Key, Any]) -> bool:
        """Return whether the function takes rows of these shapes: in some graphs the size of the batch is fixed."""
        shapes = {name: np.shape(rows[key]) for key, name in self._rows.items()}
        return all(tf.TensorShape(self._specs[name][1]).is_compatible_with(shape) for name, shape in shapes.items())

    def graph(self, shapes: Sequence[Sequence[int]], *, is_whole: bool = False) -> Any:
        """Return the graph of all that is made before the optimizers' updates, or of the whole step.

        Args:
            shapes: Those of the examples, in the order of the step's arguments.
            is_whole: With the updates. What the step gives is then left out: it lives on after the step.

        Returns:
            A graph in which TensorFlow knows the shapes, as far as it can.
        """
        keys = next(record.inputs for record in self.records if record.inputs)
        fixed = {self._rows[key]: shape for key, shape in zip(keys, shapes, strict=True)}
        self._specs |= {name: (self._specs[name][0], list(shape)) for name, shape in fixed.items()}
        if is_whole:
            route = self._route((), self.records, (), (), self._updates)
        else:
            route = self._route(OF_THE_FORWARD_PASS, self.records, (), ())
        return route.parts[0].function.get_concrete_function().graph

    @property
    def gradient_names(self) -> frozenset[str]:
        """Return the names of the tensors that optimizers are given."""
        return frozenset(self._given_names(self.records))

    def gradients(
        self, number: int, shares: Sequence[Mapping[Key, Any]], given: Sequence[Values], whole: Mapping[Key, Any]
    ) -> list[Values]:
        """Return what a record holds before its optimizer's update, and leave the state as it is.

        Args:
            number: The place of the record in `records`.
            shares: The tensors of each share of the batch by their key. What the step itself sums over the replicas is summed
                over them.
            given: What the optimizers of earlier records are given.
            whole: The batch that the shares are of.

        Returns:
            Gradients, the objective and the random draws of each share, by key.
        """
        if not any(key[0] in OF_THE_FORWARD_PASS for key in self.records[number].tensors):
            return [{} for _ in shares]
        named = self._named(given)
        route = self._to_record(number, tuple(named), joins=len(shares) > 1)
        return [made[0] for made in route.followed([self._share(rows, whole, named) for rows in shares])]

    def gradients_by_loss(
        self, number: int, shares: Sequence[Mapping[Key, Any]], given: Sequence[Values], whole: Mapping[Key, Any]
    ) -> list[list[Values]]:
        """Return what `gradients` returns, of each share's loss alone: its gradients pass through all shares.

        Args:
            number: As there.
            shares: As there.
            given: As there.
            whole: As there.

        Returns:
            For each loss what each share gives; the sum over the shares is the gradient of that loss.
        """
        named = self._named(given)
        route = self._to_record(number, tuple(named), joins=True)
        by_loss = route.followed_by_loss([self._share(rows, whole, named) for rows in shares])
        return [[made[0] for made in of_loss] for of_loss in by_loss]

    def returned(
        self, shares: Sequence[Mapping[Key, Any]], given: Sequence[Values], whole: Mapping[Key, Any]
    ) -> list[list[Values]]:
        """Return what the step returns with these gradients in place of its own, as `update` does, and leave the state."""
        route = self._to_update(joins=len(shares) > 1, kinds=("result",))
        return route.followed([self._share(rows, whole, self._named(given)) for rows in shares])

    def update(
        self, shares: Sequence[Mapping[Key, Any]], given: Sequence[Values], whole: Mapping[Key, Any]
    ) -> list[list[Values]]:
        """Make the step with these gradients in place of its own: of all rows, or of one share after the other as replicas do.

        Args:
            shares: The tensors of each share by their key.
            given: What the optimizer of each record is given.
            whole: The batch that the shares are of.

        Returns:
            Of each share the variables after the step and what it returns, by record. What each share makes of the same state
            becomes one by the mean, as far as they differ: moving averages.
        """
        route = self._to_update(joins=len(shares) > 1)
        each = [self._share(rows, whole, self._named(given), is_alone=len(shares) == 1) for rows in shares]
        results = route.followed(each)
        assigned = {number: _together([share.assigned[number] for share in each]) for number in each[0].assigned}
        self._state.assign(assigned)
        return results

    @cached_property
    def variables(self) -> dict[Key, int]:
        """Return, by key, the number of each variable whose value after the step is recorded."""
        numbers, variables = dict(self._captures), dict[Key, int]()
        for key, name in (pair for record in self.records for pair in record.tensors.items() if pair[0][0] == "weight"):
            number = numbers.get(self._parts.read(name) or "")
            variables |= {} if number is None else {key: number}
        return variables

    def _named(self, given: Sequence[Values]) -> dict[str, Any]:
        pairs = zip(self.records, given, strict=False)
        return {record.tensors[key]: value for record, values in pairs for key, value in values.items() if key[0] in GIVEN}

    def _share(
        self, rows: Mapping[Key, Any], whole: Mapping[Key, Any], named: Mapping[str, Any], *, is_alone: bool = False
    ) -> Share:
        values = {name: rows[key] for key, name in self._rows.items()} | {name: whole[key] for name, key in self._whole.items()}
        return Share(self._state, self._parts, values | dict(named), is_alone=is_alone)

    def _given_names(self, records: Sequence[Fetched]) -> list[str]:
        return list(dict.fromkeys(name for record in records for key, name in record.tensors.items() if key[0] in GIVEN))

    def _to_record(self, number: int, given: tuple[str, ...], *, joins: bool) -> Route:
        """Return what leads to what a record holds before its update."""
        if (number, given, joins) not in self._routes:
            reductions = self._reductions if joins else []
            self._routes[number, given, joins] = self._route(
                OF_THE_FORWARD_PASS, self.records[number : number + 1], given, reductions
            )
        return self._routes[number, given, joins]

    def _to_update(self, *, joins: bool, kinds: Sequence[str] = _AFTER) -> Route:
        """Return what leads from the gradients to what all records hold after their updates; to results alone without these."""
        if (joins, kinds) not in self._to_updates:
            reductions = [reduction for reduction in self._reductions if joins and not reduction.backward]
            given, updates = self._given_names(self.records), self._updates if kinds == _AFTER else ()
            self._to_updates[joins, kinds] = self._route(kinds, self.records, given, reductions, updates)
        return self._to_updates[joins, kinds]

    def _route(
        self,
        kinds: Sequence[str],
        records: Sequence[Fetched],
        given: Sequence[str],
        reductions: Sequence[Reduction],
        updates: Sequence[str] = (),
    ) -> Route:
        fetched = [{key: name for key, name in record.tensors.items() if key[0] in kinds} for record in records]
        groups = [*(reduction.before for reduction in reductions), [name for names in fetched for name in names.values()]]
        known = [*self._rows.values(), *self._whole, *given]
        parts = self._parts.in_turn(groups, known, [reduction.after for reduction in reductions], updates)
        return Route(parts, reductions, fetched)


def _together(values: Sequence[Any]) -> Any:
    """Return the mean of values that differ; of whole numbers the first."""
    are_equal = all(np.array_equal(values[0], value) for value in values[1:])
    return values[0] if are_equal or not values[0].dtype.is_floating else tf.add_n(list(values)) / len(values)


def _of_any_rows(key: Key, shape: list[int | None] | None) -> list[int | None] | None:
    """Return the shape of what may be given for a tensor: a sparse gradient may have other rows than the program's own."""
    return [None, *shape[1:]] if shape and key[0] in ("sparse-gradient", "sparse-rows") else shape


def rows_of(function: StepFunction, step: Step) -> dict[Key, Array]:
    """Return the inputs of a step by their key, in the order of its arguments."""
    keys = next(record.inputs for record in function.records if record.inputs)
    return {key: _read(array) for key, array in zip(keys, step.inputs, strict=True)}


def _read(stored: Any) -> Array:
    value: Array = stored.read()
    return value.astype(object) if value.dtype.kind == "S" else value
