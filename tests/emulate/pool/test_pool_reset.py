"""Between jobs a host undoes what pytest's users expect to be undone; other changes stay in their scope."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emulate.cluster import HostContext, HostResult, Pool, Reset
from emulate.topology import Topology

Function = Callable[[], Any]


def values(results: list[HostResult]) -> list[Any]:
    for result in results:
        assert result.status == "returned", (result.error and result.error.traceback_text, result)
    return [result.value for result in results]


def value(results: list[HostResult]) -> Any:
    [found] = values(results)
    return found


def change_environment() -> None:
    os.environ["MINE"] = "1"
    os.environ.pop("HOME", None)
    os.environ["PATH"] += ":/nowhere"


def replace_environment() -> None:
    os.environ = {"MINE": "1"}  # type: ignore[assignment] # noqa: B003


def environment() -> Any:
    return dict(os.environ)


def leave_files() -> None:
    os.close(tempfile.mkstemp()[0])
    Path(tempfile.mkdtemp(), "below").write_text("left")


def set_dtype_policy() -> None:
    import keras

    keras.config.set_dtype_policy("mixed_bfloat16")


def dtype_policy() -> Any:
    import keras

    return keras.config.dtype_policy().name


def make_layers() -> None:
    import keras

    keras.layers.Dense(1)


def name_of_layer() -> Any:
    import keras

    return keras.layers.Dense(1).name


@pytest.mark.parametrize(
    ("change", "look"),
    [
        (change_environment, environment),
        (replace_environment, environment),
        (lambda: os.chdir("/"), os.getcwd),
        (lambda: sys.path.insert(0, "/nowhere"), lambda: list(sys.path)),
        (leave_files, lambda: os.listdir(tempfile.gettempdir())),
        (set_dtype_policy, dtype_policy),
        (make_layers, name_of_layer),
    ],
)
def test_the_next_job_finds_what_the_one_before_it_found(pool: Pool, change: Function, look: Function) -> None:
    def job(context: HostContext) -> Any:
        change()
        return look()

    with pool.lease("1x1") as lease:
        before = value(lease.run(lambda context: look()))
        assert value(lease.run(job)) != before
        assert value(lease.run(lambda context: look())) == before
    assert (pool.statistics.started, pool.statistics.reasons) == (1, [])


def set_seeds(context: HostContext) -> None:
    import keras

    keras.utils.set_random_seed(1)


def draw(context: HostContext) -> list[float]:
    import random

    import keras
    import numpy as np
    import tensorflow as tf

    drawn = [random.random(), np.random.rand(), tf.random.normal([]), keras.random.normal([])]
    return [float(one) for one in [*drawn, tf.random.get_global_generator().normal([])]]


def test_seeds_end_with_their_job(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        found = []
        for _ in range(2):
            value(lease.run(set_seeds))
            found.append(value(lease.run(draw)))
    assert not set(found[0]) & set(found[1])


def train(context: HostContext) -> list[float]:
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(7)
    several = context.topology.num_hosts > 1
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.MirroredStrategy()
    with strategy.scope():
        layers = [keras.layers.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def replica() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.random.normal([8, 3]), training=True) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    step = tf.function(lambda: strategy.reduce("SUM", strategy.run(replica), axis=None))
    return [float(step()) for _ in range(3)]


@pytest.mark.parametrize("topology", ["1x2", "2x1"])
def test_a_seeded_job_gives_the_same_bits_whatever_ran_before_it(pool: Pool, topology: str) -> None:
    with pool.lease(topology) as lease:
        first = values(lease.run(train))
        values(lease.run(draw))
        assert values(lease.run(train)) == first
    assert pool.statistics.started == 1


def count(context: HostContext) -> int:
    import tabnanny as module

    vars(module)["count"] = vars(module).get("count", 0) + 1
    return int(vars(module)["count"])


def test_other_changes_stay_for_jobs_of_the_same_scope_alone(pool: Pool) -> None:
    found = []
    for scope in ("a", "b", "a", "b", ""):
        with pool.lease("1x1", scope=scope) as lease:
            found.append(value(lease.run(count)))
    assert found == [1, 1, 2, 2, 1]
    with pool.lease("1x1", scope="a", fresh=True) as lease:
        assert value(lease.run(count)) == 1
    assert [pool.has_idle(Topology(1, 1), scope) for scope in ("a", "b", "c")] == [True, True, False]


def set_up(context: HostContext) -> None:
    os.environ["KEPT"] = "1"
    os.chdir("/")


def test_a_job_that_sets_up_something_for_later_jobs_is_not_undone(pool: Pool) -> None:
    def look(context: HostContext) -> Any:
        return os.environ.get("KEPT"), os.getcwd()

    with pool.lease("1x1") as lease:
        value(lease.run(set_up, resets=False))
        assert value(lease.run(look, resets=False)) == ("1", "/")


def test_what_is_kept_on_purpose_is_not_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.setenv("REMOVED", "before")
    reset = Reset()
    (tmp_path / "of_the_body").touch()
    os.environ["OF_THE_BODY"] = "1"
    with reset.keeping():
        (tmp_path / "kept").touch()
        os.environ["KEPT"], os.environ["CHANGED"] = "1", "after"
        del os.environ["REMOVED"]
    reset.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    found = {name: os.environ.get(name) for name in ("OF_THE_BODY", "KEPT", "CHANGED", "REMOVED")}
    os.environ.pop("KEPT")
    assert found == {"OF_THE_BODY": None, "KEPT": "1", "CHANGED": "after", "REMOVED": None}


def test_hosts_whose_lease_ended_them_are_not_leased_again(pool: Pool) -> None:
    with pool.lease("1x1") as lease:
        first = value(lease.run(lambda context: os.getpid()))
        lease.end_hosts()
    with pool.lease("1x1") as lease:
        assert value(lease.run(lambda context: os.getpid())) != first
    assert (pool.statistics.started, pool.statistics.replaced) == (2, 0)
