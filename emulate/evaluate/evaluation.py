"""Write the trace of a run that was never made: the steps of another run, rounded otherwise or led by a third one."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from emulate.evaluate.parts import State
from emulate.evaluate.step_function import Fetched, Key, StepFunction, Values, rows_of
from emulate.imports import tf
from emulate.interventions import Interventions, Pairs, permutation, splits_of
from emulate.recorder import HostTrace, ProbePlan, Record, Replay
from emulate.trace import Array, Step, Trace, TraceWriter, Variable, joined

_SAME = 1e-3
"""Largest relative L2 difference between a step's recorded gradients and those of its function: rounding is far below."""


class NotReproduced(Exception):
    """Say that the functions of a run do not give what it has recorded."""


def evaluate(source: Path, plan: ProbePlan) -> None:
    """Evaluate the steps of a run, from its first state on, and write the trace of a run that was never made.

    Args:
        source: The folder of the run's trace.
        plan: How rows are permuted, gradients perturbed, whose gradients are applied, where the trace goes.

    Raises:
        NotReproduced: When the functions of the run do not give the gradients that it has recorded.
    """
    _Evaluation(Trace(source), State(source), plan).write()


@dataclass(frozen=True)
class _Variable:
    """Stand for a variable of the program."""

    name: str
    shape: tuple[int, ...]


class _Names:
    def of(self, variable: _Variable) -> str:
        return variable.name


