"""How Keras's loops go over the batches, and what they ask a model for."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest

from tests.core.conftest import OnHosts


def _epochs(stride: int, steps: int, counted: bool) -> tuple[list[int], int]:
    """How many of five batches each of four epochs has, in calls of so many, and how often a warning came."""
    from gpudist_core.keras_model.sources import Epochs

    class Five:
        num_batches, first = 5 if counted else None, 0

        def begin(self) -> None: ...

        def end(self) -> None: ...

        def epoch(self) -> Any:
            return iter(range(5))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        epochs, found = Epochs(Five(), steps, stride), []  # type: ignore[arg-type]
        for _ in range(4):
            found.append(0)
            with epochs.catch_stop_iteration():
                for _, _, batches in epochs:
                    taken = len(list(itertools.islice(batches, stride)))
                    if not taken:
                        raise StopIteration
                    found[-1] += taken
    return found, len(told)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("stride", [1, 3])
def test_an_epoch_that_ends_with_the_data_is_followed_by_one_from_the_first_batch(
    on_hosts: OnHosts, stride: int, counted: bool
) -> None:
    within, at_end, beyond = (on_hosts("1x1", _epochs, stride, steps, counted)[0] for steps in (3, 5, 6))
    assert within == ([3, 2, 3, 2], 2)
    assert at_end[0] == [5, 5, 5, 5]  # as in Keras, which begins the data anew
    assert at_end[1] == 0 or stride == 3  # a call of three that gets two does not know whether more were meant
    assert beyond == ([5, 5, 5, 5], 4)


def _names_a_metric_twice() -> list[float]:
    import keras

    import gpudist_core as gd

    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.tracked = keras.layers.Dense(1), keras.metrics.Mean(name="tracked")

        def call(self, x: Any) -> Any:
            return self.layer(x)

        @property
        def metrics(self) -> list[Any]:
            return [*super().metrics, self.tracked]

        def train_step(self, data: Any) -> dict[str, Any]:
            logs: dict[str, Any] = super().train_step(data)
            self.tracked.update_state(data[0][:, 0])
            return logs | {"tracked": self.tracked.result()}

    strategy = gd.make_strategy()
    with strategy.scope():
        model = gd.distributed(Own())
        model.compile("sgd", "mse")
    x = np.arange(10, dtype="float32").reshape(10, 1)
    return [float(value) for value in model.fit(x, x, batch_size=4, verbose=0).history["tracked"]]


def test_a_model_may_name_a_metric_twice(on_hosts: OnHosts) -> None:
    assert on_hosts("1x2", _names_a_metric_twice) == [[4.5]]
