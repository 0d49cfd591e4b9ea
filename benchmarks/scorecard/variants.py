"""Jobs that ask whether a verdict hangs on the seed or the precision: a sample of the corpus, once more with others."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.scorecard.cells import Job
from benchmarks.scorecard.corpus import FOLDER, read

SAMPLE = (
    "right_mlp_loop",
    "right_uneven_sum",
    "right_vae",
    "wrong_mean_eager_adam",
    "wrong_tokens_per_replica",
    "wrong_clipnorm_fit",
)
SEEDS = (1, 2, 3, 4)


def variants() -> list[Job]:
    """Return the sample with other seeds and in float64; seed 0 in float32 is the corpus itself."""
    options = {**{f"seed {number}": ("--seed", str(number)) for number in SEEDS}, "float64": ("--precision", "float64")}
    programs = [entry for name in SAMPLE for entry in read(FOLDER / f"{name}.py")]
    entries = [replace(entry, group="variant", topologies=entry.topologies[:1]) for entry in programs]
    return [Job(entry, given, name) for entry in entries for name, given in options.items()]
