"""A host on which a job left what cannot be taken back is replaced, and the pool says why."""

from __future__ import annotations

import builtins
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from emulate.cluster import HostContext
from emulate.pool import HostResult, Pool, keep_state, restore_state

LIMIT = 60.0


def returned(results: list[HostResult]) -> list[Any]:
    for result in results:
        assert result.status == "returned", (result.error and result.error.traceback_text, result)
    return [result.value for result in results]


def pid(context: HostContext) -> int:
    return os.getpid()


def keep(value: Any) -> None:
    """For as long as the host lives."""
    import atexit

    atexit.register(lambda: value)


def leave_thread(context: HostContext) -> None:
    threading.Thread(target=time.sleep, args=(LIMIT,), name="mine", daemon=True).start()


def leave_file(context: HostContext) -> None:
    keep(open(context.directory / "mine.txt", "w"))  # noqa: SIM115


def leave_socket(context: HostContext) -> None:
    keep(socket.socket())


def leave_child(context: HostContext) -> None:
    keep(subprocess.Popen(["sleep", "60"]))


def leave_memory(context: HostContext) -> None:
    import tensorflow as tf

    tf.ones([])
    keep(bytearray(os.urandom(1 << 20)) * 700)


def leave_builtin(context: HostContext) -> None:
    builtins.mine = 1  # type: ignore[attr-defined]


def leave_patch(context: HostContext) -> None:
    import keras

    keras.Model.fit = lambda self: None


def leave_patched_functions(context: HostContext) -> None:
    import keras
    import numpy as np

    keras.optimizers.SGD.update_step = lambda *args: None
    np.mean = lambda *args: 0.0
    np.random.rand = lambda *args: 0.0


def leave_patched_module(context: HostContext) -> None:
    os.path.exists = lambda path: True  # type: ignore[assignment, misc]


def leave_patched_methods_of_python(context: HostContext) -> None:
    from unittest import mock

    mock.patch("pathlib.Path.exists").start()
    mock.patch("pathlib.Path.cwd", classmethod(lambda cls: None)).start()
    mock.patch("json.JSONEncoder.default", new_callable=mock.PropertyMock).start()


def leave_stand_in_and_import(context: HostContext) -> None:
    import tabnanny

    sys.modules["mine"] = tabnanny.mine = object()  # type: ignore[assignment, attr-defined]


def leave_no_faulthandler(context: HostContext) -> None:
    import faulthandler

    faulthandler.disable()


def leave_setting(context: HostContext) -> None:
    import tensorflow as tf

    tf.debugging.enable_check_numerics()


def leave_graph_mode(context: HostContext) -> None:
    import tensorflow as tf

    tf.compat.v1.disable_eager_execution()


def leave_scope(context: HostContext) -> None:
    import tensorflow as tf

    tf.distribute.MirroredStrategy().scope().__enter__()


def leave_variable(context: HostContext) -> None:
    import tensorflow as tf

    tf.ones([])
    os.environ["TF_XLA_FLAGS"] = "--tf_xla_auto_jit=2"


def leave_split(context: HostContext) -> None:
    import tensorflow as tf

    [gpu] = tf.config.list_physical_devices("GPU")
    tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=10)] * 2)
    tf.ones([])


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (leave_thread, "threads still run: mine"),
        (leave_file, r"files are still open: .*mine\.txt"),
        (leave_socket, "1 sockets are still open"),
        (leave_child, "child processes are still there"),
        (leave_builtin, "it changed the builtins mine"),
        (leave_patch, r"it replaced keras\.\S*Model\.fit"),
        (leave_patched_functions, r"it replaced keras\S*SGD.update_step, numpy.mean, numpy.random.rand"),
        (leave_patched_module, r"it replaced .*path\.exists"),
        (leave_patched_methods_of_python, r"it replaced json\S*JSONEncoder.default, pathlib\S*Path.cwd, pathlib\S*Path.exists"),
        (leave_stand_in_and_import, r"it put stand-ins for modules into sys\.modules: mine"),
        (leave_no_faulthandler, "it disabled faulthandler, which writes down where a host crashed"),
        (leave_setting, "it changed tf.debugging.enable_check_numerics"),
        (leave_graph_mode, "disable_eager_execution|eager execution is off"),
        (leave_scope, "it changed tf.distribute's strategy"),
        (leave_variable, "it changed TF_XLA_FLAGS, which libraries may have read"),
        (leave_split, "it split devices"),
    ],
)
def test_a_host_that_is_not_as_it_was_is_replaced(pool: Pool, job: Callable[[HostContext], None], reason: str) -> None:
    with pool.lease("1x1") as lease:
        first = returned(lease.run(pid))
        returned(lease.run(job))
    with pool.lease("1x1") as lease:
        assert returned(lease.run(pid)) != first
    [text] = pool.statistics.reasons
    assert text.startswith("1x1: host 0: ")
    assert re.search(reason, text), text