class _Evaluation:
    def __init__(self, source: Trace, state: State, plan: ProbePlan) -> None:
        self._source, self._state, self._plan = source, state, plan
        self._functions: dict[int, StepFunction] = {}
        names: Any = _Names()
        self._interventions = Interventions(plan, names)
        self._generator = np.random.default_rng([plan.noise_seed, plan.seed])
        self._leader = None if plan.follow is None else Trace(plan.follow.trace)
        self._made: Counter[str] = Counter()
        self._begun: set[str] = set()

    def write(self) -> None:
        """Write the trace."""
        writer = TraceWriter(self._plan.trace / "host-0", budget=self._plan.budget)
        shutil.copy(self._source.directory / "trace.json", self._plan.trace / "trace.json")
        recording = HostTrace(writer, steps=None, send=lambda event: None)
        if not self._plan.perturb:
            self._copy_facts(writer)
        number, step = next((number, step) for number, step in _calls(self._source) if isinstance(step, Step))
        function = self._function(number)
        self._check(function, rows_of(function, step), step)
        for record in self._records():
            recording.handle(record)
        recording.close("steps")
        _write_reports(self._source, writer, Trace(self._plan.trace), self._plan.replay)
        writer.close()

    def _records(self) -> Iterator[Record]:
        """Yield the records of all steps, up to an update that the leading run has not made: what follows would be its own."""
        for function, shares in self._batches():
            for record in self._step(function, shares):
                yield record
                is_update = record.kind == "step" and not record.about["replica"]
                if is_update and not self._follow_weights(function, record):
                    return

    def _begin(self, function: StepFunction) -> None:
        """Begin with the plan's first values of the weights that no step has had before."""
        new = {name: value for name, value in self._first.items() if name not in self._begun}
        self._take(function, new)
        self._begun |= {name for name, value in new.items() if ("weight", name, value.trainable) in function.variables}

    @cached_property
    def _first(self) -> dict[str, Variable]:
        initial = {} if self._plan.initial is None else Trace(self._plan.initial).variables("initial")
        return {name: v for values in reversed(initial.values()) for name, v in values.items() if v.array is not None}

    def _take(self, function: StepFunction, values: Mapping[str, Variable], only: Mapping[Key, Array] | None = None) -> None:
        """Go to another run's weights, as far as it kept them whole; where values are given, of those that still have these."""
        for name, value in values.items():
            key = ("weight", name, value.trainable)
            place = function.variables.get(key)
            if place is None or value.array is None or not value.array.is_complete:
                continue
            if only is None or (key in only and np.array_equal(np.ravel(only[key]), np.ravel(self._state.variables[place]))):
                self._assign(place, value.array.read())

    def _assign(self, number: int, value: Array) -> None:
        variable = self._state.variables[number]
        variable.assign(np.reshape(value, variable.shape))  # a single number is kept with one dimension

    def _batches(self) -> Iterator[tuple[StepFunction, list[dict[Key, Array]]]]:
        """Yield the function of each step with its rows: all at once, or one share after the other."""
        num_steps = 0
        for number, step in _calls(self._source):
            if isinstance(step, _Change):
                self._assign(number, step.value)
                continue
            function = self._function(number)
            self._begin(function)
            own = rows_of(function, step)
            shares = [own] if self._interventions.rows is None else self._interventions.rows.batches(num_steps, own)
            if not shares:
                return
            num_steps += 1
            if not all(function.fits(share) for share in shares):
                raise NotReproduced("The function of a step takes batches of one size alone.")
            yield function, [self._permuted(share, step) for share in shares]

    def _follow_weights(self, function: StepFunction, made: Record) -> bool:
        """Go on, after an update, with the leading run's weights; return whether that run, if there is one, has made it.

        They are those that the update left. What the step assigns after it (weights that it clips) stays as it was made.
        """
        if self._leader is None:
            return True
        optimizer = made.about["optimizer"]
        index = self._made[optimizer]
        self._made[optimizer] += 1
        for step in self._leader.steps(optimizer)[index : index + 1]:
            weights = [(name, value) for local in step.values() for name, value in local.weights.items()]
            # Replicas that keep parts of something have them of their own: this run has what they make together.
            own = [name for name, _ in {(name, value.digest) for name, value in weights if not value.trainable}]
            whole = [(name, value) for name, value in reversed(weights) if own.count(name) < 2]
            self._take(function, dict(whole), dict(made.values))
        return index < len(self._leader.steps(optimizer))

    def _function(self, number: int) -> StepFunction:
        if number not in self._functions:
            self._functions[number] = StepFunction(self._source.directory, number, self._state)
        return self._functions[number]

    def _step(self, function: StepFunction, shares: list[dict[Key, Array]]) -> Iterator[Record]:
        """Make one step, and yield its records."""
        recorded: list[Values] = []
        given: list[Values] = []
        by_loss: list[list[Values]] = []
        rows = shares[0] if len(shares) == 1 else {key: joined([share[key] for share in shares]) for key in shares[0]}
        with self._off_by_units(function):
            for place, record in enumerate(function.records):
                if self._by_loss:
                    by_loss.append([self._joined(v) for v in function.gradients_by_loss(place, shares, given, rows)])
                    own = self._joined(by_loss[-1])
                else:
                    own = self._joined(function.gradients(place, shares, given, rows))
                changed = self._changed(record, own)
                recorded.append(changed[0])
                given.append(changed[1])
            returned = self._returned(function, shares, given, rows)
        results = self._by_record(function.update(shares, given, rows))
        after = [values | of_noise for values, of_noise in zip(results, returned, strict=True)]
        for place, record in enumerate(function.records):
            if self._by_loss and record.kind == "step":
                for number, (share, own) in enumerate(zip(shares, by_loss[place], strict=True)):
                    yield _made(record, share, own | after[place], record.about | {"replica": number})
            else:
                yield _made(record, rows, recorded[place] | after[place], record.about)

    @property
    def _by_loss(self) -> bool:
        return self._plan.replay is not None and self._plan.replay.by_loss

    def _returned(
        self, function: StepFunction, shares: list[dict[Key, Array]], given: list[Values], rows: dict[Key, Array]
    ) -> list[Values]:
        """Return, by record, what a step of a noise run returns: of a forward pass that is rounded as that of its gradients."""
        if not (self._plan.perturb and any(key[0] == "result" for record in function.records for key in record.tensors)):
            return [{} for _ in function.records]
        return self._by_record(function.returned(shares, given, rows))

    def _by_record(self, results: list[list[Values]]) -> list[Values]:
        """Return what shares make of each record together."""
        return [self._joined(list(of_record)) for of_record in zip(*results, strict=True)]

    @contextlib.contextmanager
    def _off_by_units(self, function: StepFunction) -> Iterator[None]:
        """Have the weights of a noise run off by units in the last place in this block.

        On several replicas the forward pass is rounded in another way, in batches of another size. No order of the rows shows
        that on one device, where each of them has its bits wherever it stands.
        """
        if not self._plan.perturb:
            yield
            return
        weights = sorted({number for key, number in function.variables.items() if key[0] == "weight" and key[2]})
        before = self._state.read(weights)
        self._state.shift(weights, self._plan.perturb, self._plan.noise_seed)
        try:
            yield
        finally:
            self._state.assign(before)

    def _joined(self, of_shares: list[Values]) -> Values:
        """Return what shares give together: the mean or the sum of gradients and results, the sum of their objectives."""
        if len(of_shares) == 1:
            return of_shares[0]
        assert self._plan.replay is not None
        number = 1 if self._plan.replay.summed else len(of_shares)
        joined = dict(of_shares[-1])
        for key in of_shares[0]:
            values = [of_share[key] for of_share in of_shares]
            if key[0] in ("gradient", "taped", "result"):
                joined[key] = tf.add_n(values) / number
            elif key[0] == "sparse-gradient":
                joined[key] = tf.concat(values, 0) / number
            elif key[0] == "sparse-rows":
                joined[key] = tf.concat(values, 0)
            elif key[0] == "objective":
                joined[key] = tf.add_n(values)
        return joined

    def _permuted(self, rows: Mapping[Key, Array], step: Step) -> dict[Key, Array]:
        if not self._plan.permute or not step.row_inputs:
            return dict(rows)
        keys = [key for place, key in enumerate(rows) if place in step.row_inputs]
        order = permutation(self._generator, len(rows[keys[0]]), splits_of(self._plan.switches))
        return {key: value[order] if key in keys else value for key, value in rows.items()}

    def _changed(self, record: Fetched, values: Values) -> tuple[Values, Values]:
        """Return what a record holds before the update as it is recorded, and as its optimizer is given it."""
        if not (self._plan.perturb or self._plan.follow):
            return values, values
        optimizer, own = record.about.get("optimizer", ""), _pairs(values)
        recorded, given = self._interventions.applied(optimizer, own)
        return values | _values(recorded), values | _values(given)

    def _copy_facts(self, writer: TraceWriter) -> None:
        """Copy what the run knows of its program, and its first weights."""
        facts = [event for _, event in self._source.of("program")][-1:]
        for event in facts:
            writer.write(event | {"follows": self._plan.follow is not None, "replayed": self._plan.replay is not None})
        for place, initial in self._source.variables("initial").items():
            variables = {
                name: {"digest": variable.digest, "trainable": variable.trainable, "array": writer.array(variable.array.read())}
                for name, variable in initial.items()
                if variable.array is not None and variable.array.is_complete
            }
            writer.write({"event": "initial", "replica": place[1], "variables": variables})

    def _check(self, function: StepFunction, rows: Mapping[Key, Array], step: Step) -> None:
        """Compare the first step's gradients with the recorded ones."""
        place = next(place for place, record in enumerate(function.records) if record.about.get("optimizer") == step.optimizer)
        (before,) = function.gradients(place, [rows], [], rows)
        gradients = {key[1]: np.asarray(value) for key, value in before.items() if key[0] == "gradient"}
        off = size = 0.0
        for name, stored in step.gradients.items():
            if name in gradients and stored.is_complete and stored.rows is None:
                recorded = stored.read().astype(np.float64)
                off += float(np.sum((recorded - gradients[name].astype(np.float64)) ** 2))
                size += float(np.sum(recorded**2))
        if not off <= _SAME**2 * size:
            raise NotReproduced(
                f"relative difference of the first step's gradients: {(off / size) ** 0.5 if size else off:.2g}"
            )


