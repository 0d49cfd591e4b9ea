"""Find which operations of a step mix examples, and evaluate the shares' gradient where some of them see the whole batch.

Each operation is executed once more, on each share's part of what it takes: it mixes if that does not give the parts of its
result. `joins.py` says what for.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulate.evaluate.forward import (
    LOSS,
    SIZES,
    Forward,
    Gradients,
    Rows,
    function_of,
    is_float,
    num_rows,
    of_all,
    times_of_rows,
)
from emulate.evaluate.parts import node_of
from emulate.grouping import grouped
from emulate.imports import tf
from emulate.trace import Array

MOST = 40
"""Experiments of one step: a cause takes about 15. Two dozen that mix, of which each one matters, would take hundreds."""
_PRODUCTS = {"Mul": (0, 1), "RealDiv": (0,), "DivNoNan": (0,)}
_SUMS = ("AddV2", "Add", "AddN", "Sub", "Neg", "Identity", "Cast", "Squeeze")
"""Operations that a loss may be a linear function of: products in one of these inputs, sums in all."""
COMMUTES = 1e-4
"""Largest relative difference of an operation's results for parts: far above rounding, far below one share's part of a sum."""
_MASKS = 1e6
"""Numbers from here on stand for what is masked where all shares have the same ones."""


class NoAnswer(Exception):
    """Say why experiments tell nothing of a step."""


Entries = tuple[tuple[int, ...], ...]
"""Which entries of a tensor each share has."""


@dataclass(frozen=True)
class Layout:
    """Say which part of a tensor of the whole batch a share has: its entries along an axis, all of it, or what is its `own`."""

    axis: int | None = None
    entries: Entries = ()
    own: tuple[Any, ...] | None = None

    def part(self, value: Any, share: int) -> Any:
        """Return a share's part."""
        if self.own is not None or self.axis is None:
            return value if self.own is None else self.own[share]
        return np.take(value, np.array(self.entries[share], int), self.axis)

    def together(self, parts: Sequence[Any]) -> Any:
        """Return the gradient of the whole tensor from those of its parts."""
        if self.axis is None:
            return np.sum(parts, axis=0)
        return np.take(np.concatenate(parts, self.axis), np.argsort(np.concatenate(self.entries)), self.axis)


def _in_turn(sizes: Sequence[int]) -> Entries:
    ends = list(itertools.accumulate(sizes))
    return tuple(tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True))


def _stacked(each: Sequence[Entries]) -> Entries:
    begins = itertools.accumulate((sum(map(len, entries)) for entries in each), initial=0)
    moved = [[[begin + i for i in of_share] for of_share in entries] for begin, entries in zip(begins, each, strict=False)]
    return tuple(tuple(itertools.chain(*of_share)) for of_share in zip(*moved, strict=True))


def _derived(taken: Sequence[Entries], number: int) -> Iterator[Entries]:
    """Yield which of so many entries each share may have, by those of what they are made of.

    They may be the same, those of all one behind the other (two inputs in one pass of a model), some of them (one input's
    results), or each of them several times.
    """
    if len(taken) > 1:
        yield _stacked(taken)
    for entries in taken if number else ():  # nothing can be cut into no entries, and no entries repeated
        known = sum(map(len, entries))
        begins = (0, known - number, *range(number, known - number, number)) if known >= number else ()
        for begin in begins:
            yield tuple(tuple(i - begin for i in of_share if begin <= i < begin + number) for of_share in entries)
        if 0 < known < number and number % known == 0:
            times = number // known
            yield _stacked([entries] * times)
            yield tuple(tuple(i * times + k for i in of_share for k in range(times)) for of_share in entries)


