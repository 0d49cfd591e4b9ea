"""The number of replicas, where one device has the rows of all: it makes the batch, and has nothing to make up for."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulate.cluster import Cluster, Preload
from emulate.interventions import tell_numbers
from emulate.interventions.numbers import ReplicaCount
from emulate.recorder import Replay

numbers = st.integers(-50, 50) | st.floats(-50, 50, allow_nan=False)
MULTIPLY: tuple[Callable[[Any, Any], Any], ...] = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod)
COMPARE: tuple[Callable[[Any, Any], Any], ...] = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)


@given(numbers, st.integers(1, 64), st.sampled_from((*MULTIPLY, *COMPARE)))
def test_whatever_python_makes_larger_with_it_is_as_large_as_on_the_replicas(other: Any, number: int, apply: Any) -> None:
    assert apply(other, ReplicaCount(number)) == apply(other, number)
    if other:
        assert apply(ReplicaCount(number), other) == apply(number, other)


@given(numbers, st.integers(1, 64))
def test_what_it_divides_is_as_on_one_device(other: Any, number: int) -> None:
    assert other / ReplicaCount(number) == other
    assert np.float32(other) / ReplicaCount(number) == np.float32(other)
    assert (np.array([other]) / ReplicaCount(number) == [other]).all()


@given(st.integers(1, 64))
def test_it_counts_indexes_and_prints_like_the_number(number: int) -> None:
    one = ReplicaCount(number)
    assert (list(range(one)), f"{one} {one:03d}") == (list(range(number)), f"{number} {number:03d}")
    assert (math.sqrt(one), np.sqrt(one), np.zeros(one).shape) == (math.sqrt(number), np.sqrt(number), (number,))
    assert {number: "known"}[one] == "known"  # type: ignore[index]
    assert (np.arange(3) * one).tolist() == [0, number, 2 * number]


@pytest.fixture
def host(preload: Preload) -> Any:
    with Cluster("1x1", preload=preload) as cluster:
        yield lambda function: cluster.run(function)[0]


def test_a_program_that_is_told_so_has_the_batch_of_all_and_the_loss_of_one_device(host: Any) -> None:
    def look() -> Any:
        import keras
        import tensorflow as tf

        tell_numbers(Replay(Path(), batch_of=4))
        number = tf.distribute.get_strategy().num_replicas_in_sync
        x = tf.constant([8.0])
        rows = tf.constant([[1.0], [1.0]]), tf.constant([[3.0], [3.0]])
        return {
            "batch": [int(row.shape[0]) for row in tf.data.Dataset.range(64).batch(8 * number)],
            "divided": [float((x / number)[0]), float((x * (1 / number))[0]), float((x / tf.cast(number, tf.float32))[0])],
            "one of a tensor": [float((number * x)[0]), float((x * number)[0]), float(tf.divide(x, number)[0])],
            "rate": round(float(keras.optimizers.SGD(0.1 * number).learning_rate), 6),
            "scaled": [float(tf.nn.scale_regularization_loss(6.0)), float(keras.losses.MeanSquaredError()(*rows))],
        }

    assert host(look) == {
        "batch": [32, 32],
        "divided": [8.0, 8.0, 8.0],
        "one of a tensor": [8.0, 8.0, 8.0],
        "rate": 0.4,
        "scaled": [6.0, 4.0],
    }


def test_a_program_that_is_told_of_workers_finds_them_in_its_environment_and_tensorflow_does_not(host: Any) -> None:
    def look() -> Any:
        import os

        import tensorflow as tf

        os.environ["TF_CONFIG"] = '{"cluster": {"worker": ["here:1"]}, "task": {"type": "worker", "index": 0}}'
        tell_numbers(Replay(Path(), workers=3))
        asked = [os.environ["TF_CONFIG"], os.environ.get("TF_CONFIG"), os.getenv("TF_CONFIG"), os.environ.copy()["TF_CONFIG"]]
        workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
        known = tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec().as_dict()
        try:
            tf.train.ClusterSpec({"worker": workers})
        except RuntimeError as error:
            refused = str(error)
        return len(set(asked)), workers[0], len(workers), known, refused, os.environ.get("HOME"), os.environ["PATH"]

    same, first, many, known, refused, *others = host(look)
    assert (same, many, known) == (1, 3, {"worker": [first]})
    assert refused == "The program makes a cluster of TF_CONFIG itself, so it cannot be told of other workers."
    assert all(others)


def test_without_tf_config_there_is_nothing_to_tell_of_workers(host: Any) -> None:
    def look() -> Any:
        import os

        os.environ.pop("TF_CONFIG", None)
        tell_numbers(Replay(Path(), workers=3))
        return os.environ.get("TF_CONFIG")

    assert host(look) is None
