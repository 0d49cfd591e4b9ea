"""Inspect TensorFlow's datasets: what each iteration repeats, to read data again, in which order, and what is read ahead."""

from __future__ import annotations

from typing import Any, Literal

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


# Each makes the iterator of its input when its own is made, and once: TensorFlow 2.21, tests/core/checkpoints/test_upstream.py.
_ONCE = {
    "_BatchDataset",
    "_FilterDataset",
    "_MapDataset",
    "_OptionsDataset",
    "_PaddedBatchDataset",
    "_ParallelBatchDataset",
    "_ParallelMapDataset",
    "_PrefetchDataset",
    "_ShardDataset",
    "_SkipDataset",
    "_TakeDataset",
}
_ALIKE = {
    *_ONCE,
    "CacheDataset",
    "FixedLengthRecordDatasetV2",
    "TFRecordDatasetV2",
    "TextLineDatasetV2",
    "_ConcatenateDataset",
    "_RangeDataset",
    "_RepeatDataset",
    "_ShuffleDataset",
    "_TensorDataset",
    "_TensorSliceDataset",
    "_ZipDataset",
}


def what_varies(dataset: Any) -> Literal["nothing", "one shuffle", "more"]:
    """Return what differs between iterations of a dataset.

    Args:
        dataset: A `tf.data.Dataset`.

    Returns:
        "nothing"; "one shuffle", whose next order is drawn when an iterator is made, whether it is read or not; or "more", also
        for what is unknown.
    """
    if not shuffles_that_vary(dataset):
        return "nothing" if _is_alike(dataset) else "more"
    while type(dataset).__name__ in _ONCE and _is_pure(dataset):
        [dataset] = dataset._inputs()
    is_shuffle = type(dataset).__name__ == "_ShuffleDataset"
    below = dataset._inputs()
    alike = is_shuffle and not any(map(shuffles_that_vary, below)) and all(map(_is_alike, below))
    return "one shuffle" if alike else "more"


def _is_alike(dataset: Any) -> bool:
    return type(dataset).__name__ in _ALIKE and _is_pure(dataset) and all(map(_is_alike, dataset._inputs()))


def _is_pure(dataset: Any) -> bool:
    """Return whether its functions return the same for the same examples, as far as it is known."""
    operations = [op for wrapper in dataset._functions() for op in wrapper.function.graph.get_operations()]
    return not any(op.op_def.is_stateful for op in operations)
