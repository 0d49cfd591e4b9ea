"""What holds for every verification, whatever the program: the runs do not meet, nothing stays, nothing is hidden."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import emulate
from emulate.cluster import Preload
from emulate.errors import UsageError
from emulate.progress import Silent
from emulate.report import render
from emulate.trace import Trace
from fixtures.manifest import BUGS, PROGRAMS

Write = Callable[[str], Path]

LOOP = """
import os, sys
import keras, numpy as np, tensorflow as tf
{before}
strategy = {strategy}
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.1)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
y = np.arange(96) % 3
data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(24).repeat(2))

def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(loss_of(y, model(x))) / 24
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss

@tf.function
def train(x, y):
    return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

for x, y in data:
    train(x, y)
{after}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """write(before=..., strategy=..., after=...) -> the script, in a folder of its own that is the working directory."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def make(before: str = "", strategy: str = "tf.distribute.MirroredStrategy()", after: str = "") -> Path:
        path = folder / "train.py"
        path.write_text(LOOP.format(before=before, strategy=strategy, after=after))
        return path

    return make


def test_the_ring_gives_bitwise_equal_weights_on_every_shape_of_four_replicas(preload: Preload, tmp_path: Path) -> None:
    fixture = next(one for one in PROGRAMS if one.name == "multiworker_loop")
    topologies = ("1x4", "2x2", "4x1")
    verdict = emulate.verify(fixture.path, topologies, steps=8, all_reduce="ring", traces=tmp_path, preload=preload)
    assert verdict.is_equivalent, render(verdict)
    finals = []
    for topology in topologies:
        variables = Trace(tmp_path / topology).variables("final")
        finals += [{name: one.digest for name, one in found.items()} for found in variables.values()]
    assert len(finals) == 12
    assert all(final == finals[0] for final in finals)


def test_what_a_run_writes_is_not_there_for_the_next_and_the_users_files_stay(write: Any, preload: Preload) -> None:
    before = """
assert not os.path.exists("out.txt"), "another run was here"
assert open("config.txt").read() == "mine"
open("out.txt", "w").write("x"); open("config.txt", "w").write("changed"); os.makedirs("checkpoints/a")
"""
    script = write(before)
    Path("config.txt").write_text("mine")
    verdict = emulate.verify(script, ["1x2", "2x1"], steps=3, preload=preload)
    assert [run.verdict for run in verdict.runs][:1] == ["equivalent"], render(verdict)
    assert Path("config.txt").read_text() == "mine"
    assert sorted(os.listdir()) == ["config.txt", "train.py"]


class Started(Silent):
    """Remembers which runs were started."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def run_started(self, label: str, steps: int | None) -> None:
        self.labels.append(label)


def test_a_strategy_of_one_host_on_several_hosts_is_found_after_the_first_runs(write: Any, preload: Preload) -> None:
    started = Started()
    (run,) = emulate.verify(write(), "2x2", steps=3, preload=preload, progress=started).runs
    assert (run.verdict, [cause.code for cause in run.causes]) == ("divergent", ["replicas-missing"])
    assert run.not_compared[-1].startswith("everything else: the verification ended early")
    assert sorted(started.labels) == ["2x2", "reference"]


def test_a_program_without_a_strategy_uses_one_of_the_devices_and_that_is_said(write: Any, preload: Preload) -> None:
    (run,) = emulate.verify(write(strategy="tf.distribute.get_strategy()"), "1x4", steps=3, preload=preload).runs
    assert (run.verdict, run.causes[0].code) == ("divergent", "replicas-missing")


def test_an_allowed_cause_is_reported_and_does_not_decide(write: Any, preload: Preload) -> None:
    script = write(strategy="tf.distribute.get_strategy()")
    verdict = emulate.verify(script, "1x4", steps=3, allow=["replicas-missing"], preload=preload)
    assert verdict.is_equivalent, render(verdict)
    assert [(cause.code, cause.allowed) for cause in verdict.runs[0].causes] == [("replicas-missing", True)]


