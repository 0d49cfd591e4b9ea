"""Verdicts made by hand, as a verification would make them."""

from dataclasses import replace

import pytest

from emulate.told import told
from emulate.verify.verdict import Difference, Finding, Reference, Run, Samples, Verdict

LOSS_SCALING = Finding(
    "loss-scaling",
    "The local gradients are summed over 4 replicas, but each is already a mean over its own rows.",
    "The summed gradients are 4.0000 times the reference's on 6 of 6 tensors in steps 0 to 19.",
    "Divide by the size of the global batch:\n    loss = tf.nn.compute_average_loss(per_example, global_batch_size=48)",
)
BATCHNORM = Finding(
    "batchnorm-local-statistics",
    "BatchNormalization computes its statistics on each replica alone.",
    "Only tensors behind batch_normalization differ.",
    "Use BatchNormalization(synchronized=True).",
    by_design=True,
)
WORST = Difference("dense/kernel", "gradient", 3, 1.2e-7, 0.9e-7)
FIRST = Difference(
    "dense/kernel", "gradient", 0, 0.375, 1e-7, optimizer="adam", value=0.5, reference_value=0.125, replica=None, host=None
)


def with_codes(changes):
    return {
        name: tuple(map(told("any"), value)) if name in ("notes", "not_compared") else value for name, value in changes.items()
    }


class Made:
    """Makes runs and verdicts."""

    loss_scaling, batchnorm, worst, first = LOSS_SCALING, BATCHNORM, WORST, FIRST

    def equivalent(self, topology="1x4", **changes):
        run = Run(topology, "equivalent", replicas=4, steps=20, samples=Samples(960, 960), worst=WORST, seconds=8.1)
        return replace(run, **with_codes(changes))

    def divergent(self, topology="1x4", *, causes=(LOSS_SCALING,), first=FIRST, verdict="divergent", **changes):
        return self.equivalent(topology, verdict=verdict, causes=tuple(causes), first_divergence=first, **changes)

    def verdict(self, *runs, reference=Reference("ok", 20), **changes):  # noqa: B008
        versions = {"gpudist": "0.1.0", "tensorflow": "2.21.0", "keras": "3.15.1"}
        return replace(Verdict("train.py", 0, "cpu", versions, reference, tuple(runs)), **with_codes(changes))


@pytest.fixture
def made():
    return Made()
