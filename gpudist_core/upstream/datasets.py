"""Inspect TensorFlow's datasets: whether each iteration yields the same examples in the same order, and what is read ahead."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def shuffles_that_vary(dataset: Any) -> list[str]:
    """List the shuffles in a dataset that give another order in another iteration, or in another process.

    Args:
        dataset: A `tf.data.Dataset`.

    Returns:
        One word for each: "unseeded" or "reshuffled".
    """
    from tensorflow.python.data.ops.shuffle_op import _ShuffleDataset

    shuffles = []
    if isinstance(dataset, _ShuffleDataset):
        seeds = [int(tf.get_static_value(seed) or 0) for seed in (dataset._seed, dataset._seed2)]
        if not any(seeds):
            shuffles.append("unseeded")
        elif dataset._reshuffle_each_iteration:
            shuffles.append("reshuffled")
    for part in dataset._inputs():
        shuffles += shuffles_that_vary(part)
    return shuffles


def without_prefetch(dataset: Any) -> Any:
    """Return a dataset that reads each element on request, and none ahead.

    Args:
        dataset: A `tf.data.Dataset`. Prefetches at its end are removed.

    Returns:
        The dataset.
    """
    from tensorflow.python.data.ops.prefetch_op import _PrefetchDataset

    while isinstance(dataset, _PrefetchDataset):
        (dataset,) = dataset._inputs()
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # else tf.data puts one at the end by itself
    return dataset.with_options(options)
