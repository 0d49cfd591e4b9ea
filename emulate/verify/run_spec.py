"""Describe runs by frozen values: where a program runs, how it differs from the unchanged program, and how it is disturbed.

Nothing here starts a run. `switched_on_both_sides` and `switched_on_one_device` turn what a cause asks for into a variation.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from emulate.errors import UsageError
from emulate.interventions import by_share, rows_of_shares, splits_of
from emulate.recorder import SAME_ON_ONE_DEVICE, Follow, ProbePlan, Replay
from emulate.topology import REFERENCE, Topology
from emulate.trace import Trace
from emulate.verify.compared_runs import complete

RATE = "rate-times-"
"""Before a number: what is asked for is the reference with so many times the learning rate."""
BY_SHARE = "batchnorm-by-share"
"""The reference normalizes each replica's rows by themselves."""
BY_LOSS = "by-loss"
"""The gradients of each replica's loss alone, which pass through all replicas, on one device."""


@dataclass(frozen=True)
class Variation:
    """Describe how a run differs from the unchanged program, in fields of `ProbePlan`.

    Attributes:
        own_draws: Random draws are the program's own; else they are a function of seed, place and row.
        switches: Suspects switched off.
        replay: The rows come from another run.
        follow: The gradients that are applied come from another run.
        host_variation: In what hosts differ: `seeds`, `hashes` or `listing`; empty for nothing.
    """

    own_draws: bool = False
    switches: frozenset[str] = frozenset()
    replay: Replay | None = None
    follow: Follow | None = None
    host_variation: str = ""

    def plan(self, seed: int) -> ProbePlan:
        """Return the probe's plan for it; the runner sets the place of its trace."""
        led_by = self.replay or self.follow
        return ProbePlan(trace=Path(), seed=seed, initial=None if led_by is None else led_by.trace, **vars(self))

    @property
    def source(self) -> Variation:
        """Return the variation whose functions do the steps of this one, on other rows and with other gradients."""
        replay = None if self.replay is None or self.replay.is_of_rows else self.replay.of_all_rows
        own = replace(self, follow=None, replay=replay)
        return own if self.follow is None else replace(own, switches=self.switches - SAME_ON_ONE_DEVICE)

    @property
    def as_it_normalizes(self) -> Variation:
        """Return the variation with the BatchNormalization of one device."""
        return replace(self, switches=frozenset(switch for switch in self.switches if not splits_of([switch])))

    def label(self, name: str) -> str:
        """Return the name of a run of this variation."""
        parts = [name, *(["own draws"] if self.own_draws else []), *sorted(self.switches)]
        parts += [f"own {self.host_variation}"] if self.host_variation else []
        if self.replay is not None:
            what = "rows" if self.replay.shares == 1 else "sums of shares" if self.replay.summed else "shares"
            what = "losses of shares" if self.replay.by_loss else "inputs" if self.replay.inputs else what
            what = f"first of {self.replay.shares} shares" if self.replay.part else what
            what += " at tapes" if self.replay.taped else ""
            regrouped = " regrouped" if self.replay.regrouped else " backwards" if self.replay.backwards else ""
            count = " numbered" if self.replay.numbered else ""
            count += f" told {self.replay.told}" if self.replay.told > 1 else ""
            batch = f" a batch of {self.replay.batch_of}" if self.replay.batch_of > 1 else ""
            batch += f" and {self.replay.workers} workers" if self.replay.workers > 1 else ""
            rate = f" {self.replay.rate:.4g} times the learning rate" if self.replay.rate != 1 else ""
            parts.append(f"{what} of {self.replay.trace.name}{regrouped}{count}{batch}{rate}")
        parts += [] if self.follow is None else [f"gradients of {self.follow.trace.name}"]
        return " ".join(parts)

    def without(self, switch: str) -> Variation:
        """Return the variation with one more suspect switched off."""
        return replace(self, switches=self.switches | {switch})


AS_IT_STANDS, OWN_DRAWS = Variation(), Variation(own_draws=True)


@dataclass(frozen=True)
class Noise:
    """Describe how a run on one device is disturbed, to show what rounding alone does.

    Attributes:
        number: Which of several; it seeds permutation and rounding.
        ulps: By how many units in the last place gradients are off.
        permutes: Whether the rows of each batch come in another order.
        summands: The folder of a run whose local gradients say what cancels; gradients are rounded as these are.
        tells_order: Whether it tells what rounding makes of a training whose order of rows may matter.
    """

    number: int
    ulps: float = 1.0
    permutes: bool = True
    summands: Path | None = None
    tells_order: bool = False


