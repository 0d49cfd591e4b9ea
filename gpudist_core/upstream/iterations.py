"""Find out what a TensorFlow dataset repeats in each iteration, to read the data of an interrupted run again."""

from __future__ import annotations

from typing import Any, Literal

from gpudist_core.upstream.datasets import shuffles_that_vary

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
