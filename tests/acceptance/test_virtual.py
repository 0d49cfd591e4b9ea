"""`--virtual`: replicas that take turns in one process are judged as real ones are, with the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import emulate
from emulate.cluster import Preload
from emulate.errors import UsageError
from emulate.report import render
from emulate.trace import Trace

FIXTURES = Path(__file__).parents[2] / "fixtures"
LOOP, FIT = FIXTURES / "programs" / "custom_loop_cnn.py", FIXTURES / "programs" / "keras_fit_mlp.py"


def _state(trace: Trace) -> Mapping[tuple[str, int, int, str], str]:
    """Return the digest of each weight after each step, on each replica."""
    return {
        (name, number, replica, tensor): weight.digest
        for name in trace.optimizers
        for number, step in enumerate(trace.steps(name))
        for replica, one in step.items()
        for tensor, weight in one.weights.items()
    }


def _gradients(trace: Trace) -> Mapping[tuple[str, int, int, str], bytes]:
    return {
        (name, number, replica, tensor): np.asarray(array.read()).tobytes()
        for name in trace.optimizers
        for number, step in enumerate(trace.steps(name))
        for replica, one in step.items()
        for tensor, array in one.gradients.items()
    }


@pytest.mark.parametrize(
    ("program", "topology"),
    [(LOOP, "1x4"), (FIT, "1x4"), pytest.param(LOOP, "1x8", marks=pytest.mark.slow)],
    ids=lambda value: getattr(value, "stem", value),
)
def test_virtual_replicas_have_the_bits_of_real_ones_that_are_summed_by_the_ring(
    program: Path, topology: str, tmp_path: Path, preload: Preload
) -> None:
    kept = {}
    for virtual in (False, True):
        folder = tmp_path / f"virtual-{virtual}"
        how = {"all_reduce": "ring"} if not virtual else {"virtual": True}
        verdict = emulate.verify(program, topology, steps=4, traces=folder, preload=preload, **how)  # type: ignore[arg-type]
        assert verdict.is_equivalent, render(verdict)
        kept[virtual] = Trace(folder / topology)
    assert len(_state(kept[True])) > 4
    assert _state(kept[True]) == _state(kept[False])
    assert _gradients(kept[True]) == _gradients(kept[False])
    assert [step.rows for step in kept[True].steps(kept[True].optimizers[0])[0].values()] == [
        step.rows for step in kept[False].steps(kept[False].optimizers[0])[0].values()
    ]


def _in_folder(text: str, folder: Path) -> Path:
    program = folder / "train.py"
    program.write_text(text.replace("Path(__file__).resolve().parents[1]", f"Path({str(FIXTURES)!r})"))
    return program


def _command(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "emulate", "verify", *args]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}, check=False)


def test_the_command_finds_what_is_wrong_with_many_virtual_replicas_and_says_what_it_cannot_see(tmp_path: Path) -> None:
    program = _in_folder(
        LOOP.read_text().replace("tf.reduce_sum(per_example) / GLOBAL_BATCH", "tf.reduce_mean(per_example)"), tmp_path
    )
    told = _command(str(program), "--topology", "1x16", "--virtual", "--steps", "3", "--json", str(tmp_path / "verdict.json"))
    assert told.returncode == 1, told.stdout + told.stderr
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    (run,) = verdict["runs"]
    assert (run["topology"], run["replicas"], run["steps"], run["all_reduce"]) == ("1x16", 16, 3, "ring")
    assert [cause["code"] for cause in run["causes"]] == ["loss-scaling"]
    assert run["causes"][0]["location"]["text"].startswith("loss = tf.reduce_mean"), run["causes"][0]
    assert "The replicas were virtual" in told.stdout


@pytest.mark.slow
def test_the_command_finds_nothing_wrong_with_many_virtual_replicas_of_a_right_program() -> None:
    told = _command(str(LOOP), "--topology", "1x16", "--virtual", "--steps", "3")
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topology", "2x1+1ps"], "Virtual replicas have no parameter servers. Received: --virtual with topology='2x1+1ps'"),
        (["--topology", "1x2", "--device", "gpu"], "Virtual replicas run on the CPU. Received: --virtual with --device gpu."),
        (["--topology", "1x2", "--all-reduce", "one-device"], "Virtual replicas are summed in the order of the ring."),
        (["--topology", "1x2", "--fault", "kill:host=0,step=1"], "Faults need real hosts. Received: --virtual with 1 faults"),
        (["--topology", "1x5000"], "A topology has 1 to 4096 devices per host. Received: topology='1x5000'"),
    ],
)
def test_what_virtual_replicas_cannot_stand_for_is_refused(options: list[str], message: str) -> None:
    told = _command(str(LOOP), "--virtual", *options)
    assert told.returncode == 2
    assert message in " ".join(told.stderr.split())


OF_HOSTS = (FIXTURES / "programs" / "multiworker_loop.py").read_text()
SHARDED = OF_HOSTS.replace(".shuffle(1440, seed=3)", ".shard(num_workers, task['index']).shuffle(1440, seed=3)")


def test_virtual_hosts_of_gpudist_core_are_refused_and_never_wait_for_each_other(tmp_path: Path, preload: Preload) -> None:
    program = tmp_path / "train.py"
    program.write_text("import gpudist_core as gd\n\ngd.make_strategy()\n")
    with pytest.raises(UsageError, match=r"gpudist_core\.make_strategy, whose hosts wait for each other"):
        emulate.verify(program, "2x1", virtual=True, timeout=60, preload=preload)


@pytest.mark.parametrize("topology", ["2x2", pytest.param("2x4", marks=pytest.mark.slow)])
def test_virtual_hosts_have_the_bits_of_real_ones(topology: str, tmp_path: Path, preload: Preload) -> None:
    program = _in_folder(OF_HOSTS, tmp_path)
    kept = {}
    for virtual in (False, True):
        folder = tmp_path / f"virtual-{virtual}"
        how = {"all_reduce": "ring"} if not virtual else {"virtual": True}
        verdict = emulate.verify(program, topology, steps=4, traces=folder, preload=preload, **how)  # type: ignore[arg-type]
        assert verdict.is_equivalent, render(verdict)
        kept[virtual] = Trace(folder / topology)
    assert _state(kept[True]) == _state(kept[False])
    assert any("as host 0 and as host 1: it trains the same" in note for note in verdict.runs[0].notes), render(verdict)


def test_a_program_whose_data_depend_on_the_number_of_its_host_is_refused(tmp_path: Path) -> None:
    assert SHARDED != OF_HOSTS
    told = _command(str(_in_folder(SHARDED, tmp_path)), "--virtual", "--topology", "3x2", "--steps", "2")
    assert told.returncode == 2, told.stdout + told.stderr
    assert "as host 2 of 3x2 differs in the choice or contents of the examples" in " ".join(told.stderr.split())
