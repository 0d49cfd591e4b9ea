from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

from emulate.recorder import epochs


def measured(dataset: Any) -> dict[str, Any]:
    written: list[Any] = []
    epochs.measure_input_rate(dataset, written.append)
    (event,) = written
    return dict(event)


def test_all_examples_after_the_first_batch_are_counted() -> None:
    event = measured(tf.data.Dataset.range(23).batch(5))
    assert (event["event"], event["first"], event["elements"], event["examples"]) == ("input", 5, 4, 18)
    assert event["seconds"] > 0
    assert event["cores"] >= 1


def test_an_endless_dataset_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "_SECONDS", 0.01)
    assert measured(tf.data.Dataset.range(8).repeat().batch(4))["elements"] >= 1


def test_elements_that_are_no_batches_are_one_example_each() -> None:
    assert measured(tf.data.Dataset.range(4))["examples"] == 3


def test_what_cannot_be_measured_says_why() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("no more")

    dataset = tf.data.Dataset.from_generator(broken, output_signature=tf.TensorSpec([], tf.int32))
    assert measured(None) == {"event": "input", "failure": "gpudist saw no tf.data pipeline"}
    assert measured(tf.data.Dataset.range(3).batch(4)) == {"event": "input", "failure": "it has one batch"}
    assert measured(dataset)["failure"].startswith("reading it once more raises ")


def test_data_that_do_not_come_a_second_time_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "_LONGEST", 0.1)
    is_over = threading.Event()

    def waits() -> Iterator[int]:
        is_over.wait(60)
        yield 1

    dataset = tf.data.Dataset.from_generator(waits, output_signature=tf.TensorSpec([], tf.int32))
    assert measured(dataset) == {"event": "input", "failure": "reading it once more takes more than 0.1 s"}
    is_over.set()
