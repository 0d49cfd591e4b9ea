"""Hook into gpudist_core: record the losses of its steps, and exclude some of its random draws."""

from __future__ import annotations

import sys
from typing import Any

from emulate.instrument import draws, reports
from emulate.point import around, when_imported
from emulate.recorder import Recorder

STEPS = "gpudist_core.steps.train"
COORDINATED = "gpudist_core.parameter_servers.training"
FIT = "gpudist_core.keras_model.callbacks"
RANDOMNESS = "gpudist_core.upstream.randomness"


def install(recorder: Recorder) -> None:
    """See to it once a program imports them; a program that does not is not touched."""
    when_imported(STEPS, lambda: _see_losses(recorder))
    when_imported(COORDINATED, lambda: _see_coordinated(recorder))
    when_imported(FIT, lambda: reports.see_epochs_so_far(recorder, sys.modules[FIT].Callbacks))
    when_imported(RANDOMNESS, lambda: _see_draws(recorder))


def _see_losses(recorder: Recorder) -> None:
    cls = sys.modules[STEPS].TrainStep

    @around(cls, "several")
    def several(original: Any, self: Any, batches: Any) -> Any:
        losses = original(self, batches)
        for i in range(int(losses.shape[0])):
            reports.report_tensor(recorder, losses[i], "loss", "step/loss")
        return losses


def _see_coordinated(recorder: Recorder) -> None:
    """Record the losses of a training with parameter servers, and whether the order of its updates varies."""
    cls = sys.modules[COORDINATED].CoordinatedTraining

    @around(cls, "train")
    def seen_train(train: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.schedule == "asynchronous":
            recorder.coordinated.leave_order_to_chance()
        return train(self, *args, **kwargs)

    @around(cls, "_take")
    def seen_take(take: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = take(self, *args, **kwargs)
        recorder.trace.report("loss", "step/loss", loss)
        return loss


def _see_draws(recorder: Recorder) -> None:
    """Keep draws by the example's index from being replaced: they would move when examples are permuted."""
    randomness: Any = sys.modules[RANDOMNESS]
    randomness.rows_are_keyed = not recorder.plan.own_draws
    recorder.facts.own_draws = True
    randomness.unwatched = draws.unwatched
