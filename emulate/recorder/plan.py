"""Describe one run: what is recorded of it, and how it differs from the program as it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

SYNCHRONIZED = "batchnorm-synchronized"
CENTERED = "batchnorm-centered"
BY_SHARE = "batchnorm-by-share "
"""Begins the switch that normalizes on one device as replicas do, each its own rows."""
IN_32_BITS = "in-32-bits"
TAPES_JOINED = {"sum": "tapes-summed", "mean": "tapes-averaged"}
"""Interventions that reduce the gradients of a tape over all replicas, by the reduction: sum or mean."""
SAME_ON_ONE_DEVICE = frozenset({SYNCHRONIZED, *TAPES_JOINED.values()})
"""Switches that change nothing but rounding where there is one replica."""
MIB = 1 << 20


@dataclass(frozen=True)
class Replay:
    """Describe the examples of another run that this run gets in place of its own.

    Attributes:
        trace: Folder of the trace whose rows are taken.
        shares: 1: one apply on the union of the replicas' rows. More: so many shares of the replicas one after the
            other, the mean of their gradients applied once.
        part: A step gets the first of these shares alone, and applies its gradients.
        summed: The sum of the shares' gradients is applied, not their mean.
        taped: The shares' gradients are joined where tapes make them, not where an optimizer applies them: what the program
            does with gradients by itself (a sum over replicas, clipping, an update) it does once, with all of them.
        regrouped: Each share gets rows of all replicas, as many as its own.
        backwards: The last share comes first.
        by_loss: What is recorded for each share is the gradient of its own loss alone, through all shares that a sum over the
            replicas joins.
        inputs: The step gets all inputs of the other run that are the same on its replicas, not only its examples.
        numbered: A program that asks for the replica's number is told, for each share, that of the share's first replica.
        told: How many replicas the program is told that there are: what it divides by their number it divides here too.
        batch_of: How many replicas the program is told to have a batch of: what it multiplies by their number is as large
            here too, and what it divides is as on one device.
        workers: How many workers the program finds in TF_CONFIG; TensorFlow itself knows better.
        rate: By what the learning rates of the program's optimizers are multiplied.
    """

    trace: Path
    shares: int = 1
    part: bool = False
    summed: bool = False
    taped: bool = False
    regrouped: bool = False
    backwards: bool = False
    by_loss: bool = False
    inputs: bool = False
    numbered: bool = False
    told: int = 1
    batch_of: int = 1
    workers: int = 1
    rate: float = 1.0

    @property
    def is_only_evaluated(self) -> bool:
        """Return whether a program cannot be run so: only its functions can be evaluated."""
        return self.by_loss or self.inputs

    @property
    def is_of_rows(self) -> bool:
        """Return whether nothing but the rows differs: what the program is told and does besides stays as it is."""
        return self.of_all_rows == Replay(self.trace)

    def has_no_log(self, name: str) -> bool:
        """Return whether a report is what Keras logs of a batch, while the shares' results are added up: a mean is not."""
        return self.summed and name.startswith("batch/")

    @property
    def of_all_rows(self) -> Replay:
        """Return the replay whose functions do the steps of this one on other rows."""
        if self.taped or self.numbered or self.part:
            return self
        return replace(self, shares=1, summed=False, regrouped=False, backwards=False, by_loss=False, inputs=False)

    @property
    def of_a_share(self) -> Replay:
        """Return the same with functions that are made for the rows of one share: some take batches of one size alone."""
        return replace(self.of_all_rows, shares=self.shares, part=True)


@dataclass(frozen=True)
class Follow:
    """Describe the gradients of another run that this run's optimizers apply in place of their own.

    Attributes:
        trace: Folder of the trace whose gradients are taken.
        averaged: Optimizers that apply the mean of the replicas' gradients; others their sum.
        each: Whether this run has the same replicas, so that each takes those of its own in the other run.
    """

    trace: Path
    averaged: tuple[str, ...] = ()
    each: bool = False


