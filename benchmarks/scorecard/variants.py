"""Jobs that ask what a verdict hangs on: the seed, the precision, and how small an error is."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.scorecard.cells import Job
from benchmarks.scorecard.corpus import Answer, Entry, read
from fixtures.corpus.index import FOLDER

SAMPLE = (
    "right_mlp_loop",
    "right_uneven_sum",
    "right_vae",
    "wrong_mean_eager_adam",
    "wrong_tokens_per_replica",
    "wrong_clipnorm_fit",
)
SEEDS = (1, 2, 3, 4)
NOISE = 1.2e-7
"""Of the gradient of fixtures/corpus/sensitivity.py, as sensitivity.py measures it."""
PLACES = ("element", "example", "replica", "step")
SIZES = {3: "equivalent", 40: "divergent"}
"""Errors in units of the noise, and their verdicts: on both sides of the threshold, which is 10."""


def variants() -> list[Job]:
    """Return the sample with other seeds and in float64; seed 0 in float32 is the corpus itself."""
    options = {**{f"seed {number}": ("--seed", str(number)) for number in SEEDS}, "float64": ("--precision", "float64")}
    programs = [entry for name in SAMPLE for entry in read(FOLDER / f"{name}.py")]
    entries = [replace(entry, group="variant", topologies=entry.topologies[:1]) for entry in programs]
    return [Job(entry, given, name) for entry in entries for name, given in options.items()]


def planted() -> list[Job]:
    """Return programs with an error that is a little smaller, or larger, than what gpudist reports."""
    entries = [
        Entry(
            f"an error in one {place}",
            FOLDER / "sensitivity.py",
            ("1x4",),
            Answer((verdict,)),
            (place, repr(times * NOISE)),
            group="sensitivity",
        )
        for place in PLACES
        for times, verdict in SIZES.items()
    ]
    return [Job(entry, (), f"{float(entry.args[1]) / NOISE:.0f} times the noise") for entry in entries]
