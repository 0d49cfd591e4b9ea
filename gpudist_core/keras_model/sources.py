"""Read the batches of fit, evaluate and predict from everything that Keras takes, and from pipelines."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.keras_model import batches
from gpudist_core.keras_model.seeds import derived
from gpudist_core.pipelines import Pipeline
from gpudist_core.pipelines.cross_host_check import Alike, digest_of
from gpudist_core.pipelines.distributed import Distributed
from gpudist_core.replicas import replicas_of
from gpudist_core.upstream import datasets, trainer


class _Source:
    """Provide the batches of each epoch."""

    pipeline: Any = None

    def begin(self) -> None:
        """Start an epoch."""

    def end(self) -> None:
        """End an epoch."""


class FromPipeline(_Source):
    """Read batches from a pipeline.

    Args:
        pipeline: The pipeline.
        strategy: The strategy whose replicas get the batches.
        moves: Whether its position moves from epoch to epoch. Otherwise each epoch is the first one.
    """

    def __init__(self, pipeline: Pipeline, strategy: tf.distribute.Strategy, *, moves: bool) -> None:
        self.pipeline = pipeline
        # What trains keeps every replica busy; what judges or tells takes the batches that were asked for.
        self._distributed = pipeline.distribute(strategy, allow_idle=not moves)
        self._moves = moves
        self.num_batches = pipeline.num_batches

    @property
    def spec(self) -> Any:
        """Return the structure of a batch."""
        return self._distributed.element_spec

    @property
    def first(self) -> int:
        """Return the number of the next batch in its epoch."""
        return int(self._distributed.state()["batch"]) if self._moves else 0

    def epoch(self) -> Iterator[Any]:
        """Return the batches of an epoch, or its rest."""
        return iter(self._distributed) if self._moves else self._distributed.epoch_batches()


class FromArrays(FromPipeline):
    """Read batches from arrays, with a position that can be saved and restored.

    Args:
        make: A function that makes the pipeline for a seed.
        strategy: The strategy whose replicas get the batches.
        seed: The seed of the order in this `fit`, unless another run is continued.
        moves: As for `FromPipeline`.
    """

    def __init__(self, make: Callable[[int], Pipeline], strategy: tf.distribute.Strategy, *, seed: int, moves: bool) -> None:
        super().__init__(make(seed), strategy, moves=moves)
        self._position = self.pipeline
        self._make, self._strategy = make, strategy
        self.pipeline = self

    def state(self) -> dict[str, Any]:
        """Return the position, including the seed."""
        return dict(self._position.state())

    def restore(self, state: Any) -> None:
        """Continue in the order of the saved run: without a user's seed, this run has drawn another one.

        Args:
            state: The result of `state`, in this process or another.
        """
        self._position = self._make(int(state.get("seed", 0)))
        self._position.restore(state)
        self._distributed = self._position.distribute(self._strategy)


class FromAdapter(_Source):
    """Read batches from a data adapter of Keras: every host reads all batches and keeps the examples of its replicas.

    Args:
        adapter: The data adapter.
        strategy: The strategy whose replicas get the batches.
        seed: The seed of the order; None if the adapter does not shuffle.

    Attributes:
        dataset: Its batches.
        seed: The seed of the order.
    """

    first = 0

    def __init__(self, adapter: Any, strategy: tf.distribute.Strategy, seed: int | None) -> None:
        self._adapter = adapter
        self._strategy = strategy
        self.seed = seed
        self.dataset = trainer.dataset_of(adapter, seed)
        self._begun = 0
        self.num_batches = adapter.num_batches

    @property
    def spec(self) -> Any:
        """Return the structure of a batch."""
        return tf.nest.map_structure(
            lambda spec: None if isinstance(spec, tf.OptionalSpec) else spec, self.dataset.element_spec
        )

    def epoch(self) -> Iterator[Any]:
        """Return the batches, on the replicas."""
        if replicas_of(self._strategy).num_hosts == 1 or not trainer.is_made_in_python(self._adapter):
            return (batches.distributed(self._strategy, batch) for batch in self.dataset)
        digested = ((digest_of(batches.leaves_of(b)), batches.distributed(self._strategy, b)) for b in self.dataset)
        return Alike(digested, self._strategy, type(self._adapter).__name__)

    def begin(self) -> None:
        """Start an epoch."""
        self._adapter.on_epoch_begin()
        if self._begun and self.seed is not None and trainer.arrays_of(self._adapter) is not None:
            # Keras's own shuffle of arrays, once it has a seed, is the same in each epoch.
            self.dataset = trainer.dataset_of(self._adapter, derived(self.seed, self._begun))
        self._begun += 1

    def end(self) -> None:
        """End an epoch."""
        self._adapter.on_epoch_end()


class FromDistributed(_Source):
    """Read the batches of a dataset that the user has distributed.

    Args:
        dataset: A `tf.distribute.DistributedDataset`.
        strategy: The strategy.
    """

    first = 0

    def __init__(self, dataset: Any, strategy: tf.distribute.Strategy) -> None:
        self._dataset = dataset
        self._strategy = strategy
        self._taken: Any = None
        try:
            self.num_batches: int | None = len(dataset)
        except TypeError:
            self.num_batches = None

    @property
    def spec(self) -> Any:
        """Return the structure of a batch, from the first one."""
        iterator = iter(self._dataset)
        first = next(iterator)
        self._taken = itertools.chain([first], iterator)
        return batches.spec_of(self._strategy, first)

    def epoch(self) -> Iterator[Any]:
        """Return the batches unchanged, including the first one, which `spec` has read."""
        taken, self._taken = self._taken, None
        return iter(self._dataset) if taken is None else taken


Source = FromPipeline | FromAdapter | FromDistributed


def source_of(strategy: tf.distribute.Strategy, data: dict[str, Any], *, training: bool, seed: int) -> Source:
    """Return the source of batches for the data given to fit, evaluate or predict.

    Args:
        strategy: The strategy whose replicas get the batches.
        data: `x`, `y`, `sample_weight`, `batch_size`, `steps_per_epoch`, `shuffle`, `class_weight`.
        training: Whether a pipeline moves from epoch to epoch.
        seed: The seed of the order of arrays, equal on all hosts.

    Returns:
        The source.

    Raises:
        UsageError: If an argument is given that a pipeline provides itself, a pipeline is already distributed, or each host
            shuffles a dataset in its own order.
    """
    x = data["x"]
    if x is None:
        raise UsageError("fit, evaluate and predict need data", "Pass arrays, a tf.data.Dataset or a gd.Pipeline.", x=None)
    if isinstance(x, Pipeline):
        return FromPipeline(_of_pipeline(x, data), strategy, moves=training)
    if isinstance(x, Distributed):
        raise UsageError(
            "fit needs the pipeline itself, which it distributes", "Leave distribute(...) out.", x=type(x).__name__
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


def _check_that_hosts_shuffle_alike(dataset: Any, strategy: tf.distribute.Strategy) -> None:
    """Refuse orders that differ between hosts: some examples would be read twice, others never."""
    num_hosts = replicas_of(strategy).num_hosts
    if num_hosts > 1 and "unseeded" in datasets.shuffles_that_vary(dataset):
        raise UsageError(
            "A dataset must have the same order on all hosts",
            "Give its shuffle a seed: dataset.shuffle(n, seed=SEED). Or call keras.utils.set_random_seed(SEED) before.",
            shuffle="without a seed",
            hosts=num_hosts,
        )


def _of_pipeline(pipeline: Pipeline, data: dict[str, Any]) -> Pipeline:
    given = {name: data[name] for name in ("y", "sample_weight", "batch_size") if data.get(name) is not None}
    if given:
        raise UsageError(
            "A pipeline must provide the targets, weights and batches itself",
            "Leave them out of fit, and put them into the pipeline.",
            **{name: value if name == "batch_size" else type(value).__name__ for name, value in given.items()},
        )
    weights = data.get("class_weight")
    # As in Keras, a class that is not named counts as it is.
    return pipeline if weights is None else pipeline.weights(weights, otherwise=1.0)


def _of_arrays(arrays: Any, batch_size: int, shuffle: bool, seed: int) -> Pipeline:
    prepared = tf.nest.map_structure(_prepared, arrays)
    return Pipeline.from_arrays(prepared, global_batch_size=batch_size, shuffle=shuffle, seed=seed)


def _dense(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, tf.Tensor)) and getattr(leaf.dtype, "kind", "") != "O"


def _prepared(leaf: Any) -> Any:
    """Convert floats to Keras's floatx, as its own adapter of arrays does."""
    array = leaf if isinstance(leaf, np.ndarray) else leaf.numpy()
    return (
        array.astype(keras.config.floatx()) if array.dtype.kind == "f" and array.dtype.name != keras.config.floatx() else array
    )