def test_a_tf_config_written_by_the_program_is_replaced_by_the_topologys_and_noted(write: Any, preload: Preload) -> None:
    before = """
os.environ["TF_CONFIG"] = '{{"cluster": {{"worker": ["10.0.0.1:1", "10.0.0.2:1"]}}, "task": {{"type": "worker", "index": 0}}}}'
""".replace("{{", "{").replace("}}", "}")
    script = write(before, "tf.distribute.MultiWorkerMirroredStrategy()")
    (run,) = emulate.verify(script, "2x1", steps=3, preload=preload).runs
    assert run.verdict == "equivalent"
    assert run.replicas == 2
    assert any("TF_CONFIG" in note for note in run.notes)


def test_the_reference_can_have_arguments_of_its_own(write: Any, preload: Preload) -> None:
    script = write('assert sys.argv[1:] == (["--one"] if len(tf.config.list_logical_devices("GPU")) == 1 else ["--many", "2"])')
    verdict = emulate.verify(script, "1x2", args=["--many", "2"], reference_args=["--one"], steps=3, preload=preload)
    assert verdict.is_equivalent, render(verdict)


def test_a_topology_that_does_not_fit_is_unavailable_and_the_others_are_judged(
    write: Any, preload: Preload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emulate.verify.checks.free_memory", lambda: 2 << 30)
    verdict = emulate.verify(write(), ["32x8", "1x2"], steps=3, preload=preload)
    assert [(run.topology, run.verdict) for run in verdict.runs] == [("32x8", "unavailable"), ("1x2", "equivalent")]
    assert verdict.exit_code == 5
    assert "which needs 4240 MiB" in render(verdict)


def test_double_precision_is_compared_at_double_precision(write: Any, preload: Preload) -> None:
    (run,) = emulate.verify(write(), "1x3", steps=4, precision="float64", preload=preload).runs
    assert run.verdict == "equivalent"


STEP = """
import keras, numpy as np, gpudist_core as gd
keras.config.set_floatx("{kind}")
keras.utils.set_random_seed(3)
strategy = gd.make_strategy(all_reduce="{all_reduce}")
rng = np.random.default_rng(0)
x, y = rng.normal(size=(18, 4)).astype("float32"), rng.integers(0, 3, 18)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD(0.1)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
step = gd.TrainStep(model, optimizer, loss, clip_global_norm=1.0)
for batch in gd.Pipeline.from_arrays((x, y), global_batch_size=8).distribute(strategy):
    step(batch)
"""


@pytest.mark.slow  # test_16_bits.py and test_double_precision_is_compared_at_double_precision have other forms
@pytest.mark.parametrize(
    ("kind", "all_reduce", "topology"),
    [
        pytest.param("bfloat16", "hierarchical", "1x2", id="bfloat16"),
        pytest.param("float64", "ring", "2x1", id="float64"),
        pytest.param("float16", "ring", "1x2", id="float16"),
    ],
)
def test_a_model_of_any_floating_type_is_verified_and_trains_the_same(
    kind: str, all_reduce: str, topology: str, preload: Preload, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(STEP.format(kind=kind, all_reduce=all_reduce))
    verdict = emulate.verify(tmp_path / "train.py", topology, preload=preload)
    assert [run.verdict for run in verdict.runs] == ["equivalent"], render(verdict)


def test_a_program_that_never_trains_is_wrong_use_with_what_to_do(preload: Preload) -> None:
    fixture = next(one for one in BUGS if one.name == "never_trains")
    with pytest.raises(
        UsageError,
        match=r"A program to verify must train: .* Received: program='.*never_trains\.py'.*`--`, in Python as `args`\.",
    ):
        emulate.verify(fixture.path, "1x2", preload=preload)


def test_a_program_that_raises_on_one_host_fails_with_its_own_traceback(write: Any, preload: Preload) -> None:
    after = 'raise RuntimeError("mine") if "index\\": 1" in os.environ["TF_CONFIG"] else SystemExit(0)'
    script = write(strategy="tf.distribute.MultiWorkerMirroredStrategy()", after=after)
    verdict = emulate.verify(script, "2x1", preload=preload)
    assert verdict.runs[0].verdict == "failed", render(verdict)
    assert verdict.exit_code == 3
    assert verdict.runs[0].failure is not None
    assert "RuntimeError: mine" in verdict.runs[0].failure
    assert "/emulate/" not in verdict.runs[0].failure


def test_nothing_outlives_a_verification(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert emulate.verify(write(strategy="tf.distribute.MultiWorkerMirroredStrategy()"), ["1x2", "2x1"], steps=3).is_equivalent
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert os.listdir(scratch) == []


def test_the_code_that_was_not_run_is_named(preload: Preload) -> None:
    fixture = next(one for one in PROGRAMS if one.name == "keras_fit_mlp")
    verdict = emulate.verify(fixture.path, "1x2", steps=2, preload=preload)
    (note,) = [one for one in verdict.notes if not one.startswith("Each run works on a copy of ")]
    later = "callbacks at the end of an epoch and evaluations"
    assert note == f"Stopped after 2 steps (--steps). Later code, such as {later}, was not checked."


def test_paths_elsewhere_that_several_runs_wrote_are_listed(write: Any, preload: Preload, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    script = write(f"open({str(tmp_path / 'elsewhere' / 'log.txt')!r}, 'a').close(); open('own.txt', 'w').close()")
    verdict = emulate.verify(script, "1x2", steps=2, preload=preload)
    assert verdict.is_equivalent, render(verdict)
    (note,) = [note for note in verdict.notes if "Several runs wrote the same paths" in note]
    assert note.endswith(f": {(tmp_path / 'elsewhere' / 'log.txt').resolve()}.")


def test_a_program_that_raises_everywhere_is_also_run_without_gpudist(preload: Preload, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise KeyError('mine')")
    verdict = emulate.verify(script, "1x2", preload=preload)
    assert verdict.exit_code == 3
    assert "Without gpudist the program fails too, with the same error as on one device." in verdict.notes


def test_a_program_that_raises_with_a_tf_config_is_told_what_had_one(preload: Preload, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nif 'TF_CONFIG' in os.environ:\n    raise KeyError('mine')")
    verdict = emulate.verify(script, ["2x1", "1x2"], preload=preload)
    same = "Without gpudist, with the TF_CONFIG of one worker, the program fails too, with the same error as on one device."
    assert same in verdict.notes
    assert [note for note in verdict.notes if "Verify them in a separate call" in note]


CRASHES = """
import os, signal, sys
import numpy as np, tensorflow as tf, keras
keras.utils.set_random_seed(1)
strategy = tf.distribute.MirroredStrategy()
x = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
model.fit(x, x[:, :1], batch_size=12, verbose=0)
try:
    os.close(os.open(sys.argv[1], os.O_CREAT | os.O_EXCL))
except FileExistsError:
    pass
else:
    os.kill(os.getpid(), signal.SIGSEGV)
model.fit(x, x[:, :1], batch_size=12, verbose=0)
"""


def test_a_run_that_crashes_in_c_once_is_made_again_and_that_is_said(preload: Preload, tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    script = tmp_path / "program" / "train.py"
    script.write_text(CRASHES)
    verdict = emulate.verify(script, "1x2", steps=None, args=[str(tmp_path / "crashed")], preload=preload)
    assert verdict.runs[0].verdict == "equivalent", render(verdict)
    assert verdict.runs[0].steps == 16
    [note] = [note for note in verdict.notes if "was repeated" in note]
    assert "host 0 was ended by SIGSEGV" in note


def test_another_error_on_one_device_is_shown_too(preload: Preload, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nraise ValueError('few') if sys.argv[1] == 'few' else KeyError('many')")
    verdict = emulate.verify(script, "1x2", args=["many"], reference_args=["few"], preload=preload)
    text = render(verdict)
    assert "On one device (1x1, the reference) the program fails too, with another error." in text
    assert text.index("ValueError: few") < text.index("KeyError: 'many'")


def test_an_error_that_differs_in_the_numbers_of_examples_is_the_same_one(preload: Preload, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nraise ValueError(f'3 inputs expected, found shape=({sys.argv[1]}, 12)')")
    text = render(emulate.verify(script, "1x2", args=["8"], reference_args=["32"], preload=preload))
    assert "On one device (1x1, the reference) the program fails too." in text
    assert "shape=(32, 12)" not in text


def test_a_program_that_asks_for_input_is_told_that_there_is_none(preload: Preload, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("epochs = int(input())")
    verdict = emulate.verify(script, "1x2", preload=preload)
    assert not [note for note in verdict.notes if note.startswith("Without gpudist")]
    assert any(note.startswith("Every host has an empty standard input") for note in verdict.runs[0].notes)


def test_a_program_that_only_emulation_makes_fail_is_known_by_its_plain_run(preload: Preload, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nassert 'tensorflow' not in sys.modules, 'imported before'")
    verdict = emulate.verify(script, "1x2", preload=preload)
    assert verdict.exit_code == 3
    (note,) = [note for note in verdict.notes if note.startswith("Without gpudist")]
    assert "the program ends without an error" in note


def test_a_program_that_raises_on_one_device_alone_is_not_said_to_fail_elsewhere(write: Any, preload: Preload) -> None:
    verdict = emulate.verify(
        write(after='assert strategy.num_replicas_in_sync > 1, "one is too few"'), "1x2", steps=None, preload=preload
    )
    (run,) = verdict.runs
    assert (run.verdict, run.reason, run.failure, verdict.exit_code) == ("failed", "reference", None, 3)
    assert verdict.reference.failure is not None
    text = render(verdict)
    assert "On one device (1x1, the reference) the program fails.\n" in text
    assert "1x2  failed: the reference failed; here the program finished, after 8 steps" in text
    assert text.count("AssertionError: one is too few") == 1


@pytest.mark.parametrize(
    ("leave", "verdict", "steps"),
    [
        ("os._exit(0)", "equivalent", 8),
        ("import ctypes; ctypes.CDLL(None)._exit(0)", "unverified", None),
        pytest.param("os._exit(7)", "failed", 8, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_ends_at_once_has_been_seen_to_its_end_or_it_is_said(
    write: Any, preload: Preload, leave: str, verdict: str, steps: int | None
) -> None:
    """What was handed over before is written before the process goes, wherever Python is asked."""
    (run,) = emulate.verify(write(after=leave), "1x2", steps=None, preload=preload).runs
    assert run.verdict == verdict
    if steps is not None:
        assert run.steps == steps
    else:
        assert any(one.startswith("steps: a process ended by os._exit()") for one in run.not_compared)
    assert verdict != "failed" or run.failure == "The process of host 0 ended with exit code 7."


def test_a_program_that_leaves_with_an_error_code_fails_with_its_last_words(preload: Preload, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text('import sys\nsys.exit("no data here")')
    verdict = emulate.verify(script, "1x2", preload=preload)
    (run,) = verdict.runs
    assert (run.verdict, verdict.exit_code) == ("failed", 3)
    assert run.failure is not None
    assert run.failure.splitlines()[-1] == "no data here"
    assert any("Without gpudist the program fails too, with the same error" in note for note in verdict.notes)


def test_a_program_that_crashes_fails_with_the_place_where_it_was(preload: Preload, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nos.abort()")
    (run,) = emulate.verify(script, "1x2", preload=preload).runs
    assert run.failure is not None
    first, reason, *stack = run.failure.splitlines()
    assert (first, reason) == ("The process of host 0 ended with signal 6.", "Aborted")
    assert stack[-1].strip() == "os.abort()"


def test_runs_that_had_no_time_to_make_a_step_are_told_to_be_given_more(write: Any, preload: Preload) -> None:
    verdict = emulate.verify(write(), "1x2", timeout=0.2, preload=preload)
    assert [run.verdict for run in verdict.runs] == ["hung"]
    (note,) = [note for note in verdict.notes if "give a longer --timeout" in note]
    assert note.startswith("On one device the time was over before step 1.")