def _made(record: Fetched, rows: Mapping[Key, Array], values: Values, about: dict[str, Any]) -> Record:
    known = {**{key: rows[key] for key in record.tensors if key[0] == "input"}, **values}
    return Record(record.kind, about, [(key, np.asarray(known[key])) for key in record.tensors])


def _write_reports(source: Trace, writer: TraceWriter, result: Trace, replay: Replay | None) -> None:
    """Write the numbers that the program would report, as far as they are what its steps return.

    Args:
        source: The run whose program has reported numbers.
        writer: Of the evaluated run.
        result: The evaluated run's trace, with what its steps return.
        replay: The other run's examples.
    """
    own, evaluated = ([event["values"] for _, event in trace.of("result")] for trace in (source, result))
    returned = -1
    by_name: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
    for _, event in source.events:
        returned += event["event"] == "result"
        if event["event"] == "report" and not (replay is not None and replay.has_no_log(event["name"])):
            by_name.setdefault((event["kind"], event["name"]), []).append((returned, event))
    for events in by_name.values():
        pairs = [(own[call] if call >= 0 else (), event["value"]) for call, event in events]
        places = range(min(len(values) for values, _ in pairs))
        place = next((i for i in places if all(values[i] == value for values, value in pairs)), None)
        for call, event in events if place is not None else ():
            value = evaluated[call][place] if call < len(evaluated) else None
            if value is not None:
                writer.write(event | {"value": value})


