"""`gpudist verify --fault`: does the program recover, and is its result still the same?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import emulate
import emulate.errors
from emulate.cluster import Preload
from emulate.report import render
from emulate.verify import Verdict

RECOVERIES = Path(__file__).parents[2] / "fixtures" / "recoveries"


def verify(name: str, preload: Preload, *faults: str, **options: object) -> Verdict:
    return emulate.verify(RECOVERIES / name, "2x1", faults=faults, preload=preload, **options)  # type: ignore[arg-type]


def test_a_program_that_recovers_is_equivalent_and_says_from_which_step_it_went_on(preload: Preload) -> None:
    verdict = verify("checkpoints.py", preload, "kill:host=1,step=8,phase=all-reduce")
    [run] = verdict.runs
    assert run.verdict == "equivalent", render(verdict)
    [fault] = run.faults
    assert (fault.fired, fault.recovered, fault.restarts, fault.result) == (True, True, 1, "identical")
    assert (fault.host, fault.step, fault.went_on_from) == (1, 8, (6,))
    assert "recovered after 1 restart, resumed after 6 steps, the same result bit for bit" in " ".join(render(verdict).split())
    assert verdict.to_json()["runs"][0]["faults"][0]["result"] == "identical"


@pytest.mark.slow  # emulate/verify/test_recovery.py has the finding, on made traces
def test_a_program_that_loses_its_optimizer_recovers_differently(preload: Preload) -> None:
    [run] = verify("loses_the_optimizer.py", preload, "kill:host=1,step=8").runs
    assert (run.verdict, [cause.code for cause in run.causes]) == ("divergent", ["recovered-differently"])
    assert "it differs from step 6 (counted from 0) on, first in the weight of" in run.causes[0].evidence


@pytest.mark.slow
def test_a_program_that_counts_its_steps_itself_goes_on_where_its_rows_say(preload: Preload) -> None:
    verdict = verify("counts_steps_itself.py", preload, "kill:host=1,step=8,phase=all-reduce")
    [run] = verdict.runs
    assert run.verdict == "equivalent", render(verdict)
    assert (run.faults[0].went_on_from, run.faults[0].result) == ((6,), "identical")


def test_a_program_that_goes_on_with_its_first_weights_did_not_restore_them(preload: Preload) -> None:
    [run] = verify("restores_no_weights.py", preload, "kill:host=1,step=8").runs
    assert (run.verdict, [cause.code for cause in run.causes]) == ("divergent", ["checkpoint-not-restored"])
    assert "resumes after 6 steps with the initial values of sequential/dense/kernel" in run.causes[0].summary
    assert "on hosts 0 and 1" in run.causes[0].evidence


def test_a_program_that_cannot_be_restarted_has_not_recovered(preload: Preload) -> None:
    verdict = verify("checkpoints.py", preload, "kill:host=0,step=2", restarts=0)
    [run] = verdict.runs
    assert (run.verdict, [cause.code for cause in run.causes]) == ("failed", ["not-recovered"]), render(verdict)
    assert verdict.exit_code == 3


@pytest.mark.slow
def test_what_an_earlier_run_left_in_the_folder_is_where_all_begin(
    preload: Preload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps before it are nobody's: neither the run without the fault nor the one with it makes them."""
    monkeypatch.chdir(tmp_path)
    program = str(RECOVERIES / "checkpoints.py")
    interrupted = [sys.executable, "-m", "emulate", "run", program, "--topology", "2x1", "--fault", "kill:host=1,step=11"]
    assert subprocess.run(interrupted, capture_output=True, check=False).returncode == 137
    assert list((tmp_path / "checkpoints").iterdir())
    verdict = verify("checkpoints.py", preload, "kill:host=0,step=12")
    [run] = verdict.runs
    assert run.verdict == "equivalent", render(verdict)
    begun = 12 - run.steps
    assert begun in (3, 6, 9)
    assert (run.faults[0].restarts, run.faults[0].result) == (1, "identical")
    assert run.faults[0].went_on_from[0] >= begun


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [4, 6, 8])
def test_hosts_that_wait_for_one_that_is_stopped_for_a_time_go_on_without_a_restart(preload: Preload, seconds: int) -> None:
    verdict = verify("checkpoints.py", preload, f"stop:host=1,step=4,seconds={seconds}", restarts=0)
    [run] = verdict.runs
    assert run.verdict == "equivalent", render(verdict)
    assert (run.faults[0].restarts, run.faults[0].result) == (0, "identical")


@pytest.mark.slow
def test_each_of_several_faults_is_told_its_own_restart(preload: Preload) -> None:
    verdict = verify("checkpoints.py", preload, "kill:host=1,step=5", "kill:host=0,step=11,phase=all-reduce")
    [run] = verdict.runs
    assert run.verdict == "equivalent", render(verdict)
    assert [fault.restarts for fault in run.faults] == [1, 1]
    (first,), (second,) = (fault.went_on_from for fault in run.faults)  # a checkpoint is written while the next steps are made
    assert (first in (0, 3), second in (3, 6, 9)) == (True, True)


@pytest.mark.slow  # emulate/faults/test_text.py and emulate/verify/test_recovery.py have the message
def test_a_fault_that_never_comes_to_pass_is_told(preload: Preload) -> None:
    [run] = verify("checkpoints.py", preload, "kill:host=0,step=200").runs
    assert run.verdict == "unverified"
    (told,) = [text for text in run.not_compared if "A fault must happen. Received: fault='kill:host=0,step=200'" in text]
    assert told.endswith("which did not happen: the program has only 12 steps. Use a step up to 12.")
    assert not run.faults[0].fired


def test_faults_that_a_topology_cannot_have_are_refused_before_anything_runs(preload: Preload) -> None:
    with pytest.raises(emulate.errors.UsageError, match="The host of a fault must exist"):
        verify("checkpoints.py", preload, "kill:host=7,step=2")