@dataclass(frozen=True)
class Arm:
    """Describe what the second arm of a program is given in place of the first one's.

    Attributes:
        text: As the user wrote it.
        args: The program's arguments.
        environment: Variables of the environment, on top of the first arm's.
    """

    text: str
    args: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str, args: Sequence[str]) -> Arm:
        """Return the arm that `--against` describes.

        Args:
            text: Words: NAME=value with an upper-case NAME is environment, all others are arguments.
            args: The first arm's arguments, which stay where the text has none.

        Returns:
            The arm.

        Raises:
            UsageError: If the text has no words, a quote is open, or gpudist itself sets a variable.
        """
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--against must be words of a shell. Received: --against {text!r} ({error}).") from None
        pairs = dict(word.split("=", 1) for word in words if _VARIABLE.match(word))
        own = tuple(word for word in words if not _VARIABLE.match(word))
        if not words or (not pairs and own == tuple(args)):
            raise UsageError(
                "--against must say in what the second arm differs. "
                f"Received: --against {text!r} with the arguments {' '.join(args)!r}. "
                "Give it other arguments, or NAME=value for its environment."
            )
        if taken := [name for name in pairs if name in _OWN_VARIABLES]:
            raise UsageError(
                f"--against must leave the variables that gpudist sets. Received: {taken[0]}={pairs[taken[0]]}. Leave it out."
            )
        return cls(text, own or tuple(args), tuple(sorted(pairs.items())))


_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=")
_OWN_VARIABLES = ("TF_CONFIG", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TMPDIR", "PYTHONHASHSEED", "KERAS_BACKEND")


@dataclass(frozen=True)
class RunSpec:
    """Describe one run; equal descriptions are the same run, made once.

    Attributes:
        topology: Where it runs; None for one device, as the reference.
        variation: How it differs from the unchanged program.
        noise: How it is disturbed, if it is.
        how: In what other way it is made: `again`, `compiled`, `by its functions`, `with drawn rows`, or `of the program`:
            started although its functions could be evaluated.
        arm: What the program is given in place of its arguments and environment; None for its own.
    """

    topology: Topology | None = None
    variation: Variation = AS_IT_STANDS
    noise: Noise | None = None
    how: str = ""
    arm: Arm | None = None

    @property
    def starts_the_program(self) -> bool:
        """Return whether it is a run of the program, and not of functions that another run has kept."""
        is_evaluated = self.noise is not None or self.variation.source != self.variation
        return self.topology is not None or self.how != "" or not is_evaluated

    def label(self, place: Topology = REFERENCE) -> str:
        """Return its name; `place` is where the reference runs."""
        if self.topology is not None:
            more = [f"noise {self.noise.number}"] if self.noise is not None else ["second arm"] if self.arm is not None else []
            return self.variation.label(" ".join(filter(None, [str(self.topology), self.how, *more])))
        if self.noise is None:
            name = "program" if self.how == "of the program" else f"reference {self.how}".rstrip()
        else:
            name = f"noise {self.noise.number}{'' if self.noise.permutes else ' in order'}"
            name += f" of {self.noise.ulps:.0f} units" if self.noise.tells_order else ""
            name += f" for {self.noise.summands.name}" if self.noise.summands is not None else ""
        return self.variation.label(name if place == REFERENCE else f"{name} on {place}")


def switched_on_both_sides(base: Variation, asked: Sequence[str]) -> Variation:
    """Return a variation without the suspects that are switched off in the topology's run, too."""
    of_both = [switch for switch in asked if not (switch in _replays(1) or switch == BY_SHARE or switch.startswith(RATE))]
    return replace(base, switches=base.switches | {*of_both})


def switched_on_one_device(variation: Variation, asked: Sequence[str], topology: Trace) -> Variation | None:
    """Return the reference's variation for what is asked for there alone: another run's rows, statistics of shares, a rate.

    Args:
        variation: With what both sides have.
        asked: All that is asked for; of several replays the last counts, and so of several rates.
        topology: The topology's run beside which it is.

    Returns:
        The variation; None where a replica without rows would have to be normalized.
    """
    if BY_SHARE in asked:
        splits = rows_of_replicas(topology)
        if not all(splits[0]):
            return None
        variation = variation.without(by_share(*splits))
    replays = _replays(len(topology.replicas))
    rows = next((replays[switch] for switch in reversed(asked) if switch in replays), None)
    if rows is not None:
        variation = replace(variation, replay=replace(rows, trace=topology.directory))
    rate = next((float(switch.removeprefix(RATE)) for switch in reversed(asked) if switch.startswith(RATE)), 1.0)
    if rate != 1:
        variation = replace(variation, replay=replace(variation.replay or Replay(topology.directory), rate=rate))
    return variation


def rows_of_replicas(trace: Trace) -> list[list[int]]:
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