def test_memory_that_grew_beyond_its_limit_is_a_reason(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        returned(lease.run(leave_variable_alone))
        returned(lease.run(leave_memory))
        lease.run(pid)
    assert "its memory grew by" in pool.statistics.reasons[0]


def leave_variable_alone(context: HostContext) -> None:
    import tensorflow as tf

    tf.ones([])


def test_all_jobs_between_two_leases_are_looked_at(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        lease.run(leave_thread)
        assert returned(lease.run(pid))  # on another cluster already
    assert pool.statistics.started == 2


def set_threads(context: HostContext) -> int:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(3)
    tf.ones([])
    return int(tf.config.threading.get_intra_op_parallelism_threads())


def run_something(context: HostContext) -> None:
    import tensorflow as tf

    tf.ones([])


def test_what_only_a_fresh_host_can_do_begins_again_on_one(pool: Pool) -> None:
    events: list[Any] = []
    with pool.lease("1x1") as lease:
        returned(lease.run(run_something))
        assert returned(lease.run(set_threads, on_event=lambda host, event: events.append(event))) == [3]
    assert [event["event"] for event in events] == ["restarted"]
    assert "intra_op_parallelism_threads" in events[0]["reason"]
    assert pool.statistics.started == 2


def set_threads_too_late(context: HostContext) -> None:
    import tensorflow as tf

    tf.ones([])
    tf.config.threading.set_intra_op_parallelism_threads(3)


def test_what_comes_too_late_in_a_job_raises_on_a_warm_host_too(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        fresh = lease.run(set_threads_too_late)
        warm = lease.run(set_threads_too_late)
    assert [result.error and result.error.message for result in fresh] == [
        "Intra op parallelism cannot be modified after initialization."
    ]
    assert [result.error and result.error.message for result in warm] == [
        result.error and result.error.message for result in fresh
    ]
    assert pool.statistics.started == 1


def make_strategy_too_late(context: HostContext) -> None:
    import tensorflow as tf

    tf.ones([])
    tf.distribute.MultiWorkerMirroredStrategy()


def make_strategy(context: HostContext) -> None:
    import tensorflow as tf

    tf.distribute.MultiWorkerMirroredStrategy()


def test_a_strategy_that_is_made_too_late_raises_on_warm_hosts_too(pool: Pool) -> None:
    with pool.lease("2x1", fresh=True) as lease:
        fresh = lease.run(make_strategy_too_late)
    with pool.lease("2x1", fresh=True) as lease:
        returned(lease.run(make_strategy))
        warm = lease.run(make_strategy_too_late)
    for results in (fresh, warm):
        assert {result.error and result.error.message for result in results} == {
            "Collective ops must be configured at program startup"
        }


def set_flag(context: HostContext) -> tuple[str, int]:
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    import tensorflow as tf

    return os.environ["TF_ENABLE_ONEDNN_OPTS"], int(tf.ones([]))


def test_what_tensorflow_reads_at_its_import_begins_again_in_a_process_that_has_not_imported_it(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        returned(lease.run(run_something))
        assert returned(lease.run(set_flag)) == [("0", 1)]
    with pool.lease("1x1") as lease:
        assert returned(lease.run(run_something)) == [None]


def set_up(context: HostContext) -> None:
    keep(open(context.directory / "kept.txt", "w"))  # noqa: SIM115
    os.environ["KEPT"] = "yes"
    keep_state()
    os.environ["LOST"] = "yes"


def look(context: HostContext) -> tuple[bool, bool]:
    return "KEPT" in os.environ, "LOST" in os.environ


def test_a_job_may_say_what_shall_stay(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        returned(lease.run(set_up))
        assert returned(lease.run(look)) == [(True, False)]
    assert pool.statistics.started == 1


def test_to_keep_or_restore_state_outside_of_a_warm_host_is_wrong_use() -> None:
    with pytest.raises(ValueError, match=r"Only a warm host keeps state for later jobs\. Received: "):
        keep_state()
    with pytest.raises(ValueError, match=r"Only a warm host puts its state back\. Received: "):
        restore_state()


def test_parameter_servers_are_ended_with_their_chief_and_not_used_again(pool: Pool) -> None:
    def serve(context: HostContext) -> str:
        if context.role != "chief":
            time.sleep(LIMIT)
        return context.role

    with pool.lease("1x1+1ps") as lease:
        results = lease.run(serve, grace=0.1)
    assert [(result.status, result.value) for result in results] == [("returned", "chief"), ("ended", None), ("ended", None)]
    assert pool.statistics.replaced == 1


def test_modules_that_a_job_imported_keep_their_state(pool: Pool) -> None:
    def count(context: HostContext) -> int:
        import tabnanny as module

        vars(module)["count"] = vars(module).get("count", 0) + 1
        return int(vars(module)["count"])

    with pool.lease("1x1") as lease:
        assert [returned(lease.run(count)) for _ in range(3)] == [[1], [2], [3]]
