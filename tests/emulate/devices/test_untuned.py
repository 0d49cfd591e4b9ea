"""Iterators of a program have no tuning thread to wait for, which on a busy machine takes them up to a minute."""

from __future__ import annotations

from typing import Any

from tests.emulate.devices.hosts import Hosts

ITERATORS = 6


def threads_of(dataset: Any) -> int:
    """How many threads more this process has while several iterators of the dataset are open."""
    import psutil

    iter(dataset).get_next()  # what TensorFlow starts once
    before = psutil.Process().num_threads()
    iterators = [iter(dataset) for _ in range(ITERATORS)]
    for iterator in iterators:
        iterator.get_next()
    return psutil.Process().num_threads() - before


def test_a_dataset_has_no_tuning_thread_unless_the_program_asks_for_it(run: Hosts) -> None:
    def program() -> tuple[int, int, list[Any]]:
        import tensorflow as tf

        dataset = tf.data.Dataset.range(100)
        asked = tf.data.Options()
        asked.autotune.enabled = True
        untuned = threads_of(dataset)
        return untuned, threads_of(dataset.with_options(asked)), list(dataset.batch(50).as_numpy_iterator())

    untuned, tuned, rows = run(program)
    assert tuned >= untuned + ITERATORS
    assert [list(one) for one in rows] == [list(range(50)), list(range(50, 100))]


def test_the_iterators_of_the_devices_are_untuned_too(run: Hosts) -> None:
    """A strategy makes one iterator for each device, of datasets of its own; options of the program do not reach them."""

    def program() -> list[Any]:
        import tensorflow as tf

        from emulate import upstream

        cls = upstream.dataset_class()
        ours, seen = cls._apply_debug_options, []

        def watched(self: Any) -> Any:
            dataset = ours(self)
            seen.append((type(self).__name__, dataset.options().autotune.enabled))
            return dataset

        cls._apply_debug_options = watched
        strategy = tf.distribute.MirroredStrategy()
        for _ in strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4)):
            pass
        return seen

    seen = run(program, devices=2)
    assert len(seen) == 3  # the program's, and one for each device
    assert {enabled for _, enabled in seen} == {False}