def _pairs(values: Values) -> Pairs:
    """Return gradients with their variables, as an optimizer is given them: arrays, or slices of them."""
    dense = [(key[1], np.asarray(value)) for key, value in values.items() if key[0] == "gradient"]
    pairs: Pairs = [(value, _Variable(name, value.shape)) for name, value in dense]
    for name in [key[1] for key in values if key[0] == "sparse-gradient"]:
        value, rows, shape = (values[(kind, name)] for kind in ("sparse-gradient", "sparse-rows", "sparse-shape"))
        pairs.append((tf.IndexedSlices(value, rows, shape), _Variable(name, tuple(np.asarray(shape)))))
    return pairs


def _values(pairs: Pairs) -> Values:
    """Return the tensors of gradients by their key."""
    values: Values = {}
    for gradient, variable in pairs:
        if hasattr(gradient, "indices"):
            values[("sparse-gradient", variable.name)] = gradient.values
            values[("sparse-rows", variable.name)] = gradient.indices
        else:
            values[("gradient", variable.name)] = gradient
    return values


@dataclass(frozen=True)
class _Change:
    """Hold what a program made of a variable between two steps."""

    value: Array


def _calls(trace: Trace) -> Iterator[tuple[int, Step | _Change]]:
    """Yield, in order, each function with the step that holds its rows, and each variable with what was made of it."""
    steps = {name: [next(iter(replicas.values())) for replicas in trace.steps(name)] for name in trace.optimizers}
    call: list[tuple[int, Step | _Change]] = []  # a function with its first update's step, after what its updates read
    last: int | None = None
    for host, event in trace.events:
        is_same = event["event"] == "step" and bool(event.get("again")) and event["function"] == last
        if event["event"] in ("set", "step") and not is_same:
            yield from call
            call = []
        if event["event"] == "set":
            yield event["variable"], _Change(trace.array(host, event["value"]).read())
        if event["event"] != "step":
            continue
        call = [*((int(number), _Change(np.array(value))) for number, value in event.get("read", {}).items()), *call]
        if event["optimizer"] in steps and not is_same:
            call.append((event["function"], steps[event["optimizer"]][event["step"]]))
        last = event["function"]
    yield from call
