"""Record every training step of a program: put the instruments in place in a host, before the program starts."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from emulate import point, upstream
from emulate.instrument import (
    assignments,
    constants,
    coordinator,
    datasets,
    draws,
    gpudist_core_hooks,
    lines,
    operations,
    optimizers,
    progress,
    reports,
    runs,
)
from emulate.interventions import Interventions, assign_initial, enlarge_rates, see_numbers, switch_layers, tell_numbers
from emulate.recorder import Recorder, unseen


def install(recorder: Recorder) -> None:
    """Wrap TensorFlow and Keras, now or as soon as they are imported, so that a run of a program is recorded.

    Args:
        recorder: Gets what the program shows, and knows the run's plan. Its `finish` is to be called at the program's end.
    """
    plan = recorder.plan
    interventions = Interventions(plan, recorder.names)
    if plan.initial is not None:
        recorder.initial.replace = functools.partial(_begin_with, recorder, interventions, plan.initial)
    if plan.is_untouched:
        point.listen(recorder.point_failed)
    point.when_imported("tensorflow", lambda: _install_tensorflow(recorder, interventions))
    gpudist_core_hooks.install(recorder)
    if recorder.streams is not None:
        point.when_imported("numpy", functools.partial(draws.see_generators, recorder.streams))
    for name, package in upstream.KERAS_PACKAGES.items():
        point.when_imported(name, functools.partial(_install_keras, recorder, interventions, package))


def _begin_with(
    recorder: Recorder, interventions: Interventions, initial: Path, copies: list[tuple[Any, Any]], replica: int
) -> None:
    with unseen():
        assign_initial(initial, recorder.names, copies, replica, interventions.first_value)


def _install_tensorflow(recorder: Recorder, interventions: Interventions) -> None:
    # Where two instruments wrap one point, the later one is called first.
    if recorder.plan.replay is not None:
        tell_numbers(recorder.plan.replay)
    lines.install(recorder)
    see_numbers(functools.partial(_number_asked, recorder))
    runs.install(recorder, interventions)
    optimizers.install_tapes(recorder, interventions)
    assignments.install(recorder)
    draws.install(recorder)
    datasets.install(recorder.epochs)
    constants.install(recorder)
    operations.install(recorder)
    reports.install_reduce(recorder)
    reports.install_local_results(recorder)
    optimizers.install(recorder, interventions, "tensorflow")
    if recorder.has_servers:
        coordinator.install(recorder)
    if recorder.several_hosts:
        trace = recorder.trace
        progress.install(recorder.send, lambda: trace.num_steps, trace.write)


def _number_asked(recorder: Recorder) -> None:
    recorder.facts.numbered = True
    recorder.lines.note_call("replica number")


def _install_keras(recorder: Recorder, interventions: Interventions, package: str) -> None:
    plan = recorder.plan
    lines.install_keras(recorder, package)
    optimizers.install(recorder, interventions, package)
    if plan.replay is not None and plan.replay.rate != 1 and package == upstream.KERAS_3:
        enlarge_rates(plan.replay.rate)
    reports.install_keras(recorder, package)
    datasets.install_keras(recorder.epochs, package)
    if package == upstream.KERAS_3:
        operations.scale_exactly(recorder)
    switch_layers(package, plan.switches)
