"""Keep what is known of a run while it goes on, and make records of what instruments see."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from emulate import graph_functions, upstream
from emulate.imports import tf
from emulate.program import users
from emulate.recorder.coordinated import Coordinated
from emulate.recorder.epochs import EpochsOfData, measure_input_rate
from emulate.recorder.functions import Functions, VariableReads
from emulate.recorder.host_trace import HostTrace
from emulate.recorder.initial_weights import InitialWeights, shards_of
from emulate.recorder.plan import ProbePlan
from emulate.recorder.queue import Record, RecordQueue
from emulate.recorder.replica_call import Body
from emulate.recorder.rng_streams import Streams
from emulate.recorder.user_lines import Lines
from emulate.trace import Facts, TraceWriter
from emulate.upstream import Names, is_count_of_each, is_floating, read_local

_TRAIN_STEPS = "gpudist_core.steps.train"
"""Imported where a program makes a step of gpudist_core's."""


class Recorder:
    """Record one host's run of a program.

    Args:
        plan: What to record, and in what this run differs from the program as it stands.
        host: This host's number.
        send: Sends an event to the supervisor.
        several_hosts: Whether collectives between hosts are to be watched.
        has_servers: Whether this host coordinates workers and parameter servers.
        all_reduce: Tells which all-reduce the strategies use.
        receive: Waits for the answer to a question of this host: with `plan.asks` the last wanted step.
    """

    def __init__(
        self,
        plan: ProbePlan,
        *,
        host: int,
        send: Callable[[Mapping[str, Any]], None],
        several_hosts: bool = False,
        has_servers: bool = False,
        all_reduce: Callable[[], str] = lambda: "auto",
        receive: Callable[[], bytes] | None = None,
    ) -> None:
        self.plan = plan
        self.several_hosts = several_hosts
        self.has_servers = has_servers
        self.send = send
        self._all_reduce = all_reduce
        self._receive = receive
        self.names = Names()
        self.facts = Facts(follows=plan.follow is not None, by_share=plan.is_by_share)
        self._facts_written: str = ""
        self.writer = TraceWriter(plan.trace / f"host-{host}", budget=plan.budget)
        ask = self._ask_for_steps if plan.asks else None
        self.trace = HostTrace(self.writer, steps=plan.steps, send=send, ask=ask, keeps_sums=plan.leads)
        self.queue = RecordQueue(plan.steps, self._handle, lambda text: send({"event": "fault", "text": text}))
        self.functions = Functions(plan.trace, enabled=plan.keeps_functions and not (several_hosts or has_servers))
        self.lines = Lines(self.trace, lambda text: self.note_once("lines-unseen", text), enabled=plan.is_untouched)
        self.epochs = EpochsOfData(self.trace.write, keeps_dataset=plan.times_input)
        self.coordinated = Coordinated(self._leaves_order_to_chance)
        self.initial = InitialWeights(self.names, self.queue)
        self.streams = Streams(self.trace) if several_hosts else None
        self.trace.at_end.append(self._write_last)
        self.has_optimizer = False
        self._strategies: set[int] = set()
        self._replicas: set[int] = set()
        self._by_hand: set[int] = set()
        self._assigned: dict[str, dict[int, Any]] = {}
        self._trained: set[int] = set()
        self._reads = VariableReads()
        self._noted: set[str] = set()
        self._finishing, self._finished = threading.Lock(), False

    def point_failed(self, at: str, error: Exception) -> None:
        """Note an error of gpudist's own at a point: the program goes on, and nothing is concluded from what is missing."""
        if isinstance(error, OSError):  # of its files: the supervisor knows what a full disk is
            self.send({"event": "fault", "text": "".join(traceback.format_exception(error))})
        else:
            self.facts.broken[at] = "".join(traceback.format_exception_only(error)).strip()
            self.write_facts()

    def _handle(self, record: Record) -> None:
        """Write what a record says, and, the first time, the function that makes it."""
        if "function" in record.about:
            self.functions.write(record.about["function"])
        self.trace.handle(record)

    def _write_last(self) -> None:
        if self.initial.has_unseen:
            self.note("initial-weights-unseen", "variables are made inside the step; their first values were not seen")
        for variable, function in self.functions.changed_in_graphs():
            self.trace.write({"event": "changed-in-a-graph", "variable": variable, "function": function})
        if self.plan.times_input:
            measure_input_rate(self.epochs.dataset, self.trace.write)

    def _ask_for_steps(self) -> int:
        """Return the last wanted step, which is decided once it is known how long the epoch and a step are."""
        assert self._receive is not None
        assert self.plan.steps is not None
        self.send({"event": "asks", "step": self.plan.steps, "epoch": self.epochs.first.batches})
        steps = int(self._receive())
        self.queue.go_on_to(steps)
        return steps

    def _leaves_order_to_chance(self) -> None:
        """Note that the program is asynchronous."""
        self.facts.asynchronous = True
        self.write_facts()

    def note(self, code: str, text: str) -> None:
        """Tell the user something, through the trace and the supervisor."""
        event = {"event": "note", "code": code, "text": text}
        self.trace.write(event)
        self.send(event)

    def note_once(self, code: str, text: str) -> None:
        """Note a text once for each code."""
        if code not in self._noted:
            self._noted.add(code)
            self.note(code, text)

    def finish(self, reason: str) -> None:
        """Write what is left, once; called when the program has ended by itself."""
        with self._finishing:
            if not self._finished:
                self._finished = True
                self.queue.finish()
                if reason == "returned" and not (self.has_servers or self.trace.has_reached_last):
                    for record in self.initial.now():
                        self.trace.handle(record)
                self.trace.close(reason)
                self.writer.close()

    def exits(self, frames: list[tuple[str, int]] | None = None) -> None:
        """Note the line where the program ends its process: that of these frames, else of the current call."""
        self.lines.note_call("exit", made=None if frames is None else users(frames))

    def seeded(self, generator: str) -> None:
        """Note that the program has seeded one of the global generators itself."""
        if self.streams is not None:
            self.streams.seeded(generator)
        self.trace.write({"event": "seeded", "generator": generator})

    def strategy_seen(self, strategy: Any) -> None:
        """Remember the strategy a step ran under, once."""
        if id(strategy) in self._strategies:
            return
        self._strategies.add(id(strategy))
        local = upstream.num_local_replicas(strategy)
        self.trace.local_replicas = max(self.trace.local_replicas, local)
        replicas = int(strategy.num_replicas_in_sync)
        event = {"event": "strategy", "name": type(strategy).__name__, "replicas": replicas, "local": local}
        event["all_reduce"] = self._all_reduce()
        self.trace.write(event)
        self.send(event)

    def replica_seen(self, replica: int) -> None:
        """Remember that this host has this replica."""
        self._replicas.add(replica)

    @property
    def first_replica(self) -> int:
        """Return the lowest number of this host's replicas, 0 before any ran."""
        return min(self._replicas, default=0)

    def call_ended(self, body: Body, result: Any) -> None:
        """Record what a call of the program's function leaves, whose result this is, at its end."""
        self._record_run(body)
        if body.share is not None:  # the last share of several has made it of its own rows alone
            return
        self._record_state(body)
        if not body.applied or body.graph is not tf.compat.v1.get_default_graph():
            return
        # The numbers that a step of a kept function returns: what the program reports may be one of them.
        flat = [t for t in tf.nest.flatten(result) if tf.is_tensor(t) and t.shape.rank == 0 and is_floating(t)]
        tensors = [(("result", place), tensor) for place, tensor in enumerate(body.reachable(flat))]
        about = {"replica": body.replica}
        if tensors and (kept := self.functions.see("result", about, tensors)):
            self.queue.hand_over("result", about | kept, tensors)

    def _record_run(self, body: Body) -> None:
        if body.applied:
            return
        if body.tape and not self.facts.optimizers:
            self._record_tape_step(body)
            return
        tensors = [*body.inputs, *body.drawn]
        tensors += [(("objective", k), target) for k, target in enumerate(body.reachable(body.objective))]
        if body.inputs and body.is_here():
            about = {"replica": body.replica, "taped": body.taped, "kept_by": body.kept_by}
            self.queue.hand_over("run", about, tensors)

    def _record_state(self, body: Body) -> None:
        """Record what the step has assigned itself, at its end."""
        assigned = self._assigned.setdefault(body.label, {})
        assigned |= body.assigned  # a function inside that is not traced again assigns them all the same
        self._by_hand |= body.by_hand
        self._note_reads(body, assigned)
        # What a layer assigns is recorded with the weights, before the step's own assignments.
        others = self._trained | ({id(upstream.tf_variable(v)) for v in self.untrained(body)} - self._by_hand)
        state = [variable for key, variable in assigned.items() if key not in others]
        own = [variable for variable in state if self._is_left_by(body, variable)]
        self._note_shared(own)
        if own and body.is_here():
            self._hand_over_state(body, own)
        virtual = graph_functions.virtual_replicas()
        if virtual is not None and len(own) < len(state) and body.is_here():
            shared = [variable for variable in state if all(variable is not other for other in own)]
            self._note_shared(shared)
            is_last = tf.equal(virtual[0], virtual[1] - 1)
            tf.cond(is_last, lambda: self._hand_over_state(body, shared), tf.no_op)

    def _hand_over_state(self, body: Body, state: list[Any]) -> Any:
        tensors = [(("variable", self.names.of(variable), False), read_local(variable)) for variable in state]
        about = {"replica": body.replica}
        return self.queue.hand_over("state", about | self.functions.see("state", about, tensors), tensors)

    def assigned_between_steps(self, variable: Any, *, by_program: bool) -> None:
        """Record what the program makes of a variable that a kept function reads, and note others that training changes."""
        self.functions.changes(variable)
        self.lines.note_call("assign", {"trainable": bool(getattr(variable, "trainable", True))})
        is_training = self.facts.optimizers or self.facts.taping
        if by_program and is_training and self.plan.keeps_functions and self.functions.variable(variable) is None:
            name = self.names.of(variable)
            self.facts.add("outside", name)
            self.write_facts()
        if (
            tf.executing_eagerly()
            and (number := self.functions.variable(variable)) is not None
            and not self.trace.has_reached_last
        ):
            self.queue.hand_over("set", {"variable": number}, [(("set",), variable.read_value())])

    def _note_reads(self, body: Body, assigned: Mapping[int, Any]) -> None:
        """Note which assigned variables a step reads."""
        reads = self._reads.see(body, {self.names.of(variable): variable for variable in assigned.values()})
        if reads != self.facts.reads:
            self.facts.reads = reads
            self.write_facts()

    def _note_shared(self, state: list[Any]) -> None:
        """Note which assigned values belong to one variable for several replicas."""
        if self.trace.local_replicas == 1:
            return
        names = [self.names.of(variable) for variable in state if len(upstream.local_copies(variable)) == 1]
        self.facts.add("shared", *names)
        self.write_facts()

    def _is_left_by(self, body: Body, variable: Any) -> bool:
        """Return whether no later replica of this host assigns the variable: the last one leaves a shared variable's value."""
        number = self.trace.local_replicas
        return len(upstream.local_copies(variable)) > 1 or body.replica % number == number - 1

    def _record_tape_step(self, body: Body) -> None:
        """Record a step of a loop without a known optimizer: its tapes' gradients, and the variables afterwards."""
        pairs = [pair for gradients, sources in body.tape for pair in zip(gradients, sources, strict=True)]
        # The step itself does not assign these variables: the next step reads them at its tape.
        reachable = {id(value) for value in body.reachable(list(body.at_tape.values()))}
        assigned = body.assigned | self._assigned.get(body.label, {})
        body.at_tape = {key: value for key, value in body.at_tape.items() if id(value) in reachable and key not in assigned}
        outside = dict.fromkeys(self.names.of(v) for _, v in pairs if id(upstream.tf_variable(v)) in body.at_tape)
        about = {"tape": True, "outside": tuple(outside)}
        # Where there is an optimizer that has not applied yet, these may be the batches that it will take together.
        self.step_made("tape", body, body.replica, pairs, about | ({"free": True} if self.has_optimizer else {}))

    def resume(self, name: str, optimizer: Any) -> None:
        """Count steps from the program's very first start, where its optimizer continues."""
        if self.plan.begun is None or name in self.trace.made_before:
            return
        with tf.init_scope():
            num_steps = upstream.steps_made(optimizer)
        if not self.plan.resumed:
            self.trace.made_before[name] = self.queue.made_before[name] = 0
            self.trace.write({"event": "begun", "optimizer": name, "step": num_steps})
            return
        num_steps = max(0, num_steps - self.plan.begun.get(name, 0))
        self.trace.made_before[name] = self.queue.made_before[name] = num_steps
        self.trace.write({"event": "resumed", "optimizer": name, "step": num_steps})
        self.send({"event": "resumed", "step": num_steps})

    def step_made(
        self,
        optimizer: str,
        body: Body | None,
        replica: int,
        pairs: list[tuple[Any, Any]],
        about: dict[str, Any],
        before: Sequence[tuple[Any, Any]] = (),
    ) -> None:
        """Record a finished step: inputs, local gradients, weights after it; and hold it if it is the last wanted one.

        Args:
            optimizer: Its name.
            body: The call of the program's function in a replica, if the step is made in one.
            replica: Its number.
            pairs: Gradients with their variables.
            about: What is said of the step.
            before: The optimizer's own numbers with their values before the step. Something else may change them in a graph:
                Keras counts one more iteration where a dataset of unknown length ends.
        """
        self.epochs.step_made()
        tensors: list[tuple[tuple[Any, ...], Any]] = []
        fused = body is not None and body.is_here()
        if fused and body is not None:
            tensors += self._taped_tensors(body, pairs)
            tensors += body.inputs
            tensors += [(("objective", k), target) for k, target in enumerate(body.reachable(body.objective))]
            tensors += body.drawn
            body.applied = True
            about = about | {"kept_by": body.kept_by}
            body.objective, body.tape, body.draws = [], [], []
        if fused and body is not None and not body.taped:
            about = about | {"apply_only": True}
            self.facts.add("apply_only", body.label)
        if (body is None and not about.get("reduced")) or (fused and body is not None and not body.inputs):
            about = about | {"rows": "none"}
        tensors += self._gradient_tensors(pairs)
        self._trained |= {id(upstream.tf_variable(variable)) for _, variable in pairs}
        variables = [variable for _, variable in pairs] + self.untrained(body)
        at_tape = body.at_tape if body is not None and about.get("outside") else {}
        for variable in {id(variable): variable for variable in variables}.values():  # tf.Variables compare by value
            key = ("weight", self.names.of(variable), bool(getattr(variable, "trainable", True)))
            value = at_tape.get(id(upstream.tf_variable(variable)))
            tensors.append((key, read_local(variable) if value is None else value))
        self.facts.train_steps = _TRAIN_STEPS in sys.modules
        self.write_facts()
        about = {"optimizer": optimizer, "replica": replica, "shards": shards_of(self.names, variables), **about}
        about |= self.functions.see("step", about, tensors)
        numbered = [(self.functions.variable(upstream.local_copies(variable)[0]), value) for variable, value in before]
        tensors += [(("read", number), value) for number, value in numbered if number is not None and "function" in about]
        operation = self.queue.hand_over("step", about, tensors)
        if not about.get("free"):
            self.queue.gate(optimizer, replica, operation, one_more=bool(about.get("outside")))
        if body is None:
            self.queue.hold_if_reached()

    def _taped_tensors(self, body: Body, pairs: list[tuple[Any, Any]]) -> list[tuple[tuple[Any, ...], Any]]:
        """Return the tapes' gradients if the step has summed them itself before the optimizer gets them."""
        if not body.reduces:
            return []
        body.reduces = False
        taken = body.taken()
        given = [(taken.get(id(upstream.tf_variable(variable))), gradient, variable) for gradient, variable in pairs]
        dense = [(taped, variable) for taped, gradient, variable in given if taped is not gradient and hasattr(taped, "dtype")]
        tensors = [(("taped", self.names.of(variable)), taped) for taped, variable in dense if not hasattr(taped, "indices")]
        reachable = {id(tensor) for tensor in body.reachable([tensor for _, tensor in tensors])}
        return [(key, tensor) for key, tensor in tensors if id(tensor) in reachable]

    def _gradient_tensors(self, pairs: list[tuple[Any, Any]]) -> list[tuple[tuple[Any, ...], Any]]:
        tensors: list[tuple[tuple[Any, ...], Any]] = []
        for gradient, variable in pairs:
            name = self.names.of(variable)
            if isinstance(gradient, tf.IndexedSlices):
                tensors.append((("sparse-gradient", name), gradient.values))
                tensors.append((("sparse-rows", name), gradient.indices))
                tensors.append((("sparse-shape", name), tf.constant(list(variable.shape), tf.int64)))
            elif gradient is not None:
                tensors.append((("gradient", name), gradient))
        return tensors

    def untrained(self, body: Body | None) -> list[Any]:
        """Return floating-point variables of this step's models that no gradient changes."""
        models = list(body.models.values()) if body is not None else []
        variables = [v for model in models for v in getattr(model, "non_trainable_variables", [])]
        return [v for v in variables if is_floating(v) and not is_count_of_each(v)]

    def write_facts(self) -> None:
        """Say what kind of program this is, again whenever more is known."""
        text = repr(self.facts)
        if text != self._facts_written:
            self._facts_written = text
            self.trace.write({"event": "program", **vars(self.facts)})
