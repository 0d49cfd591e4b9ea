"""What a program does without gpudist is seen without anything that gpudist sets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emulate.cluster import ClusterPlan
from emulate.program import Program
from emulate.progress import Silent
from emulate.recorder import ProbePlan
from emulate.topology import Topology
from emulate.verify.host import COMPARABLE_ON_GPUS, RecordedProgram
from emulate.verify.processes import Parents
from emulate.verify.runner import Runner
from emulate.verify.settings import Settings


class Launched(Exception):
    """Carries the plan of what was to be launched."""

    def __init__(self, plan: ClusterPlan) -> None:
        self.plan = plan


def launch(plan: ClusterPlan) -> Any:
    raise Launched(plan)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_without_gpudist_a_program_has_its_own_environment_and_no_seed(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(Program("train.py", "script"), device=device)
    preload: Any = SimpleNamespace(launch=launch, directory=tmp_path, imports=True)
    with Runner(settings, tmp_path, Silent(), preload=preload) as runner:
        monkeypatch.setattr(Parents, "bare", preload)
        with pytest.raises(Launched) as plain:
            runner.start_plain(1).result()
        with pytest.raises(Launched) as compared:
            runner.start("1x2", Topology(1, 2), ProbePlan(tmp_path)).result()
    entry = plain.value.plan.entry
    assert isinstance(entry, RecordedProgram)
    assert (plain.value.plan.emulated, plain.value.plan.environment) == (False, {})
    assert (entry.seed, entry.device) == (None, "cpu")  # on a GPU TF32 would be switched off
    assert compared.value.plan.environment == (COMPARABLE_ON_GPUS if device == "gpu" else {})
