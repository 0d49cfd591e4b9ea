"""Several Checkpoints of one process, and tables that are trained beside a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.core.conftest import OnHosts


def _two_models(folder: str) -> dict[str, Any]:
    import keras

    import gpudist_core as gd

    one, other = (keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)]) for units in (1, 3))
    first, second = gd.Checkpoints(folder, model=one), gd.Checkpoints(folder, model=other)
    first.save(1)
    try:
        second.save(1)
        said = "nothing"
    except gd.FolderInUse as error:
        said = str(error)
    first.save(2)
    first.wait()
    kept = [path.name for path in first.saved()]
    again = gd.Checkpoints(folder, model=one)  # as where a cell of a notebook is run again
    restored = again.restore()
    again.save(3)
    again.close()
    return {"said": said, "kept": kept, "restored": restored and restored.step, "then": [path.name for path in again.saved()]}


def test_two_checkpoints_of_one_process_do_not_write_into_one_folder(on_hosts: OnHosts, tmp_path: Path) -> None:
    (seen,) = on_hosts("1x1", _two_models, str(tmp_path))
    assert seen["said"] == (
        f"Only one run may write its checkpoints into a folder. Received: folder={str(tmp_path)!r}, in use by another "
        "gd.Checkpoints of this process. Give this one a folder of its own, or keep both models with one: extra={...}."
    )
    assert seen["kept"] == ["step-00000002", "step-00000001"]
    assert (seen["restored"], seen["then"]) == (2, ["step-00000003", "step-00000002", "step-00000001"])


def _tables(folder: str | None, steps: int) -> list[Any]:
    """Two tables of one name, trained beside a model that does not know them; where there is a folder, gone on from it."""
    import keras
    import tensorflow as tf

    import gpudist_core as gd

    where = gd.make_strategy()
    tables = [gd.shard(np.arange(n * 4.0, dtype="f4").reshape(n, 4) / 10, where, trainable=True) for n in (7, 5)]
    with where.scope():
        dense = keras.layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(1))
        dense.build((None, 4))
        optimizer = keras.optimizers.Adam(0.1)

    class Model:
        trainable_variables = variables = dense.variables

        def __call__(self, x: Any) -> Any:
            return dense(tables[0].lookup(x) + tables[1].lookup(x % 5))

    trained = [*dense.variables, *(table.variable for table in tables)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = gd.TrainStep(Model(), optimizer, loss, variables=trained, strategy=where)
    rows = np.arange(24)
    pipeline = gd.Pipeline.from_arrays((rows % 7, rows % 3), global_batch_size=8)
    checkpoints = gd.Checkpoints(folder, step=step, pipeline=pipeline) if folder else None
    if checkpoints is not None:
        checkpoints.restore()
    distributed = pipeline.distribute(where)
    made = 0
    while made < steps:
        for batch in distributed:
            step(batch)
            made += 1
            if made == steps:
                break
    if checkpoints is not None:
        checkpoints.save(int(tf.convert_to_tensor(optimizer.iterations)))
        checkpoints.close()
    return [table.as_numpy() for table in tables]


@pytest.mark.parametrize(("before", "after"), [("1x2", "1x2"), ("1x2", "1x3"), ("1x3", "1x1")])
def test_slots_of_tables_beside_the_model_go_on_on_any_topology(
    on_hosts: OnHosts, tmp_path: Path, before: str, after: str
) -> None:
    (whole,) = on_hosts(after, _tables, None, 6)
    on_hosts(before, _tables, str(tmp_path), 3)
    (resumed,) = on_hosts(after, _tables, str(tmp_path), 3)
    for one, other in zip(whole, resumed, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def _values(count: int) -> str:
    import tensorflow as tf

    import gpudist_core as gd

    try:
        gd.per_replica(gd.make_strategy(), [tf.ones([k + 1]) for k in range(count)])
    except gd.WrongUse as error:
        return str(error)
    return "nothing"


def test_there_is_one_value_for_each_replica(on_hosts: OnHosts) -> None:
    told = "There is one value for each replica of this host. Received: values={}, replicas=2. Give as many."
    said = [on_hosts("1x2", _values, count)[0] for count in (0, 1, 2, 3)]
    assert said == [told.format(0), told.format(1), "nothing", told.format(3)]
