"""Find what must see the whole batch: give replicas one device's value of a tensor, and compare gradients.

A replica computes another gradient than one device exactly where an operation of its forward pass mixes examples and sees only
the replica's own. So the question which cause a wrong gradient has is answered by an experiment, at one step:

1. *Which operations mix?* Each operation of the reference's forward pass is executed once more, on each share's part of what it
   takes from the whole batch. It mixes if that does not give the parts of its result. No list of types of operations says so: a
   sum of rows mixes, a sum of columns does not, whatever they are called.
2. *What if a tensor were global?* The gradient of all shares' losses is evaluated, where some tensors have the value that one
   device gives them (of a tensor with rows: the share's rows of it). Gradients pass through, as through an all-reduce: what the
   shares' losses give for such a tensor goes into one device's own backward pass. So sums, maxima, moments and rows that meet
   rows are one mechanism. A term of the loss that is the same on all shares then counts once.
3. *Which are needed?* With all of them the shares must give one device's gradient. They are left out, halves first, from the
   loss backwards, as long as that holds: what stays is near the inputs, which is where people mean it. What stays is the cause.
   If a gradient need not pass through one of them, its value alone is needed.
4. *Is that all?* The topology's recorded gradient must be that of the shares as they are, times one number. Otherwise something
   else stands between replicas and one device, and there is no answer; neither is there one where the forward pass, derived
   again, does not give what was recorded.
   What replicas assign to a variable may become one value: then also with their mean, or the first one's, in its place.

What was tried and given up: to look for the gradients of tensors in the recorded backward pass, where not all are; a threshold
for all variables, where the gradient of a bias before BatchNormalization is rounding alone; a graph for each experiment, where
to make it takes ten times as long as to evaluate it (a U-Net: 0.7 s and 0.1 s).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from emulate.evaluate.forward import (
    LOSS,
    NUMBER,
    SIZES,
    TOTAL,
    Forward,
    Gradients,
    Rows,
    is_float,
    num_rows,
    of_all,
    times_of_rows,
)
from emulate.evaluate.mixing import COMMUTES, NoAnswer, Shares, is_equal
from emulate.evaluate.parts import node_of
from emulate.evaluate.step_function import rows_of
from emulate.imports import tf
from emulate.trace import Array, Trace

_FACTOR = 10.0
"""Gradients differ from so many times the noise on, as everywhere in a verdict."""
_NOISE_RUNS = 3
_UNITS = 16.0
"""Units in the last place that another order of a sum may cost a variable's gradient, at least."""
_FEW_SETS = 6
"""Sets of numbers of examples that are tried first: all of two such numbers, and each one and some pairs of more."""
_SCALES = ("Mul", "RealDiv", "DivNoNan", "Xdivy", "GatherV2")
"""Operations that scale rows by a number that comes from all rows; a sum or a product of matrices compares rows."""


class _Noise:
    """Say how far gradients are apart, in the noise: what another order of rows and the last places of weights make of them."""

    def __init__(self, whole: Forward, shares: Sequence[Rows], *, permutes: bool) -> None:
        rows, times = of_all(shares), times_of_rows(shares)
        own, numbers = whole.recorded(rows), sorted(whole.variables.values())
        eps = float(np.finfo(np.float32).eps)
        self._floor = {name: _UNITS * eps * float(np.linalg.norm(g)) + float(np.finfo(float).tiny) for name, g in own.items()}
        before, draw = whole.state.read(numbers), np.random.default_rng(1)
        for seed in range(1, _NOISE_RUNS + 1):
            order = draw.permutation(num_rows(rows)) if permutes else np.arange(num_rows(rows))
            whole.state.shift(numbers, 1.0, seed)
            orders = {k: (order[:, None] * n + np.arange(n)).ravel() for k, n in times.items()}
            moved = whole.recorded({k: v[orders[k]] if k in orders else v for k, v in rows.items()})
            whole.state.assign(before)
            for name, g in own.items():
                self._floor[name] = max(self._floor[name], _FACTOR * float(np.linalg.norm(moved[name] - g)))

    def apart(self, ours: Gradients, theirs: Gradients) -> float:
        """Return the largest distance of a variable's gradients: they differ from 1 on."""
        return float(max(np.linalg.norm(ours[name] - g) / self._floor[name] for name, g in theirs.items()))

    def in_units(self, gradients: Gradients) -> Array:
        """Return all elements in a row, each in the noise of its variable."""
        return np.concatenate([np.ravel(value) / self._floor[name] for name, value in gradients.items()])


