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
        "gd.Checkpoints of this process. Give this one another folder, or save both models with one: extra={...}."
    )
    assert seen["kept"] == ["step-00000002", "step-00000001"]
    assert (seen["restored"], seen["then"]) == (2, ["step-00000003", "step-00000002", "step-00000001"])


def _tables(folder: str | None, steps: int, extra: bool = False) -> list[Any]:
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
    named = {"one": tables[0], "other": tables[1].variable} if extra else {}
    checkpoints = gd.Checkpoints(folder, step=step, pipeline=pipeline, extra=named) if folder else None
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


def test_a_table_may_be_named_among_what_is_kept_besides(on_hosts: OnHosts, tmp_path: Path) -> None:
    (whole,) = on_hosts("1x2", _tables, None, 6)
    on_hosts("1x2", _tables, str(tmp_path), 3, True)
    (resumed,) = on_hosts("1x2", _tables, str(tmp_path), 3, True)
    for one, other in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(one, other)


def _values(count: int) -> str:
    import tensorflow as tf

    import gpudist_core as gd

    try:
        gd.per_replica(gd.make_strategy(), [tf.ones([k + 1]) for k in range(count)])
    except gd.UsageError as error:
        return str(error)
    return "nothing"


def test_there_is_one_value_for_each_replica(on_hosts: OnHosts) -> None:
    told = "values must hold one value for each replica of this host. Received: values={}, replicas=2."
    said = [on_hosts("1x2", _values, count)[0] for count in (0, 1, 2, 3)]
    assert said == [told.format(0), told.format(1), "nothing", told.format(3)]


def _fits(folder: str | None, epochs: list[int], recompiles: bool) -> list[Any]:
    """One callback in fit after fit."""
    import keras

    import gpudist_core as gd

    keras.utils.set_random_seed(5)
    rng = np.random.default_rng(0)
    rows, labels = rng.normal(size=(50, 4)).astype("float32"), rng.integers(0, 3, 50)
    with gd.make_strategy().scope():
        model = gd.distributed(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]))
    callbacks = [gd.Checkpoints(folder)] if folder else []
    for number, end in enumerate(epochs):
        if number == 0 or recompiles:
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(rows, labels, batch_size=10, epochs=end, callbacks=callbacks, verbose=0)
    return [np.asarray(weight) for weight in model.get_weights()]


@pytest.mark.parametrize("recompiles", [False, True], ids=["as it was compiled", "compiled again"])
def test_a_callback_of_an_earlier_fit_goes_on_with_the_rows_and_the_optimizer_of_this_one(
    on_hosts: OnHosts, tmp_path: Path, recompiles: bool
) -> None:
    (whole,) = on_hosts("1x2", _fits, None, [3], False)
    (parts,) = on_hosts("1x2", _fits, str(tmp_path), [1, 2, 3], recompiles)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one, other)