class Mixing:
    """Find the tensors whose parts are not what shares compute from the parts of what they are computed from.

    Args:
        whole: The forward pass of one device.
        shares: The examples of each share.
        local: The forward pass for a share: the same, or another graph where the size of a batch is fixed.

    Attributes:
        values: What one device computes of the whole batch, by tensor.
        found: The tensors that mix examples, in the order of the forward pass.
        places: Of those of them that say where rows stand in a batch, which is another number in a share, the shares' own: what
            takes rows from there is asked with these.
        shaped: Those of them that only take a shape of the share's own where what they take is of the whole batch.
        alike: Those of them of which each share's own has the shape of its part.
    """

    def __init__(self, whole: Forward, shares: Sequence[Rows], local: Forward) -> None:
        self.local, self._counts, self.found = local, [num_rows(rows) for rows in shares], list[str]()
        self.shaped, self.alike = set[str](), set[str]()
        self.places: dict[str, Sequence[Any]] = {}
        given = {whole.rows[key]: value for key, value in of_all(shares).items()}
        rows = {whole.rows[key]: [times * n for n in self._counts] for key, times in times_of_rows(shares).items()}
        self._layouts = {name: Layout(0, _in_turn(sizes)) for name, sizes in rows.items()}
        every = [name for name in whole.order if whole.nodes[name].op != "Placeholder"]
        nodes = [name for name in every if name in local.nodes]
        constants = [name for name in nodes if local.nodes[name].op == "Const"]  # a graph for a share may have others
        # TensorFlow writes zeros of less than 1,000 elements as one constant, others as an operation on a constant.
        if ({*every} - {*nodes}) & {node_of(i) for name in nodes if name not in constants for i in whole.inputs(name)}:
            raise NoAnswer("the step of a share has another graph")
        self.values: dict[str, Any] = given | _evaluating(whole, every, given)(given)
        for name in constants:
            own = tf.make_ndarray(local.nodes[name].attr["value"].tensor)
            self._look(name, [f"{name}:0"], (), [[own] for _ in shares], takes_sizes=True)
        depending = whole.after({name for name, layout in self._layouts.items() if layout != Layout()} | {*self.found})
        # Where all that an operation takes is what a share computes by itself, so is what it makes of it.
        each, alone = self._own_values(nodes, given), set[str](given)
        of_node = grouped((node_of(tensor), tensor) for tensor in self.values)
        for name in (name for name in nodes if name in depending):
            outputs = of_node.get(name, [])
            inputs = [i for i in dict.fromkeys(whole.inputs(name)) if i in self.values]
            sizes = [i for i in inputs if self.layout(i).own is not None]
            before, is_alone = len(self.found), all(i in alone or node_of(i) not in depending for i in inputs)
            made = [[own[output] for output in outputs] for own in each] if is_alone and each else None
            self._look(name, outputs, whole.inputs(name), made or self._executed(outputs, inputs), takes_sizes=bool(sizes))
            alone |= {*outputs} if made and len(self.found) == before else set()
            has_rows = any(self.layout(i).axis is not None for i in inputs)
            if len(self.found) > before and sizes and has_rows:  # a share's own shape, given to rows of the whole batch?
                del self.found[before:]
                self._look(name, outputs, inputs, self._executed(outputs, inputs, alike=sizes), takes_sizes=True)
                if len(self.found) == before:
                    self.found += outputs
                    self.shaped |= {*outputs}
        self._layouts |= dict.fromkeys(whole.own_sums, Layout())

    def _own_values(self, nodes: Sequence[str], given: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what each share computes of its part of the examples; nothing where that fails."""
        parts = [
            {name: self.layout(name).part(value, share) for name, value in given.items()} for share in range(len(self._counts))
        ]
        try:
            return list(map(_evaluating(self.local, nodes, parts[0]), parts))
        except (tf.errors.OpError, ValueError):
            return []

    def _executed(self, outputs: Sequence[str], inputs: Sequence[str], alike: Collection[str] = ()) -> list[list[Any]] | None:
        """Return what an operation makes of each share's part of what it takes, but for inputs that are alike on all."""
        layouts = {name: Layout() if name in alike else self.layout(name) for name in inputs}
        parts = [
            {i: self.places[i][share] if i in self.places else layouts[i].part(self.values[i], share) for i in inputs}
            for share in range(len(self._counts))
        ]
        nodes = list(dict.fromkeys(map(node_of, outputs)))
        try:
            return list(map(function_of(functools.partial(self.local.imported, fetched=outputs, nodes=nodes), parts[0]), parts))
        except (tf.errors.OpError, ValueError):  # a share's rows meet those of the whole batch
            return None

    def layout(self, name: str) -> Layout:
        """Return how a tensor is divided among the shares."""
        return self._layouts.get(name, Layout())

    def _look(
        self,
        name: str,
        outputs: Sequence[str],
        inputs: Sequence[str],
        made: Sequence[Sequence[Any]] | None,
        *,
        takes_sizes: bool,
    ) -> None:
        is_size = takes_sizes or self.local.nodes[name].op in SIZES
        taken = [layout.entries for layout in map(self.layout, inputs) if layout.axis is not None]
        for place, output in enumerate(outputs):
            own = None if made is None else [of_share[place] for of_share in made]
            self._layouts[output], commutes = self._divided(self.values[output], own, taken, is_size=is_size)
            self.found += [] if commutes else [output]
            parts = [self._layouts[output].part(self.values[output], share) for share in range(len(self._counts))]
            if own is not None and all(np.shape(part) == np.shape(o) for part, o in zip(parts, own, strict=True)):
                self.alike.add(output)
            is_divided = not commutes and own is not None and self._layouts[output].axis is not None
            if is_divided and np.asarray(self.values[output]).dtype.kind in "iu":
                self.places[output] = own or ()

    def _divided(
        self, value: Any, own: Sequence[Any] | None, taken: Sequence[Entries], *, is_size: bool
    ) -> tuple[Layout, bool]:
        """Return how a result is divided, and whether its parts are what shares make of their parts."""
        total, shape = sum(self._counts), np.shape(value)
        if own is None:
            axis = next((a for a, n in enumerate(shape) if n and n % total == 0), None)
            if axis is None:
                return Layout(), False
            in_turn = _in_turn([n * shape[axis] // total for n in self._counts])
            return Layout(
                axis, next((e for e in _derived(taken, shape[axis]) if sum(map(len, e)) == shape[axis]), in_turn)
            ), False
        is_alike = all(np.shape(o) == shape for o in own)
        if is_alike and all(is_equal(o, value) for o in own):
            return Layout(), True
        ranks = {np.ndim(o) for o in own}
        axes = [a for a in range(len(shape)) if ranks == {len(shape)} and sum(o.shape[a] for o in own) == shape[a]]
        sizes = {a: tuple(o.shape[a] for o in own) for a in axes}
        known = [(a, entries) for a, of_own in sizes.items() for entries in (*_derived(taken, shape[a]), _in_turn(of_own))]
        divided = [Layout(a, entries) for a, entries in dict.fromkeys(known) if tuple(map(len, entries)) == sizes[a]]
        for layout in divided:
            are_parts = all(np.shape(layout.part(value, s)) == np.shape(o) for s, o in enumerate(own))
            if are_parts and is_equal(layout.together(own), value):
                return layout, True
        if is_alike and is_size and np.asarray(value).dtype.kind in "iu":
            return Layout(own=tuple(own)), True  # numbers of rows are used as shapes, too: they mix where they are cast
        return (divided[0] if divided else Layout()), False


def _evaluating(
    forward: Forward, nodes: Sequence[str], like: Mapping[str, Any]
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return what evaluates every tensor of some nodes."""
    kept: list[str] = []

    def everything(at_hand: dict[str, Any]) -> list[Any]:
        operations = zip(nodes, forward.imported(at_hand, nodes, nodes), strict=True)
        outputs = {f"{name}:{i}": t for name, operation in operations for i, t in enumerate(operation.outputs)}
        kept[:] = [name for name, t in outputs.items() if t.dtype not in (tf.resource, tf.variant)]
        return [outputs[name] for name in kept]

    evaluate = function_of(everything, like)

    def evaluated(given: Mapping[str, Any]) -> dict[str, Any]:
        values = evaluate(given)  # the first time, this makes the graph
        return dict(zip(kept, values, strict=True))

    return evaluated


def is_equal(value: Any, other: Any) -> bool:
    """Return whether two values are the same up to rounding."""
    value, other = np.asarray(value), np.asarray(other)
    if not is_float(value):
        return bool(np.array_equal(value, other))
    apart = ~((value == other) | (np.isnan(value) & np.isnan(other)))
    if not (np.all(np.isfinite(value[apart])) and np.all(np.isfinite(other[apart]))):
        return False
    distance = np.max(np.abs(value[apart].astype(float) - other[apart].astype(float)), initial=0.0)
    # What is the same to the bit gives no scale where it is huge: an infinity, or -1e9 for what is masked.
    sizes = np.abs(other.astype(float))
    return bool(distance <= COMMUTES * np.max(sizes[apart | (sizes < _MASKS)], initial=0.0))


class Shares:
    """Evaluate the gradient of all shares' losses together, where some tensors are those of the whole batch.

    Args:
        whole: The forward pass of one device.
        local: That of a share.
        shares: The examples of each share.

    Attributes:
        combine: What replicas make of what each of them assigns to a variable; None where each keeps its own.
        numbers: The losses, and the numbers that they are made of as long as no tensor of other dimensions comes between.
        given: What the step itself has of the whole batch: sums over the replicas, and what first mixes rows that it gathers.
    """

    def __init__(self, whole: Forward, local: Forward, shares: Sequence[Rows]) -> None:
        self.whole, self._local, self._shares = whole, local, shares
        self.counts = [num_rows(rows) for rows in shares]
        self.mixing, self.evaluations = Mixing(whole, shares, local), 0
        of_gathered = whole.after(whole.own_gathers, self.mixing.found)
        first = [name for name in self.mixing.found if node_of(name) in of_gathered]
        self.given = [*(name for name in whole.own_sums if name in self.mixing.values), *first]
        self.combine: Callable[[Sequence[Any]], Any] | None = None
        self._totals: dict[tuple[frozenset[str], frozenset[str], bool], Gradients] = {}
        values = self.mixing.values
        self.numbers = self._numbers()
        ends = dict.fromkeys([*self.mixing.found, *self.given, *self.numbers])
        self._ends = [name for name in ends if name in values and is_float(values[name])]
        self._given = {whole.rows[key]: value for key, value in of_all(shares).items()}
        like = self._given | {f"gradient of {name}": values[name] for name in self._ends}
        self._backward = function_of(self._gradients_of_ends, like)
        kept = (name for name in ends if name in values and name not in whole.own_sums)
        self._switches = {name: values[name] for name in kept if name in self.mixing.alike or not np.ndim(values[name])}
        self._made: dict[tuple[frozenset[str], frozenset[str]], Callable[[Mapping[str, Any]], list[Array]]] = {}

    def total(self, some: Collection[str], values_only: Collection[str] = (), *, once: bool = True) -> Gradients:
        """Return that gradient, evaluated once.

        Args:
            some: The tensors that each share takes from the whole batch.
            values_only: Those of them through which no gradient passes.
            once: Whether terms of the loss that are the same on all shares count once; else as often as there are shares.

        Returns:
            The gradient by variable, and the sum of the losses.

        Raises:
            NoAnswer: After too many experiments.
        """
        key = frozenset(some), frozenset(values_only), once
        if key not in self._totals:
            if self.evaluations == MOST:
                raise NoAnswer(f"{MOST} experiments do not say what is needed")
            self.evaluations += 1
            self._totals[key] = self._evaluated(some, values_only, once)
        return self._totals[key]

    def forget(self, combine: Callable[[Sequence[Any]], Any]) -> None:
        """Go on with one value of what the replicas assign, which is made so of theirs."""
        self.combine = combine
        self._totals.clear()
        self._made.clear()

    def _evaluated(self, some: Collection[str], values_only: Collection[str], once: bool) -> Gradients:
        factors = dict.fromkeys([*some, *self.given], 1.0)
        same = self.same(factors) if once else []
        factors |= dict.fromkeys(same, 1 / len(self._shares))
        try:
            made = self._losses_with(factors, self._switches.keys()) if self.combine is None else {}
        except (tf.errors.OpError, ValueError):
            made = {}
        if not (made and all(np.all(np.isfinite(value)) for values in made.values() for value in values)):
            made = self._losses_with(factors, ())  # what is not used has no value, or a gradient that is none, on some share
        sums = {name: np.sum(made[name], axis=0, dtype=float) for name in self._local.variables}
        back = {
            name: [g * factors[name] for g in made[f"gradient of {name}"]] for name in factors if f"gradient of {name}" in made
        }
        behind = self.whole.after({*values_only}) if values_only else set[str]()  # no gradient passes round these either
        stopped = {*values_only, *(name for name in same if node_of(name) in behind)}
        whole = {name: self.mixing.layout(name).together(g) for name, g in back.items() if name not in stopped}
        through = self.through(whole) if any(map(np.any, whole.values())) else {}
        loss = np.array(sum(np.sum(value, dtype=float) for value in made[LOSS]))
        return {name: value + through.get(name, 0.0) for name, value in sums.items()} | {LOSS: loss}

    def _losses_with(self, factors: Mapping[str, float], switches: Collection[str]) -> dict[str, list[Any]]:
        """Return each share's losses, and the gradients of their sum, where tensors are so many times one device's.

        Args:
            factors: The numbers, by the names of the tensors.
            switches: Tensors that a switch replaces. A graph is made once for all sets of these: to make one costs ten times as
                much as to evaluate it. Other tensors are cut out of a graph of their own.

        Returns:
            Of each share the losses, and the gradients by variable and by tensor.
        """
        # In one order, as a graph that is kept has one.
        mixing, cut = self.mixing, sorted(name for name in factors if name not in switches)
        floats = [name for name in (*switches, *cut) if is_float(mixing.values[name])]
        given = []
        for share, rows in enumerate(self._shares):
            parts = {name: np.asarray(mixing.layout(name).part(mixing.values[name], share)) for name in (*switches, *cut)}
            parts |= {name: parts[name] * np.asarray(factors.get(name, 1.0), parts[name].dtype) for name in floats}
            are_on = {f"switch of {name}": np.array(name in factors) for name in switches}
            given.append({self._local.rows[key]: value for key, value in rows.items()} | parts | are_on)
        if self.combine is not None:
            assigned = [name for name in self._local.assigned if name not in factors]
            assign = function_of(functools.partial(self._local.imported, fetched=assigned), given[0])
            together = dict(zip(assigned, map(self.combine, zip(*map(assign, given), strict=True)), strict=True))
            given, cut = [values | together for values in given], [*cut, *assigned]
        key = frozenset(switches), frozenset(cut)
        if key not in self._made:
            forward = self._local.with_switches(self._switches) if switches else self._local

            def derived(at_hand: dict[str, Any]) -> list[Any]:
                losses = forward.imported(at_hand, forward.objectives)
                return [*forward.derived(losses, [at_hand[name] for name in floats]), *losses]

            self._made[key] = function_of(derived, given[0])
        made = [self._made[key](values) for values in given]
        names = [*self._local.variables, *(f"gradient of {name}" for name in floats)]
        by_name: dict[str, list[Any]] = {name: [of_share[i] for of_share in made] for i, name in enumerate(names)}
        return by_name | {LOSS: [value for of_share in made for value in of_share[len(names) :]]}

    def through(self, gradients: Mapping[str, Any]) -> Gradients:
        """Return what one device's backward pass makes of gradients of some tensors."""
        values = self.mixing.values
        weights = {n: gradients[n].astype(values[n].dtype) if n in gradients else 0 * values[n] for n in self._ends}
        made = self._backward(self._given | {f"gradient of {name}": weight for name, weight in weights.items()})
        return dict(zip(self.whole.variables, (gradient.astype(float) for gradient in made), strict=True))

    def _gradients_of_ends(self, at_hand: dict[str, Any]) -> list[Any]:
        tensors = self.whole.imported({name: at_hand[name] for name in self._given}, self._ends)
        return self.whole.derived(tensors, [], [at_hand[f"gradient of {name}"] for name in self._ends])

    def own_values(self, name: str) -> list[Any]:
        """Return what each share computes of a tensor by itself."""
        given = [{self._local.rows[key]: value for key, value in rows.items()} for rows in self._shares]
        sums = {n: self.mixing.values[n] for n in self.whole.own_sums if n in self.mixing.values and n != name}
        run = function_of(functools.partial(self._local.imported, fetched=[name]), given[0] | sums)
        return [run(values | sums)[0] for values in given]

    def same(self, patches: Collection[str]) -> list[str]:
        """Return the terms of the loss that are the same on all shares, each as large as it can be."""
        divided = {name for name in patches if self.mixing.layout(name) != Layout()}
        stops = {*patches} - divided
        own = self.whole.after({*self.whole.rows.values(), *divided}, stops)
        same, waiting = dict[str, None](), list(self.whole.objectives)
        while waiting:
            name = waiting.pop()
            node, inputs = self.whole.nodes[node_of(name)], self._numbers_of(name)
            if node.name not in own or name in stops:
                same[name] = None
            elif node.op in _SUMS or self._packed(name):
                waiting += inputs
            elif node.op in _PRODUCTS:  # linear in one of them
                depend = [i for i in inputs if node_of(i) in own and i not in stops]
                waiting += depend if depend in [[inputs[p]] for p in _PRODUCTS[node.op] if p < len(inputs)] else []
        return [name for name in same if name in self.mixing.values]

    def _numbers(self) -> list[str]:
        numbers, waiting = dict[str, None](), list(self.whole.objectives)
        while waiting:
            name = waiting.pop()
            waiting += [] if name in numbers else self._numbers_of(name)
            numbers[name] = None
        return list(numbers)

    def _numbers_of(self, name: str) -> list[str]:
        inputs = self._packed(name) or self.whole.inputs(node_of(name))
        return [i for i in inputs if not np.ndim(self.mixing.values.get(i, [0]))]

    def _packed(self, name: str) -> list[str]:
        """Return the numbers that are summed as a list; nothing where a tensor is another sum, or none."""
        if self.whole.nodes[node_of(name)].op != "Sum":
            return []
        source = node_of(self.whole.inputs(node_of(name))[0])
        return self.whole.inputs(source) if source in self.whole.nodes and self.whole.nodes[source].op == "Pack" else []