def _mean(values: Sequence[Any]) -> Any:
    return np.mean(values, axis=0, dtype=np.asarray(values[0]).dtype)


def _first(values: Sequence[Any]) -> Any:
    return values[0]


def needed(candidates: Sequence[str], is_enough: Callable[[Collection[str]], bool]) -> list[str]:
    """Return the candidates of which none can be left out: halves are tried before single ones."""
    kept = list(candidates)

    def leave_out(some: Sequence[str]) -> None:
        if some and is_enough([name for name in kept if name not in some]):
            kept[:] = [name for name in kept if name not in some]
        elif len(some) > 1:
            leave_out(some[: len(some) // 2])
            leave_out(some[len(some) // 2 :])

    leave_out(candidates)
    return kept


@dataclass(frozen=True)
class _Way:
    """Say how a gradient is made of the shares'.

    Attributes:
        scale: By what number, where terms that are the same on all shares count once.
        repeated: By what number these count more often, as the shares compute them.
    """

    scale: float
    repeated: float

    def of(self, once: Gradients, more: Gradients) -> Gradients:
        """Return the gradient, from that with such terms once, and from what they add besides."""
        return {name: self.scale * value + self.repeated * more.get(name, 0.0) for name, value in once.items()}


_AS_IT_STANDS = _Way(1.0, 1.0)


def _less(gradients: Gradients, others: Gradients) -> Gradients:
    return {name: value - others[name] for name, value in gradients.items()}


class _Experiments:
    """Make the experiments of one step.

    Args:
        shares: Evaluates the shares' gradients.
        noise: Compares gradients.
        one: Those of one device.
        theirs: Those of the topology, as far as they are known.
    """

    def __init__(self, shares: Shares, noise: _Noise, one: Gradients, theirs: Gradients) -> None:
        self._shares, self._noise, self._one = shares, noise, one
        mixing, whole = shares.mixing, shares.whole
        again = shares.through({name: np.ones_like(mixing.values[name]) for name in whole.objectives})
        if noise.apart(again, {name: one[name] for name in again}) > 1:
            raise NoAnswer("the forward pass, derived again, does not give the gradient that was recorded")
        # A graph for a share may divide its loss by the replicas, as Keras does: then not with what it is divided by.
        sets = (mixing.found, [name for name in mixing.found if name not in shares.numbers])
        every = next((some for some in sets if noise.apart(shares.total(some), one) <= 1), None)
        if every is None:
            raise NoAnswer("the shares do not give one device's gradient with everything from the whole batch")
        self._every = [name for name in every if name not in shares.given]
        self._topologys = self._way_of(theirs) or self._way_of_combined(theirs)

    def _way_of_combined(self, theirs: Gradients) -> _Way:
        """Return how the topology's gradients are made where replicas have one value of what each of them assigns."""
        for combine in (_mean, _first) if self._shares.whole.assigned else ():
            self._shares.forget(combine)
            if (way := self._way_of(theirs)) is not None:
                return way
        raise NoAnswer("something besides mixing stands between the replicas' gradients and one device's")

    def _way_of(self, theirs: Gradients) -> _Way | None:
        """Return how the topology's gradients are made of the shares' without joins."""
        once = self._shares.total([])
        more = _less(self._shares.total([], once=False), once)
        columns = [once, *([more] if self._noise.apart(more, dict.fromkeys(theirs, 0.0)) > 1 else [])]
        weighted = [self._noise.in_units({name: column[name] for name in theirs}) for column in columns]
        found, *_ = np.linalg.lstsq(np.stack(weighted, axis=1), self._noise.in_units(theirs), rcond=None)
        factors = [1.0 if abs(factor - 1) < COMMUTES else float(factor) for factor in found]
        way = _Way(factors[0], factors[1] if len(factors) > 1 else 0.0)
        return way if self._noise.apart(way.of(once, more), theirs) <= 1 else None

    def _is_enough(self, some: Collection[str], way: _Way, only: Sequence[str] = ()) -> bool:
        try:
            if way == _AS_IT_STANDS:
                return self._noise.apart(self._shares.total(some, only, once=False), self._one) <= 1
            once = self._shares.total(some, only)
            more = _less(self._shares.total(some, only, once=False), once) if way.repeated else {}
            return self._noise.apart(way.of(once, more), self._one) <= 1
        except (tf.errors.OpError, ValueError):  # rows of the whole batch meet a share's own
            return False

    def answer(self) -> dict[str, Any]:
        """Return what must be global, and what besides that the replicas' gradients have too often."""
        mixing, shares = self._shares.mixing, self._shares
        every, number = self._every[::-1], len(self._shares.counts)
        usual = [name for name in every if name not in mixing.places]  # places in the whole batch are none in a share
        one, theirs = _Way(1.0, 0.0), self._topologys
        way, start = one, usual if self._is_enough(usual, one) else every
        minimal = self._enough_divisors(every) or self._without_pairs(needed(start, lambda some: self._is_enough(some, one)))
        if theirs != one:  # what the program itself makes of the shares' losses may be right, and fewer tensors be needed
            fewer = [[m for m in minimal if not node_of(m).endswith(NUMBER)]]
            fewer += [minimal, *([m for m in minimal if m != name] for name in minimal)]
            enough = next((some for some in fewer if self._is_enough(some, theirs)), None)
            if enough is not None:
                minimal, way = needed(enough, lambda some: self._is_enough(some, theirs)), theirs
        same = self._same_terms(())
        joined = [name for name in self._same_terms(minimal) if name not in same]
        # What becomes the same on all shares by a join alone counts once then. A program that divides it by the number of
        # replicas counts each share's, and needs what these are made of as well.
        is_as_it_stands = not joined or way != one or self._is_enough(minimal, _AS_IT_STANDS)
        behind = set[str]().union(*map(shares.whole.before, joined))
        own = [n for n in usual if n in minimal or (node_of(n) in behind and mixing.local.nodes[node_of(n)].op != "Const")]
        if not is_as_it_stands and self._is_enough(own, _AS_IT_STANDS):
            minimal, is_as_it_stands = needed(own, lambda some: self._is_enough(some, _AS_IT_STANDS)), True
            way = _AS_IT_STANDS
        is_value = {name: self._passes_no_gradient(name, minimal, way) for name in minimal[::-1]}
        named = {behind: alone for name, alone in is_value.items() for behind in self._mixing_behind(name)}
        members = [self._member(name, is_value=alone) for name, alone in named.items()]
        upstream = self._upstream_of(members)
        moments = {one["name"] for one in upstream if one["kind"] not in ("number", "constant")}
        others = [name for name, one in zip(named, members, strict=True) if one["kind"] not in ("number", "constant")]
        for name, member in zip(named, members, strict=True):
            is_moment = member["kind"] == "other" and bool(moments & shares.whole.before(name))
            member["belongs"] = is_moment or self._belongs(name, member["kind"], [one for one in others if one != name])
            member["behind"] = self._meetings_behind(name) if member["kind"] in ("rows", "other") else ()
        is_repeated = bool(theirs.repeated) and abs(theirs.scale + theirs.repeated * (number - 1) - 1) > COMMUTES
        # Where it does not divide, one device's number is among the members, or the gradient is too large by that number.
        is_divided = theirs.scale != 1 or any(member["kind"] == "constant" for member in members)
        is_too_large = not (is_as_it_stands or same or is_divided) and self._times_one_device > np.sqrt(number)
        is_of_program = way == theirs or any(abs(theirs.scale * n - 1) < COMMUTES for n in (1, number))
        return {
            "members": [*upstream, *members],
            "terms": [name.removesuffix(":0") for name in same] if is_repeated and way != theirs else [],
            "scale": float(number) if is_too_large else 1.0 if is_of_program else theirs.scale,
            "mixing": len(mixing.found),
            "evaluations": shares.evaluations,
        }

    @property
    def _times_one_device(self) -> float:
        """Return how large the gradient of the shares' own losses is, as a multiple of one device's: 1 where they are parts."""
        total, one = self._shares.total([]), self._noise.in_units(self._one)
        own = self._noise.in_units({name: total[name] for name in self._one})
        return float(np.dot(own, one) / np.dot(one, one))

    def _same_terms(self, some: Collection[str]) -> list[str]:
        """Return the terms that depend on variables, and are the same on all shares where some tensors are one device's."""
        whole = self._shares.whole
        return [name for name in self._shares.same(some) if whole.before(name) & _readers(whole)]

    def _without_pairs(self, minimal: list[str]) -> list[str]:
        """Leave out numbers of which one makes up for the other: an average of a share, divided by the number of replicas."""
        nodes = self._shares.mixing.local.nodes
        constants = [name for name in minimal if nodes[node_of(name)].op == "Const"]
        numbers = [name for name in minimal if node_of(name).endswith(NUMBER)]
        rests = ([name for name in minimal if name not in pair] for pair in itertools.product(constants, numbers))
        return next((rest for rest in rests if self._is_enough(rest, _Way(1.0, 0.0))), minimal)

    def _enough_divisors(self, every: Sequence[str]) -> list[str]:
        """Return the fewest numbers of examples that are enough: a sum of all shares may make up for another of them."""
        divisors = [name for name in every if self._is_number_of_examples(name)]
        sets = (some for size in range(1, len(divisors) + 1) for some in itertools.combinations(divisors, size))
        few = itertools.islice(sets, _FEW_SETS)
        return list(next((some for some in few if self._is_enough(some, _Way(1.0, 0.0))), ()))

    def _is_number_of_examples(self, name: str) -> bool:
        value = self._shares.mixing.values[name]
        return not np.ndim(value) and self._counts_examples(value, self._shares.own_values(name))

    def _mixing_behind(self, name: str) -> list[str]:
        """Return where rows meet that are only given another shape here; else the tensor itself."""
        mixing, whole = self._shares.mixing, self._shares.whole
        if name not in mixing.shaped:
            return [name]
        found, waiting, seen = list[str](), list(whole.inputs(node_of(name))), set[str]()
        while waiting:
            tensor = waiting.pop()
            if tensor in mixing.found and tensor not in mixing.shaped:
                found.append(tensor)
            elif tensor in mixing.values and tensor not in seen and node_of(tensor) in whole.nodes:
                waiting += whole.inputs(node_of(tensor))
            seen.add(tensor)
        return list(dict.fromkeys(found)) or [name]

    def _meetings_behind(self, name: str) -> list[str]:
        """Return where rows first meet rows of what a tensor is made of: one join after them may be fewer than their own."""
        mixing, whole = self._shares.mixing, self._shares.whole
        between = whole.before(name) & whole.after({*whole.rows.values()}, self._sizes)
        pairs = [n for n in mixing.found if np.ndim(mixing.values[n]) > 1 and n not in mixing.alike and n not in mixing.shaped]
        pairs = [n for n in pairs if n != name and node_of(n) in between]
        return [node_of(n) for n in pairs if not any(node_of(other) in whole.before(n) for other in pairs if other != n)]

    def _passes_no_gradient(self, name: str, minimal: Sequence[str], way: _Way) -> bool:
        return not is_float(self._shares.mixing.values[name]) or self._is_enough(minimal, way, only=[name])

    def _member(self, name: str, *, is_value: bool) -> dict[str, Any]:
        node = self._shares.mixing.local.nodes[node_of(name)]
        kind = self._kind(name, node)
        # A constant has no line of its own.
        whole = self._shares.whole
        shown = next(n for n in whole.order if name in whole.inputs(n)) if kind == "constant" else name.removesuffix(":0")
        of_variables = whole.before(name, with_sizes=False) & _readers(whole)
        return {
            "name": shown.removesuffix(TOTAL).removesuffix(NUMBER),
            "operation": node.op,
            "kind": kind,
            "value_alone": is_value,
            "of_data": not of_variables,
            "scales": kind not in ("constant", "rows") and self._only_scales(name),
            "is_assigned": bool(whole.assigned) and not whole.after({name}, whole.assigned) & {*map(node_of, whole.objectives)},
        }

    def _kind(self, name: str, node: Any) -> str:
        """Return what a tensor is to the shares' own values of it, by its numbers."""
        layout, value = self._shares.mixing.layout(name), self._shares.mixing.values[name]
        if node.op == "Const":
            return "constant"
        if layout.axis is not None:
            return "rows"
        own = self._shares.own_values(name)
        if any(np.shape(of_share) != np.shape(value) for of_share in own):
            return "other"
        if not np.ndim(value) and self._counts_examples(value, own):
            return "number"
        ways = (("count" if node.op == "Cast" else "sum", np.sum), ("maximum", np.max), ("minimum", np.min))
        return next((kind for kind, combine in ways if is_equal(combine(own, axis=0), value)), "other")

    def _counts_examples(self, value: Any, own: Sequence[Any]) -> bool:
        """Return whether a number is the same multiple of the examples in the batch and in each share."""
        counts = self._shares.counts
        return all(np.isclose(float(of_share) * sum(counts), float(value) * n) for of_share, n in zip(own, counts, strict=True))

    def _upstream_of(self, members: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return what members are computed from that mixes too, where their own values do not combine to the whole batch's."""
        mixing, whole = self._shares.mixing, self._shares.whole
        names = {member["name"] for member in members}
        behind = set[str]().union(*(whole.before(f"{one['name']}:0") for one in members if one["kind"] == "other"))
        more = [name for name in mixing.found if node_of(name) in behind]
        described = [{**self._member(name, is_value=True), "belongs": False} for name in more]
        return [member for member in described if member["name"] not in names and member["kind"] != "constant"]

    def _belongs(self, name: str, kind: str, others: Sequence[str]) -> bool:
        """Return whether a tensor is made of another one of them, or scales what is made of others and of no row besides.

        A count, or a number of examples, has a meaning of its own, of whatever it is made.
        """
        whole = self._shares.whole
        if kind not in ("count", "number") and whole.before(name) & {*map(node_of, others)}:
            return True
        of_others, of_rows = whole.after({*others}), whole.after({*whole.rows.values()}, {*others, *self._sizes})
        beside = (tensor for _, tensors, _ in self._met(name, of_rows) for tensor in tensors)
        return any(i in others or (node_of(i) in of_others and node_of(i) not in of_rows) for i in beside)

    @property
    def _sizes(self) -> set[str]:
        """Return what has shapes."""
        whole = self._shares.whole
        return {f"{name}:0" for name in whole.order if whole.nodes[name].op in SIZES}

    def _only_scales(self, name: str) -> bool:
        """Return whether a number of all rows scales what is of each row, and is not added to it or multiplied with it."""
        of_rows = self._shares.whole.after({*self._shares.whole.rows.values()}, self._sizes)
        met = self._met(name, of_rows, through=("GatherV2",))
        return all(operation in _SCALES for operation, _, meets_rows in met if meets_rows)

    def _met(self, name: str, of_rows: Collection[str], through: Collection[str] = ()) -> Iterator[tuple[str, list[str], bool]]:
        """Yield what takes a number: the operation, what else it takes, and whether some of that is of rows.

        The number is followed as long as it is combined with numbers alone, and through some operations.
        """
        whole = self._shares.whole
        behind, waiting = {node_of(name)}, [name]
        while waiting:
            tensor = waiting.pop()
            for node in (node for node in whole.order if tensor in whole.inputs(node) and whole.nodes[node].op not in SIZES):
                operation = whole.nodes[node].op
                beside = [i for i in whole.inputs(node) if i != tensor and node_of(i) not in behind]
                meets_rows = any(i in whole.rows.values() or node_of(i) in of_rows for i in beside)
                yield operation, beside, meets_rows
                if (operation in through or not meets_rows) and node not in behind:
                    behind.add(node)
                    waiting += [output for output in self._shares.mixing.values if node_of(output) == node]


def _readers(forward: Forward) -> set[str]:
    return {name for name in forward.order if forward.nodes[name].op in ("ReadVariableOp", "ResourceGather")}


def find_joins(
    reference: Path, local: Path | None, topology: Path, optimizer: str, index: int, *, permutes: bool
) -> dict[str, Any]:
    """Return which operations of a step must see the whole batch.

    Args:
        reference: The folder of the trace of the run on one device that has kept its functions.
        local: That of a run on one device with one share's examples, where functions take batches of one size alone.
        topology: The folder of the judged run's trace.
        optimizer: Whose gradients differ.
        index: The step.
        permutes: Whether rows may come in another order to measure noise.

    Returns:
        `members`, `terms` and `scale`; or `refused` with the reason.
    """
    one_device, trial = Trace(reference), Trace(topology)
    numbers = [event["function"] for _, event in one_device.of("step") if event["optimizer"] == optimizer]
    whole = Forward(reference, numbers[index], optimizer)
    each = [step for _, step in sorted(trial.steps(optimizer)[index].items())]
    shares = [rows_of(whole.function, step) for step in each]
    weights = _weights_before(trial, index)
    whole.go_to(weights)
    small = whole if local is None else Forward(local, numbers[index], optimizer)
    small.go_to(weights)
    try:
        if not all(map(small.function.fits, shares)):
            raise NoAnswer("its function takes batches of one size alone")
        noise, one = _Noise(whole, shares, permutes=permutes), whole.recorded(of_all(shares))
        stored = [step.taped if whole.kind == "taped" else step.gradients for step in each]
        names = [n for n in whole.variables if all(n in s and s[n].is_complete for s in stored)]
        theirs = {n: np.sum([s[n].read().astype(float) for s in stored], axis=0) for n in names}
        losses = [step.objective for step in each if step.objective is not None]
        theirs |= {LOSS: np.array(sum(losses))} if len(losses) == len(each) else {}
        experiments = _Experiments(Shares(whole, small, shares), noise, one, theirs)
        return experiments.answer()
    except NoAnswer as none:
        return {"refused": str(none)}
    except (tf.errors.OpError, ValueError, LookupError) as error:
        return {"refused": str(error).strip()[:200]}


def _weights_before(trace: Trace, index: int) -> dict[str, Array]:
    """Return the variables before a step of all optimizers, as far as they were kept whole."""
    initial = [variables for _, variables in sorted(trace.variables("initial").items())]
    steps = [step for name in trace.optimizers for step in trace.steps(name)[max(0, index - 1) : index]]
    before = [of_replica.weights for step in steps for _, of_replica in sorted(step.items())]
    arrays = {name: v.array for values in reversed([*before, *initial]) for name, v in values.items() if v.array is not None}
    return {name: array.read() for name, array in arrays.items() if array.is_complete}
