"""Make the runs that find a cause: with suspects switched off, on the topology's own examples, with different hosts."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path

from emulate.probe import SAME_ON_ONE_DEVICE, Replay, Trace
from emulate.program import Program, is_ours
from emulate.verify.case import RATE, Rerun
from emulate.verify.causes.cause import error_line
from emulate.verify.compare import compare_enough
from emulate.verify.result import RunResult
from emulate.verify.seeding import GENERATORS
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
            variation = variation if switch in replays or switch.startswith(RATE) else variation.without(switch)
        if variation != base:
            again = trace_of(self._yardsticks.topology(run.topology, replace(variation, replay=None, follow=None)))
            if again is None:
                return None
            topology = again
            if variation.follow is not None:
                variation = replace(variation, follow=replace(variation.follow, trace=topology.directory))
        rows = next((replays[switch] for switch in reversed(asked) if switch in replays), None)
        if rows is not None:
            variation = replace(variation, replay=replace(rows, trace=topology.directory))
        if rate != 1:
            replay = variation.replay or Replay(topology.directory)
            variation = replace(variation, replay=replace(replay, rate=rate))
        traces = self._of_one_device(base, variation, topology) or self._yardsticks.with_noise(variation).traces()
        if traces is None:
            failed = self._yardsticks.reference(variation).reference.result()
            self._failed[failed.label] = _ending(failed, variation.replay)
            return None
        plain = None if variation.follow is None else trace_of(self._yardsticks.reference(variation.source).reference)
        return Rerun(traces[0], topology, traces[1], lambda: self._yardsticks.confirming(variation, topology), plain)

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
        """Return the topology's run with another seed on each host, unless the program seeds all of them itself.

        Of `base` draws may be keyed; with a base as the program stands they are those of real hosts.
        """
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
    told = (
        f", on one device that gets {replay.told} as the number of replicas" if replay is not None and replay.told > 1 else ""
    )
    raised_in = re.findall(r'File "([^"]+)"', failed.failure or "")
    is_own = failed.status == "failed" and bool(raised_in) and not is_ours(raised_in[-1])
    whose = ", where the program itself raises an error" if is_own else ""
    return f"{told}{whose}: {error_line(failed.failure or failed.where, 'no error was seen')}"


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
        "told": Replay(Path(), told=number),
        "batch-of": Replay(Path(), batch_of=number),
        **apart,
        **{f"{name}-regrouped": replace(replay, regrouped=True) for name, replay in apart.items()},
        **{f"{name}-backwards": replace(replay, backwards=True) for name, replay in apart.items()},
        **{f"{name}-numbered": replace(replay, numbered=True) for name, replay in apart.items()},
    }
