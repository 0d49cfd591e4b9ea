"""Causes of runs that did not end well."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emulate.cluster import HostOutcome
from emulate.progress import Silent
from emulate.topology import Topology
from emulate.verify.causes.cause import plain_text, read_text
from emulate.verify.causes.endings import LIMITS
from emulate.verify.judge import Judgement, judge
from emulate.verify.processes import RunWatch
from emulate.verify.result import Outcome, RunResult
from tests.emulate.verify.cases import Folder, case_of, codes


def ended(folder: Folder, topology: str = "2x1", **outcome: Any) -> Judgement:
    return judge(case_of(folder.made().with_nothing(), folder.made(topology).with_nothing(), outcome=Outcome(**outcome)))


@pytest.mark.parametrize("code", ["host-exited", "unequal-steps", "collective-mismatch"])
def test_the_hang_judges_suspicion_is_reported_with_what_hosts_were_doing(folder: Folder, code: str) -> None:
    where = "host 0 waits in all_reduce; host 1 is over"
    found = ended(folder, hung="hang", suspect=code, where=where, hosts={0: "ended", 1: "returned"})
    assert (found.verdict, found.reason, codes(found)) == ("hung", "hang", [code])
    assert where in found.causes[0].evidence


def test_a_wait_for_another_thread_is_told_with_queues_and_events_as_well_as_the_order_of_locks(folder: Folder) -> None:
    where = "host 0 waits for another of its threads (a lock, a queue, an event) (train.py:6 in <module>)"
    found = ended(folder, hung="hang", suspect="python-deadlock", where=where)
    [cause] = found.causes
    assert "a lock, a queue or an event" in cause.summary
    assert where in cause.evidence
    assert "For a queue or an event, check that a thread of the same host fills or sets it" in cause.fix
    assert "Take locks in the same order everywhere" in cause.fix


def test_a_host_that_was_killed_is_named_when_a_peer_raises(folder: Folder) -> None:
    hosts, status = {0: "raised", 1: "killed"}, {0: 1, 1: -9}
    found = ended(folder, failure="UnavailableError: Connection reset by peer", hosts=hosts, codes=status)
    assert (found.verdict, codes(found)) == ("failed", ["host-exited"])
    assert "Host 1 left (killed by signal 9)" in found.causes[0].summary


@pytest.mark.parametrize(
    "line",
    [
        (
            "F0000 00:00:1795504816.516464   22829 env.cc:84] Check failed: ret == 0 (11 vs. 0) "
            "Thread tf_numa_-1_Eigen creation via pthread_create() failed."
        ),
        "E0000 00:00:1795504816.516464   22829 thd.cc:157] pthread_create failed: Resource temporarily unavailable",
        "libgomp: Thread creation failed: Resource temporarily unavailable",
    ],
)
@pytest.mark.parametrize("topology", ["2x1", "1x4"])
def test_a_host_that_could_start_no_thread_is_told_with_the_limits_on_them(
    folder: Folder, tmp_path: Path, topology: str, line: str
) -> None:
    (tmp_path / "host-0").mkdir()
    (tmp_path / "host-0" / "stderr").write_text(f"I0000 00:00:1.2 1 port.cc:153] oneDNN\n{line}\n    @ 0x7f3 abort\n")
    run = RunResult(topology, Topology.parse(topology), None)
    cluster: Any = SimpleNamespace(outcomes=[HostOutcome(0, "killed", -6, stack="Aborted")], name=lambda host: f"host {host}")
    RunWatch(cluster, run, tmp_path, threading.Event(), Silent()).note_ends()
    found = ended(folder, topology, failure=run.failure, hosts=run.statuses, codes=run.codes)
    assert (found.verdict, codes(found)) == ("failed", ["host-exited"])
    [cause] = found.causes
    assert cause.summary == "Host 0 left (killed by signal 6): the system refused to start more threads."
    assert cause.evidence.startswith(f"its output says: {line}; host 0: killed after 0 steps")
    assert "`ulimit -u`" in cause.fix
    assert "pids limit of the container" in cause.fix
    assert "sys.exit" not in cause.fix


@pytest.mark.parametrize(("step", "told"), [(None, True), (3, False)])
def test_a_run_that_makes_no_step_in_time_on_a_new_gpu_is_told_what_it_may_be_waiting_for(
    tmp_path: Path, step: int | None, told: bool
) -> None:
    run = RunResult("1x2", Topology.parse("1x2"), None)
    cluster: Any = SimpleNamespace(faults=SimpleNamespace(now=[]), stacks=dict, first_use="The driver compiles kernels")
    watch = RunWatch(cluster, run, tmp_path, threading.Event(), Silent())
    run.hosts[0] = {} if step is None else {"step": step}
    watch._hangs(None, 300)
    assert run.where.startswith("no end after 300 s")
    assert ("The driver compiles kernels: give the first run a longer --timeout" in run.where) == told


@pytest.mark.parametrize(
    "failure",
    [
        "Collective instance 133 expected type 0 and data_type 9 but got type 0 and data_type 3",
        "Shape mismatch in the collective instance 7. Op at device /job:worker/task:1 expected shape [98]",
    ],
)
def test_tensorflows_own_word_of_a_mismatch_is_quoted(folder: Folder, failure: str) -> None:
    text = f'File "collective_mismatch.py", line 58\nInternalError: aborted by: {failure}\nThe error could be'
    found = ended(folder, failure=text, hosts={0: "raised", 1: "raised"})
    assert codes(found) == ["collective-mismatch"]
    assert found.causes[0].evidence.startswith(f"TensorFlow says: {failure}; host 0: raised after ")


@pytest.mark.parametrize(("more", "code"), [([], "collective-order"), (["all_reduce float32[1]"], "collective-mismatch")])
def test_hosts_are_in_another_order_only_where_each_has_as_many_collectives(folder: Folder, more: list[str], code: str) -> None:
    both = ["all_reduce float32[131]", "all_reduce float32[1]"]
    said = (
        "Shape mismatch in the collective instance 7. Op at device CPU:0 expected shape [1] but another expected shape [131]."
    )
    hosts = {0: "raised", 1: "raised"}
    found = ended(folder, failure=f"InvalidArgumentError: {said}", hosts=hosts, collectives={0: [*both, *more], 1: both})
    assert codes(found) == [code]


def test_a_program_that_raises_has_no_cause_of_ours(folder: Folder) -> None:
    found = ended(folder, "1x4", failure="Traceback ...\nValueError: wrong", hosts={0: "raised"})
    assert (found.verdict, codes(found)) == ("failed", [])


@pytest.mark.parametrize(
    "failure",
    [
        (
            "RuntimeError: Exception encountered when calling Cond.call().\n"
            "`merge_call` called while defining a new graph or a tf.function."
        ),
        "in train_step\nRuntimeError: `merge_call` called while defining a new graph or a tf.function.",
        (
            "InvalidArgumentError: Inputs to operation cond/else/_1/gru/while/gradients/AddN_6 of type AddN must have the same "
            "size and shape.  Input 0: [0] != input 1: [8,36] [Op:__inference_fn_with_cond_7096]"
        ),
        "in _maybe_symbolic_build\nInvalidArgumentError: Inputs to operation AddN must have the same size and shape",
        "model.fit(x)\nInvalidArgumentError: Value for attr 'T' of string is not in the list of allowed values: AddN",
        "model.fit(x)\nTypeError: Value passed to parameter 'x' has DataType float32 not in list of allowed values: int32",
        "ValueError: Attempt to convert a value (PerReplica:{}) with an unsupported type",
        "InvalidArgumentError: Trying to access resource w located in device /device:CPU:1 from device /device:CPU:0",
        "InvalidArgumentError: You must feed a value for placeholder tensor 'cond/else/_1/cond/Placeholder_2'",
        "InvalidArgumentError: No OpKernel was registered to support Op 'NcclAllReduce' used by {{node}}",
        "UnimplementedError: A deterministic GPU implementation of AdjustContrastv2 is not currently available.",
        "UnimplementedError: Determinism is not yet supported in GPU implementation of Bincount.",
        "UnimplementedError: GPU MaxPool gradient ops do not yet have a deterministic XLA implementation.",
        "InternalError: DETERMINISTIC mode is not supported in cudnn version < 9.11.0",
        "InvalidArgumentError: Timestamp cannot be called when determinism is enabled [Op:Timestamp]",
        'RuntimeError: "get_global_generator" cannot be called if determinism is enabled, unless "set_global_generator" has',
        'RuntimeError: "from_non_deterministic_state" cannot be called when determinism is enabled.',
        "ValueError: Cannot create a tensor proto whose content is larger than 2GB.",
        "in _make_rebatch_fn get_static_batch_dim\nIndexError: list index out of range",
        "AttributeError: 'Mean' object has no attribute 'reset_states'",
        "RuntimeError: Unable to automatically build the model.\nhas DataType float32 not in list of allowed values: int32",
        "RuntimeError: Unable to automatically build the model.\nModel GAN does not have a `call()` method implemented.",
        "TypeError: float() argument must be a string or a real number, not 'MirroredVariable'",
        "TypeError: int() argument must be a string, a bytes-like object or a real number, not 'MirroredVariable'",
        "InvalidArgumentError: Could not apply FILE based sharding: the dataset only has 1 file(s), which is not enough for",
        "RuntimeError: Collective ops must be configured at program startup",
        "ValueError: destinations can not be empty",
        "AssertionError: in user code:\n  File optimizer.py, line 134, in _distributed_tf_update_step\n  AssertionError:",
        "RuntimeError: Mixing different tf.distribute.Strategy objects: <Mirrored> is not <_Default>",
        "ValueError: `colocate_vars_with` must only be passed a variable created in this tf.distribute.Strategy.scope()",
        'RuntimeError: Need to be inside "with strategy.scope()" for <MirroredStrategy object at 0x7f0a107befd0>',
        "AttributeError: 'PerReplica' object has no attribute 'dtype'",
        "TypeError: Binding inputs to tf.function failed due to `'PerReplica' object has no attribute 'dtype'`.",
    ],
)
def test_a_known_fault_of_the_framework_is_named_with_its_way_round(folder: Folder, failure: str) -> None:
    found = ended(folder, "1x4", failure=f"Traceback ...\n{failure}", hosts={0: "raised"})
    assert codes(found) == ["framework-limit"]
    assert found.causes[0].summary in {f"{limit.heading}." for limit in LIMITS}
    assert found.causes[0].fix in {plain_text(fix) for heading, fix in read_text("framework-limit").fixes.items() if heading}


def test_a_checkpoint_that_several_hosts_wrote_is_told_and_decides_nothing(folder: Folder) -> None:
    saved = {"/runs/ckpt-1": {1, 0}, "/runs/ckpt-2": {0, 1}, "/runs/own-0/model.keras": {0}}
    failed = ended(folder, failure="NotFoundError: /runs/ckpt-1_temp/part-00000", hosts={0: "raised"}, saved=saved)
    assert (failed.verdict, codes(failed)) == ("failed", ["checkpoint-conflict"])
    assert failed.causes[0].advice
    assert "tf.train.CheckpointManager" in failed.causes[0].fix
    models = ended(folder, failure="ValueError: wrong", hosts={0: "raised"}, saved={"/runs/model.keras": {0, 1}})
    assert "model.save(" in models.causes[0].fix
    assert failed.causes[0].evidence == (
        "hosts 0 and 1 wrote /runs/ckpt-1, 2 such paths in all; the program raised an error while it saved"
    )
    assert "raised" not in ended(folder, failure="ValueError: wrong", hosts={0: "raised"}, saved=saved).causes[0].evidence


def test_hosts_with_checkpoints_of_their_own_have_no_conflict(folder: Folder) -> None:
    saved = {"/runs/0/ckpt-1": {0}, "/runs/1/ckpt-1": {1}}
    assert codes(ended(folder, failure="ValueError: wrong", hosts={0: "raised"}, saved=saved)) == []


def test_fit_on_several_hosts_is_told_in_one_line_with_the_line_of_gpudist_core_that_fixes_it(folder: Folder) -> None:
    with np.printoptions(threshold=10_000):
        dump = f"(PerReplica:{{\n  0: <tf.Tensor: numpy=\n{np.ones((12, 64))!r}>\n}})"
    failure = f"Traceback ...\nValueError: Attempt to convert a value {dump} with an unsupported type to a Tensor."
    [cause] = ended(folder, failure=failure, hosts={0: "raised"}).causes
    assert cause.evidence == (
        "ValueError: Attempt to convert a value (PerReplica:{ 0: <tf.Tensor: numpy= array([[1., 1., 1., ...]])> }) "
        "with an unsupported type to a Tensor.\nOn one device the program does not fail."
    )
    assert "model = gd.distributed(model)  # import gpudist_core as gd" in cause.fix
