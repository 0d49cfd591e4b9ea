"""What a TensorFlow dataset does anew in each iteration, and so what has to be done for those of a run that was interrupted."""

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
    """What of a dataset is other in another iteration.

    Args:
        dataset: A `tf.data.Dataset`.

    Returns:
        "nothing"; "one shuffle", whose next order is drawn when an iterator is made, whether it is read or not; or "more",
        which is also what is not known.
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
    """Whether its functions give the same for the same rows, as far as is known."""
    operations = [op for wrapper in dataset._functions() for op in wrapper.function.graph.get_operations()]
    return not any(op.op_def.is_stateful for op in operations)
