"""Make the runs that find a cause: with suspects switched off, on the topology's own examples, with different hosts."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path

from emulate.interventions import by_share, rows_of_shares
from emulate.program import Program, is_ours
from emulate.recorder import SAME_ON_ONE_DEVICE, Replay
from emulate.topology import Topology
from emulate.trace import Facts, Trace
from emulate.verify.case import BY_LOSS, BY_SHARE, RATE
from emulate.verify.causes.cause import error_line
from emulate.verify.compare import compare_enough
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import aligned, norm, weight_of
from emulate.verify.host import GENERATORS
from emulate.verify.lines import ProgramLines
from emulate.verify.noise import FACTOR
from emulate.verify.repeats import Rerun
from emulate.verify.result import RunResult
from emulate.verify.yardstick import Traces, Variation, Yardsticks, trace_of


class Reruns:
    """Make re-runs.

    Args:
        yardsticks: Makes and keeps the runs of a verification.
        program: Whose files are read.
    """

    def __init__(self, yardsticks: Yardsticks, program: Program) -> None:
        self._yardsticks = yardsticks
        self._program = program
        self._failed: dict[str, str] = {}

    def take_first_failure(self) -> str | None:
        """Return the first failed run's name with its error, and forget all failures."""
        failed = next((f"'{label}'{ending}" for label, ending in self._failed.items()), None)
        self._failed.clear()
        return failed

    def make(self, asked: Sequence[str], run: RunResult, compared: Trace, base: Variation) -> Rerun | None:
        """Run both sides again with suspects switched off, the reference on the topology's rows: all, or each replica's."""
        if run.status != "ok":
            return None
        replays = _replays(len(compared.replicas))
        variation, topology = base, compared
        rate = next((float(switch.removeprefix(RATE)) for switch in reversed(asked) if switch.startswith(RATE)), 1.0)
        for switch in asked:
            is_of_reference = switch in replays or switch == BY_SHARE or switch.startswith(RATE)
            variation = variation if is_of_reference else variation.without(switch)
        if variation != base:
            again = trace_of(self._yardsticks.topology(run.topology, replace(variation, replay=None, follow=None)))
            if again is None:
                return None
            topology = again
            if variation.follow is not None:
                variation = replace(variation, follow=replace(variation.follow, trace=topology.directory))
        if BY_SHARE in asked:
            splits = _splits(topology)
            if not all(splits[0]):
                return None  # of a replica without rows nothing can be normalized
            variation = variation.without(by_share(*splits))
        rows = next((replays[switch] for switch in reversed(asked) if switch in replays), None)
        if rows is not None:
            variation = replace(variation, replay=replace(rows, trace=topology.directory))
        if rate != 1:
            replay = variation.replay or Replay(topology.directory)
            variation = replace(variation, replay=replace(replay, rate=rate))
        traces = self._of_one_device(base, variation, topology) or self._yardsticks.with_noise(variation).traces()
        if traces is None:
            failed = self._yardsticks.reference(variation).reference.result()
            if variation.replay is None or not variation.replay.is_only_evaluated:
                self._failed[failed.label] = _ending(failed, variation.replay)
            return None
        plain = None if variation.follow is None else trace_of(self._yardsticks.reference(variation.source).reference)
        return Rerun(
            *(traces[0], topology, traces[1]),
            confirm=lambda: self._yardsticks.confirming(variation, topology),
            source=plain,
            reported=lambda: self._yardsticks.of_the_program(variation),
        )

    def foresee_batchnorm(self, reference: RunResult, topology: Topology) -> None:
        """Start the reference that normalizes as replicas do, which is asked for in any case, while the topology still runs.

        Args:
            reference: The program as it stands.
            topology: Whose replicas share each batch evenly. Where the program asks for their number, its batch may grow.
        """
        assert reference.trace is not None
        facts, rows = Facts.of(reference.trace), sum(_splits(reference.trace)[0])
        replicas = topology.num_replicas
        is_open = facts.bfloat16 or facts.float16 or ProgramLines(reference.trace).made("num_replicas")
        if facts.batchnorm and replicas > 1 and rows and rows % replicas == 0 and not is_open:
            self._yardsticks.reference(Variation().without(by_share([rows // replicas] * replicas)))

    def led_by_share(self, led: Variation, reference: Trace, topology: Trace) -> Variation | None:
        """Return the reference that normalizes as replicas do, where that alone explains the first step's statistics.

        Args:
            led: What makes the reference's steps at the topology's weights.
            reference: The program on one device as it normalizes there.
            topology: The topology's run.

        Returns:
            The variation; None where BatchNormalization makes no difference, or another one.
        """
        names, splits = Facts.of(reference, topology).batchnorm, _splits(topology)
        if not names or len(splits[0]) < 2 or not all(splits[0]) or led.replay is not None:
            return None
        variation = led.without(by_share(*splits))
        by_shares = trace_of(self._yardsticks.reference(variation).reference) if self._yardsticks.led(variation) else None
        if by_shares is None:
            return None
        apart, left = (_statistics_apart(trace, topology, names) for trace in (reference, by_shares))
        return variation if apart > FACTOR * left else None

    def _of_one_device(self, base: Variation, variation: Variation, topology: Trace) -> Traces | None:
        """Return the runs on one device that are there already, where the switches change nothing there but rounding.

        Args:
            base: What was run.
            variation: What is asked for.
            topology: The topology's run in it.

        Returns:
            The reference and its noise if the topology agrees with them; else the reference is to be run in the variation too.
        """
        if base.follow is not None:
            return None  # each step is judged at the state that this run has
        if replace(variation, switches=base.switches) != base or not variation.switches - base.switches <= SAME_ON_ONE_DEVICE:
            return None
        traces = self._yardsticks.with_noise(base).traces()
        agrees = traces is not None and compare_enough(traces[0], topology, traces[1]).is_equivalent
        return traces if agrees else None

    def with_own_seeds(self, run: RunResult, base: Variation) -> RunResult | None:
        """Return the topology's run with another seed on each host, unless the program seeds all of them itself."""
        if run.status != "ok" or run.trace is None or run.topology.num_stepping_hosts == 1:
            return None
        seeded = {(host, event["generator"]) for host, event in run.trace.of("seeded")}
        if seeded >= set(product(range(run.topology.num_hosts), GENERATORS)):
            return None
        return self._yardsticks.topology(run.topology, replace(base, replay=None, follow=None, own_seeds=True)).result()

    def with_own_hashes(self, run: RunResult, base: Variation) -> RunResult | None:
        """Return the topology's run with another hash seed on each host, unless the environment sets one."""
        if run.status != "ok" or run.topology.num_stepping_hosts == 1 or not self.hash_places:
            return None
        if os.environ.get("PYTHONHASHSEED", "random") != "random":
            return None
        return self._yardsticks.topology(run.topology, replace(base, replay=None, follow=None, own_hashes=True)).result()

    def with_own_listing(self, run: RunResult, base: Variation) -> RunResult | None:
        """Return the topology's run with another listing order of folders on later hosts."""
        if run.status != "ok" or run.topology.num_stepping_hosts == 1 or not self.listing_places:
            return None
        return self._yardsticks.topology(run.topology, replace(base, replay=None, follow=None, own_listing=True)).result()

    @cached_property
    def hash_places(self) -> list[str]:
        """Return where the program's own files depend on string hashes."""
        return self._program.hash_places()

    @cached_property
    def listing_places(self) -> list[str]:
        """Return where they list folders."""
        return self._program.listing_places()


def _ending(failed: RunResult, replay: Replay | None) -> str:
    """Return the text about a failed re-run: whose error it is, and what may have led to it."""
    where = (
        f", on one device that gets {replay.told} as the number of replicas" if replay is not None and replay.told > 1 else ""
    )
    raised_in = re.findall(r'File "([^"]+)"', failed.failure or "")
    is_own = failed.status == "failed" and bool(raised_in) and not is_ours(raised_in[-1])
    whose = ", where the program itself raises an error" if is_own else ""
    return f"{where}{whose}: {error_line(failed.failure or failed.where, 'no error was seen')}"


def _statistics_apart(reference: Trace, topology: Trace, names: Collection[str]) -> float:
    """Return by how much most statistics of BatchNormalization differ after the first step, in parts of themselves.

    Some are means that cancel, and rounding alone.
    """
    off = [0.0]
    for optimizer in reference.optimizers:
        pair = [complete(trace, optimizer)[:1] for trace in (reference, topology)]
        for name in names if all(pair) else ():
            stored = [weight_of(steps[0], name) for steps in pair]
            if None not in stored:
                expected, other = aligned([array for array in stored if array is not None])
                off.append(norm(expected - other) / (norm(expected) or 1.0))
    return statistics.median(off)


def _splits(trace: Trace) -> list[list[int]]:
    """Return how many rows each replica has in the first step, of the optimizer with most; then in batches split otherwise."""
    steps = [[[len(step[r].rows or ()) for r in sorted(step)] for step in complete(trace, name)] for name in trace.optimizers]
    counts = max(steps, key=lambda counts: sum(counts[0]) if counts else 0, default=[]) or [[0]]
    others = {tuple(split) for split in counts if all(split) and split != rows_of_shares(sum(split), counts[:1])}
    return [counts[0], *map(list, sorted(others))]


def _replays(number: int) -> dict[str, Replay]:
    """Return the topology's examples for a reference, by the name that a cause asks for: all at once, or by replica."""
    apart = {
        "replicas": Replay(Path(), number),
        "replicas-summed": Replay(Path(), number, summed=True, told=number),
        "replicas-taped": Replay(Path(), number, summed=True, taped=True),
        "replicas-taped-told": Replay(Path(), number, summed=True, taped=True, told=number),
        "replicas-taped-mean": Replay(Path(), number, taped=True),
    }
    return {
        "replay": Replay(Path()),
        "inputs": Replay(Path(), inputs=True),
        "told": Replay(Path(), told=number),
        "batch-of": Replay(Path(), batch_of=number),
        BY_LOSS: Replay(Path(), number, summed=True, by_loss=True, told=number),
        **apart,
        **{f"{name}-regrouped": replace(replay, regrouped=True) for name, replay in apart.items()},
        **{f"{name}-backwards": replace(replay, backwards=True) for name, replay in apart.items()},
        **{f"{name}-numbered": replace(replay, numbered=True) for name, replay in apart.items()},
    }
