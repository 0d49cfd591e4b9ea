"""What hosts do with rows that Python code gives each of them: generators, sequences, streams; alike, and not alike."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.core.keras_model.run import strategy

BATCH = 8


def here() -> int:
    """The number of this host."""
    import json

    return int(json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0))


class Numbers:
    """Batches of one number each, without an end: 1, 2, 3, ...

    Attributes:
        taken: How many there were.
    """

    taken = 0

    def __iter__(self) -> Any:
        while True:
            self.taken += 1
            yield _batch(self.taken)


def _batch(number: int) -> Any:
    return np.full((BATCH, 1), number, "float32"), np.zeros((BATCH, 1), "float32")


def means() -> tuple[Any, Any]:
    """A strategy, and a model whose loss is the mean of the numbers it is given."""
    import keras

    import gpudist_core as gd

    where = strategy()
    with where.scope():
        model = gd.distributed(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")]))
        model.compile(keras.optimizers.SGD(0.0), "mae")
    return where, model


def one_generator_in_many_fits() -> dict[str, Any]:
    """The mean number of each epoch, and how many batches had been taken at its end."""
    import keras

    _, model = means()

    class Endless(keras.utils.PyDataset):
        def __init__(self) -> None:
            super().__init__()
            self.taken = 0

        @property
        def num_batches(self) -> None:
            return None

        def __getitem__(self, place: int) -> Any:
            self.taken += 1
            return _batch(self.taken)

    numbers, judged, endless = Numbers(), Numbers(), Endless()
    source, found = iter(numbers), []
    for _ in range(3):
        found += [(mean, numbers.taken) for mean in _losses(model, source, steps_per_epoch=3)]
    seen = model.fit(*_batch(1), epochs=3, verbose=0, validation_data=iter(judged), validation_steps=3).history["val_loss"]
    return {
        "generator": found,
        "one step": [*_losses(model, iter(Numbers()), steps_per_epoch=1), *_losses(model, source, steps_per_epoch=1)],
        "validation": (seen, judged.taken),
        "sequence": [*_losses(model, endless, steps_per_epoch=3), endless.taken],
    }


def _losses(model: Any, data: Any, **options: Any) -> list[float]:
    return [float(loss) for loss in model.fit(data, verbose=0, **({"shuffle": False} | options)).history["loss"]]


def refused() -> dict[str, str]:
    """What each kind of data raises that gives each host other rows; checksums are left out."""
    return {name: _said(act) for name, act in _unlike().items()}


def _said(act: Callable[[], Any]) -> str:
    try:
        return f"went on: {act()}"
    except Exception as error:
        return re.sub(r"rows [0-9a-f]{8}", "rows ...", f"{type(error).__name__}: {error}")


def _unlike() -> dict[str, Callable[[], Any]]:
    import keras

    import gpudist_core as gd

    where, model = means()

    class Sequence(keras.utils.PyDataset):
        def __init__(self, late: bool) -> None:
            super().__init__()
            self.late, self.rng, self.order = late, np.random.default_rng(None if here() else 1), np.arange(32.0)
            if not late:
                self.on_epoch_end()

        def on_epoch_end(self) -> None:
            self.order = self.rng.permutation(self.order)

        def __len__(self) -> int:
            return 4

        def __getitem__(self, place: int) -> Any:
            rows = self.order[BATCH * place :][:BATCH, None].astype("float32")
            return rows, np.zeros_like(rows)

    def permuted() -> Any:
        for number in np.random.default_rng().permutation(32):
            yield np.float32([number]), np.float32([0])

    def rows(count: int) -> Any:
        for number in range(count):
            yield np.float32([number]), np.float32([0])

    def ends_early() -> Any:
        for number in range(4 - here()):
            yield _batch(number)

    def breaks() -> Any:
        for number in range(20):
            if number == 9 and here():
                raise OSError("the disk is gone")
            yield np.float32([number]), np.float32([0])

    def stream(make: Callable[[], Any], **options: Any) -> Any:
        return gd.Pipeline.from_generator(make, global_batch_size=BATCH, **options)

    def loop(make: Callable[[], Any], **options: Any) -> int:
        return sum(1 for _ in stream(make, **options).prefetch(0).distribute(where))

    return {
        "a sequence": lambda: _losses(model, Sequence(late=False)),
        "a sequence, from its second epoch on": lambda: _losses(model, Sequence(late=True), epochs=2),
        "a generator": lambda: _losses(model, (parts for parts in [_batch(here())] * 3)),
        "a generator that ends": lambda: _losses(model, ends_early()),
        "an evaluation": lambda: model.evaluate((parts for parts in [_batch(here())] * 3), verbose=0),
        "a stream in fit": lambda: _losses(model, stream(permuted)),
        "a stream in a loop": lambda: loop(permuted),
        "a stream of some rows": lambda: loop(lambda: rows(24 + 8 * here())),
        "a stream that breaks on one host": lambda: loop(breaks),
        "alike": lambda: [_losses(model, stream(lambda: rows(20), shuffle=5)), loop(lambda: rows(20))],
    }


def compares_nothing() -> list[Any]:
    """A generator and a stream where nobody may tell anybody anything."""
    import gpudist_core as gd
    from gpudist_core.pipelines import cross_host_check, plan

    def refuse(*args: Any) -> None:
        raise AssertionError(args)

    where, model = means()
    kept = plan.digest_of, cross_host_check._Hosts.check
    plan.digest_of, cross_host_check._Hosts.check = refuse, refuse  # type: ignore[assignment]
    try:
        stream = gd.Pipeline.from_generator(lambda: zip(np.zeros((10, 1), "float32"), strict=True), global_batch_size=5)
        return [_losses(model, iter(Numbers()), steps_per_epoch=2), sum(1 for _ in stream.distribute(where))]
    finally:
        plan.digest_of, cross_host_check._Hosts.check = kept


def goes_on_after_an_error() -> list[Any]:
    """A map that fails on the rows of the second host: whether each host goes on by itself, and from a position of both."""
    import tensorflow as tf

    import gpudist_core as gd

    def check(x: Any) -> Any:
        tf.debugging.assert_less(x, 4.0)
        return x

    data = gd.Pipeline.from_arrays(np.arange(8, dtype="float32"), global_batch_size=8).map(check)
    state, batches, found = data.state(), data.distribute(strategy()), []
    for act in (lambda: None, lambda: None, lambda: data.restore(state)):
        act()
        try:
            found.append(len(next(iter(batches))))
        except Exception as error:
            found.append(str(error) if isinstance(error, gd.UsageError) else type(error).__name__)
    return found
