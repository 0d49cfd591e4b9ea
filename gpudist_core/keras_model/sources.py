"""Where the batches of fit, evaluate and predict come from: whatever Keras takes, and pipelines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gpudist_core.errors import WrongUse
from gpudist_core.keras_model import batches
from gpudist_core.keras_model.seeds import derived
from gpudist_core.pipelines import Pipeline
from gpudist_core.pipelines.alike import Alike, digest_of
from gpudist_core.pipelines.distributed import Distributed
from gpudist_core.replicas import replicas_of
from gpudist_core.upstream import datasets, trainer


class FromPipeline:
    """The batches of a pipeline.

    Args:
        pipeline: The pipeline.
        strategy: Whose replicas get them.
        moves: Whether its position goes on from epoch to epoch; else each epoch is the first one again.
    """

    def __init__(self, pipeline: Pipeline, strategy: Any, *, moves: bool) -> None:
        self.pipeline: Any = pipeline
        # What trains keeps every replica busy; what judges or tells takes the batches that were asked for.
        self._distributed = pipeline.distribute(strategy, allow_idle=not moves)
        self._moves = moves
        self.num_batches = pipeline.num_batches

    @property
    def spec(self) -> Any:
        """The structure of a batch."""
        return self._distributed.element_spec

    @property
    def first(self) -> int:
        """The number of the next batch in its epoch."""
        return int(self._distributed.state()["batch"]) if self._moves else 0

    def epoch(self) -> Iterator[Any]:
        """The batches of an epoch, or what is left of it."""
        return iter(self._distributed) if self._moves else self._distributed.epoch_batches()

    def begin(self) -> None:
        """An epoch begins."""

    def end(self) -> None:
        """An epoch has ended."""


class FromArrays(FromPipeline):
    """The batches of arrays, whose position can be saved and restored.

    Args:
        make: Makes the pipeline, of a seed.
        strategy: Whose replicas get the batches.
        seed: Of the order: that of this `fit`, unless another one is gone on from.
        moves: As in `FromPipeline`.
    """

    def __init__(self, make: Callable[[int], Pipeline], strategy: Any, *, seed: int, moves: bool) -> None:
        super().__init__(make(seed), strategy, moves=moves)
        self._position = self.pipeline
        self._make, self._strategy = make, strategy
        self.pipeline = self

    def state(self) -> dict[str, Any]:
        """The position, the seed included."""
        return dict(self._position.state())

    def restore(self, state: Any) -> None:
        """Go on in the order of the run that was saved: without a seed of the user's this run has drawn another one.

        Args:
            state: What `state` returned, in this process or another.
        """
        self._position = self._make(int(state.get("seed", 0)))
        self._position.restore(state)
        self._distributed = self._position.distribute(self._strategy)


class FromAdapter:
    """The batches of a reader of Keras's own: every host reads all of them and keeps the rows of its replicas.

    Args:
        adapter: The reader.
        strategy: Whose replicas get them.
        seed: Of the order; None where the reader does not shuffle.

    Attributes:
        dataset: Its batches.
        seed: The same.
    """

    pipeline = None
    first = 0

    def __init__(self, adapter: Any, strategy: Any, seed: int | None) -> None:
        self._adapter = adapter
        self._strategy = strategy
        self.seed = seed
        self.dataset = trainer.dataset_of(adapter, seed)
        self._begun = 0
        self.num_batches = adapter.num_batches

    @property
    def spec(self) -> Any:
        """The structure of a batch."""
        import tensorflow as tf

        return tf.nest.map_structure(
            lambda spec: None if isinstance(spec, tf.OptionalSpec) else spec, self.dataset.element_spec
        )

    def epoch(self) -> Iterator[Any]:
        """The batches, on the replicas."""
        if replicas_of(self._strategy).num_hosts == 1 or not trainer.is_made_in_python(self._adapter):
            return (batches.distributed(self._strategy, batch) for batch in self.dataset)
        known = ((digest_of(batches.leaves_of(b)), batches.distributed(self._strategy, b)) for b in self.dataset)
        return Alike(known, self._strategy, type(self._adapter).__name__)

    def begin(self) -> None:
        """An epoch begins."""
        self._adapter.on_epoch_begin()
        if self._begun and self.seed is not None and trainer.arrays_of(self._adapter) is not None:
            # Keras's own shuffle of arrays, once it has a seed, is the same in each epoch.
            self.dataset = trainer.dataset_of(self._adapter, derived(self.seed, self._begun))
        self._begun += 1

    def end(self) -> None:
        """An epoch has ended."""
        self._adapter.on_epoch_end()


class FromDistributed:
    """The batches of a dataset that the user has distributed.

    Args:
        dataset: A `tf.distribute.DistributedDataset`.
        strategy: The strategy.
    """

    pipeline = None
    first = 0

    def __init__(self, dataset: Any, strategy: Any) -> None:
        self._dataset = dataset
        self._strategy = strategy
        self._taken: Any = None
        try:
            self.num_batches: int | None = len(dataset)
        except TypeError:
            self.num_batches = None

    @property
    def spec(self) -> Any:
        """The structure of a batch, from the first one."""
        iterator = iter(self._dataset)
        first = next(iterator)
        self._taken = _chain(first, iterator)
        return batches.spec_of(self._strategy, first)

    def epoch(self) -> Iterator[Any]:
        """The batches as they are; nothing of the first epoch is lost by having looked at it."""
        taken, self._taken = self._taken, None
        return iter(self._dataset) if taken is None else taken

    def begin(self) -> None:
        """An epoch begins."""

    def end(self) -> None:
        """An epoch has ended."""


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


Source = FromPipeline | FromAdapter | FromDistributed


def source_of(strategy: Any, data: dict[str, Any], *, training: bool, seed: int) -> Source:
    """The batches of what was given to fit, evaluate or predict.

    Args:
        strategy: Whose replicas get them.
        data: `x`, `y`, `sample_weight`, `batch_size`, `steps_per_epoch`, `shuffle`, `class_weight`.
        training: Whether a pipeline goes on from epoch to epoch.
        seed: Of the order of arrays, the same on all hosts.

    Returns:
        The source.

    Raises:
        WrongUse: Where something is given beside a pipeline that the pipeline has itself, a pipeline is distributed already, or
            a dataset is shuffled by each host in an order of its own.
    """
    import tensorflow as tf

    x = data["x"]
    if x is None:
        raise WrongUse("fit, evaluate and predict need data", "Give arrays, a tf.data.Dataset or a gd.Pipeline.", x=None)
    if isinstance(x, Pipeline):
        return FromPipeline(_of_pipeline(x, data), strategy, moves=training)
    if isinstance(x, Distributed):
        raise WrongUse(
            "A model is given a pipeline, which it distributes itself", "Leave out its distribute(...).", x=type(x).__name__
        )
    if isinstance(x, tf.distribute.DistributedDataset):
        return FromDistributed(x, strategy)
    if isinstance(x, tf.data.Dataset):
        _check_that_hosts_shuffle_alike(x, strategy)
        data = data | {"shuffle": False}
    adapter = trainer.data_adapter(**data)
    held = trainer.arrays_of(adapter)
    if held is not None and data.get("shuffle") in (None, True, False) and all(map(_dense, tf.nest.flatten(held[0]))):
        make = functools.partial(_of_arrays, *held, bool(data.get("shuffle")))
        return FromArrays(make, strategy, seed=seed, moves=training)
    return FromAdapter(adapter, strategy, seed if training and data.get("shuffle") else None)


def _check_that_hosts_shuffle_alike(dataset: Any, strategy: Any) -> None:
    """Each host reads the whole dataset and keeps its rows: in another order they would be others' too, or nobody's."""
    num_hosts = replicas_of(strategy).num_hosts
    if num_hosts > 1 and "unseeded" in datasets.shuffles_that_vary(dataset):
        raise WrongUse(
            "A dataset has the same order on all hosts",
            "Give its shuffle a seed: dataset.shuffle(n, seed=SEED); or call keras.utils.set_random_seed(SEED) before.",
            shuffle="without a seed",
            hosts=num_hosts,
        )


def _of_pipeline(pipeline: Pipeline, data: dict[str, Any]) -> Pipeline:
    given = {name: data[name] for name in ("y", "sample_weight", "batch_size") if data.get(name) is not None}
    if given:
        raise WrongUse(
            "A pipeline has targets, weights and batches of its own",
            "Put them into the pipeline.",
            **{name: value if name == "batch_size" else type(value).__name__ for name, value in given.items()},
        )
    weights = data.get("class_weight")
    # As in Keras, a class that is not named counts as it is.
    return pipeline if weights is None else pipeline.weights(weights, otherwise=1.0)


def _of_arrays(arrays: Any, batch_size: int, shuffle: bool, seed: int) -> Pipeline:
    import tensorflow as tf

    prepared = tf.nest.map_structure(_prepared, arrays)
    return Pipeline.from_arrays(prepared, global_batch_size=batch_size, shuffle=shuffle, seed=seed)


def _dense(leaf: Any) -> bool:
    import tensorflow as tf

    return isinstance(leaf, (np.ndarray, tf.Tensor)) and getattr(leaf.dtype, "kind", "") != "O"


def _prepared(leaf: Any) -> Any:
    """Floats in the type that Keras computes in, as its own reader of arrays makes them."""
    import keras

    array = leaf if isinstance(leaf, np.ndarray) else leaf.numpy()
    return (
        array.astype(keras.config.floatx()) if array.dtype.kind == "f" and array.dtype.name != keras.config.floatx() else array
    )
