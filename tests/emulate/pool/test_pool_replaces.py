"""A job may need hosts that have not imported TensorFlow, and servers are ended with their chief."""

from __future__ import annotations

import os
import time
from typing import Any

from emulate.cluster import HostContext, HostResult, Pool

LIMIT = 60.0


def returned(results: list[HostResult]) -> list[Any]:
    for result in results:
        assert result.status == "returned", (result.error and result.error.traceback_text, result)
    return [result.value for result in results]


def run_something(context: HostContext) -> None:
    import tensorflow as tf

    tf.ones([])


def set_flag(context: HostContext) -> tuple[str, int]:
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    import tensorflow as tf

    return os.environ["TF_ENABLE_ONEDNN_OPTS"], int(tf.ones([]))


def test_what_tensorflow_reads_at_its_import_begins_again_in_a_process_that_has_not_imported_it(pool: Pool) -> None:
    events: list[Any] = []
    with pool.lease("1x1") as lease:
        returned(lease.run(lambda context: None))
        assert returned(lease.run(set_flag, on_event=lambda host, event: events.append(event))) == [("0", 1)]
    assert [event["event"] for event in events] == ["restarted"]
    assert "sets TF_ENABLE_ONEDNN_OPTS, which TensorFlow reads when it is imported" in events[0]["reason"]
    with pool.lease("1x1") as lease:  # which stays for its scope
        assert returned(lease.run(set_flag, on_event=lambda host, event: events.append(event))) == [("0", 1)]
    assert (len(events), pool.statistics.replaced) == (1, 1)


def test_a_setting_that_comes_too_late_raises_as_tensorflow_says_it(pool: Pool) -> None:
    def set_threads(context: HostContext) -> None:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(3)

    with pool.lease("1x1") as lease:
        returned(lease.run(run_something))
        [result] = lease.run(set_threads)
    assert result.error is not None
    assert result.error.message == "Intra op parallelism cannot be modified after initialization."
    with pool.lease("1x1", fresh=True) as lease:
        returned(lease.run(set_threads))


def test_parameter_servers_are_ended_with_their_chief_and_not_used_again(pool: Pool) -> None:
    def serve(context: HostContext) -> str:
        if context.role != "chief":
            time.sleep(LIMIT)
        return context.role

    with pool.lease("1x1+1ps") as lease:
        results = lease.run(serve, grace=0.1)
    assert [(result.status, result.value) for result in results] == [("returned", "chief"), ("ended", None), ("ended", None)]
    assert pool.statistics.replaced == 1