@dataclass(frozen=True)
class ProbePlan:
    """Describe how one run is recorded, and how it differs from the unchanged program.

    Attributes:
        trace: The trace's folder; each host writes `host-<number>` in it.
        steps: Hold every host at the end of this training step; None records to the program's end.
        asks: Whether the host asks at that step if it shall go on to a later one.
        looks_from: From this step on metrics are read after each batch; `steps` unless given. It is the same in all runs.
        seed: Seeds draws that follow rows.
        budget: Bytes of arrays each host may keep in full.
        permute: Permute the rows of every batch.
        noise_seed: Which permutation and perturbation, so that several runs differ.
        perturb: Change gradients by up to this many units in the last place, 0 for none.
        summands: Folder of a trace with several replicas: gradients are perturbed by units of its local gradients too.
        perturb_summands: By up to so many units of those.
        short: The program computes its gradients in 16 bits: they are perturbed by units of the tensor's scale too.
        own_draws: Leave random draws as the program makes them; else they are a function of seed, place and row, not of replica
            and position.
        drawn: Of each draw in a function that gets no rows how many the reference makes: of replicas that make as many
            together each makes its part of them.
        switches: Suspects switched off.
        replay: Rows to take from another run.
        follow: Gradients to apply that are another run's; its own are recorded.
        host_variation: In what hosts differ as real ones do: `seeds` (each has another number, as where nobody seeds them),
            `hashes` (each hashes strings in its own way) or `listing` (those after the first list folders in another order, as
            with other disks). Empty for nothing.
        initial: Folder of a trace whose initial weights are taken.
        apply_only: Functions that only apply gradients they are given: what enters them is no batch.
        taping: Functions that take gradients, where any do: what enters others is evaluated, and stays as it is in a replay.
        keeps_functions: Keep the functions of the steps, so that they can be evaluated without the program.
        halves: Each step gets the first half of its batch: which shapes depend on the batch shows in its graph.
        times_input: Time the dataset that trains at the end of the run.
        leads: Keep of large gradients their sum over the replicas, so that another run can go on from this one's weights.
        keeps_xla: A function with `jit_compile=True` runs under XLA, and is recorded by what leaves it.
        compiled: What `Strategy.run` calls in eager code is compiled, so that its steps are functions that can be kept.
        functions: What the program calls as a `tf.function` on one device is what `Strategy.run` calls elsewhere.
        resumed: The program is started again after an interruption: what its optimizers say that they have made counts.
        begun: Of a program that may be started again how many steps each optimizer had made before its very first start; None
            where nobody asks.
    """

    trace: Path
    steps: int | None = 20
    asks: bool = False
    looks_from: int | None = None
    seed: int = 0
    budget: int = 256 * MIB
    permute: bool = False
    perturb: float = 0.0
    noise_seed: int = 0
    summands: Path | None = None
    perturb_summands: float = 0.0
    short: bool = False
    own_draws: bool = False
    drawn: Mapping[str, int] = field(default_factory=dict)
    switches: frozenset[str] = field(default_factory=frozenset)
    replay: Replay | None = None
    follow: Follow | None = None
    host_variation: str = ""
    initial: Path | None = None
    apply_only: tuple[str, ...] = ()
    taping: tuple[str, ...] = ()
    compiled: bool = False
    functions: bool = False
    keeps_functions: bool = False
    halves: bool = False
    times_input: bool = False
    leads: bool = False
    keeps_xla: bool = False
    resumed: bool = False
    begun: Mapping[str, int] | None = None

    @property
    def is_untouched(self) -> bool:
        """Return whether the program gets its own examples and gradients, so that its lines are worth recording."""
        return not (self.replay or self.follow or self.switches or self.permute or self.halves or self.perturb or self.initial)

    @property
    def is_by_share(self) -> bool:
        """Return whether one device normalizes each replica's rows by themselves."""
        return any(switch.startswith(BY_SHARE) for switch in self.switches)
