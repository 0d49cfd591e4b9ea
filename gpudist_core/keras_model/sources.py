"""Read the batches of fit, evaluate and predict from everything that Keras takes, and from pipelines, epoch by epoch.

A global batch is cut into one part for each replica of this host.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import secrets
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gpudist_core.errors import UsageError
from gpudist_core.pipelines import Pipeline
from gpudist_core.pipelines.cross_host_check import Alike, digest_of, of_first_host
from gpudist_core.pipelines.distributed import Distributed
from gpudist_core.pipelines.hashing import words
from gpudist_core.pipelines.shares import cuts, placed
from gpudist_core.replicas import per_replica, replicas_of
from gpudist_core.upstream import datasets, trainer


@dataclass(frozen=True)
class Placed:
    """Mark a batch that is already on the replicas. With one replica per host it consists of plain tensors.

    Attributes:
        value: The batch, as an argument for `Strategy.run`.
    """

    value: Any


def distributed(strategy: tf.distribute.Strategy, batch: Any) -> Any:
    """Return a batch as an argument for `Strategy.run`.

    Args:
        strategy: The strategy.
        batch: A global batch, equal on all hosts: arrays, tensors with the examples along their first axes, None; or a
            distributed batch (`Placed`, or of `PerReplica`).

    Returns:
        The structure with a `PerReplica` in place of each tensor. With one replica these are tensors.

    Raises:
        UsageError: If its parts have different numbers of examples.
    """
    if isinstance(batch, Placed):
        return batch.value
    batch = tf.nest.map_structure(_value, batch)
    leaves = tf.nest.flatten(batch)
    if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves):
        return batch
    replicas = replicas_of(strategy)
    if replicas.total == 1:
        return tf.nest.map_structure(lambda v: tf.convert_to_tensor(v) if isinstance(v, np.ndarray) else v, batch)
    leaves = [leaf for leaf in leaves if leaf is not None]
    rows = {_rows(leaf) for leaf in leaves}
    if len(rows) != 1:
        raise UsageError("All parts of a batch must have the same number of examples", "Fix the data.", rows=sorted(rows))
    parts = placed(leaves, cuts(rows.pop(), replicas.total, replicas.local), replicas.devices)
    values = iter(per_replica(strategy, parts))
    return tf.nest.map_structure(lambda leaf: None if leaf is None else next(values), batch)


def _value(leaf: Any) -> Any:
    """Return a leaf of a batch. Keras's generators use an empty Optional in place of None."""
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    if isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor, tf.distribute.DistributedValues, np.ndarray)):
        return leaf
    return np.asarray(leaf)


def leaves_of(batch: Any) -> list[Any]:
    """Return the dense tensors of a batch that is not distributed, including those inside ragged and sparse tensors."""
    values = tf.nest.map_structure(_value, batch)
    return [leaf for leaf in tf.nest.flatten(values, expand_composites=True) if leaf is not None]


def _rows(leaf: Any) -> int:
    if len(leaf.shape) == 0:
        raise UsageError("All parts of a batch must have examples along their first axis", "Fix the data.", shape=())
    return int(leaf.shape[0])


def row_counts(strategy: tf.distribute.Strategy, batch: Any) -> tuple[int, ...] | None:
    """Return the number of examples of each replica, if this host has all replicas.

    Args:
        strategy: The strategy.
        batch: A distributed batch.

    Returns:
        One number for each replica; None on several hosts.
    """
    for leaf in tf.nest.flatten(batch):
        if leaf is None:
            continue
        parts = strategy.experimental_local_results(leaf)
        if len(parts) == strategy.num_replicas_in_sync and all(
            isinstance(part, tf.Tensor) and part.shape.rank for part in parts
        ):
            return tuple(int(part.shape[0]) for part in parts)
        return None
    return None


def spec_of(strategy: tf.distribute.Strategy, batch: Any) -> Any:
    """Return shapes and dtypes of a distributed batch, with one example if this host's first replica has none.

    Args:
        strategy: The strategy.
        batch: The batch.

    Returns:
        The structure with a `tf.TensorSpec` in place of each tensor.
    """

    def spec(leaf: Any) -> Any:
        if leaf is None:
            return None
        part = strategy.experimental_local_results(leaf)[0]
        return tf.TensorSpec([part.shape[0] or 1, *part.shape[1:]], part.dtype)

    return tf.nest.map_structure(spec, batch)


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
            return (distributed(self._strategy, batch) for batch in self.dataset)
        digested = ((digest_of(leaves_of(b)), distributed(self._strategy, b)) for b in self.dataset)
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
        return spec_of(self._strategy, first)

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
    is_dense = held is not None and all(
        isinstance(leaf, (np.ndarray, tf.Tensor)) and getattr(leaf.dtype, "kind", "") != "O"
        for leaf in tf.nest.flatten(held[0])
    )
    if held is not None and is_dense and data.get("shuffle") in (None, True, False):
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
    def in_floatx(leaf: Any) -> Any:  # as Keras's own adapter of arrays converts floats
        array = leaf if isinstance(leaf, np.ndarray) else leaf.numpy()
        return array.astype(keras.config.floatx(), copy=False) if array.dtype.kind == "f" else array

    return Pipeline.from_arrays(
        tf.nest.map_structure(in_floatx, arrays), global_batch_size=batch_size, shuffle=shuffle, seed=seed
    )


class Epochs:
    """Iterate one epoch: (first step, last step, iterator of batches) for each call of the compiled function.

    Args:
        source: The source of the batches.
        steps_per_epoch: Number of batches in an epoch; None for all. The next epoch continues after them. At the end of the
            data, it starts again.
        steps_per_execution: Number of batches in one call.
    """

    def __init__(self, source: Source, steps_per_epoch: int | None, steps_per_execution: int) -> None:
        self.source = source
        self.steps_per_epoch = steps_per_epoch
        self._stride = steps_per_execution
        self._iterator: _Batches | None = None
        self._counted: int | None = None
        self.step = 0
        self.first_step = 0

    @property
    def num_batches(self) -> int | None:
        """Return the number of batches in an epoch, as far as it is known."""
        return self.steps_per_epoch or self.source.num_batches or self._counted

    def reset(self) -> None:
        """Start the data again in the next epoch."""
        self._iterator = None

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        self.source.begin()
        if self._iterator is None or self.steps_per_epoch is None or self._iterator.is_empty():
            self.first_step = self.first_step or (0 if self.steps_per_epoch else self.source.first)
            number = self.source.num_batches
            left = None if number is None else number - self.source.first
            self._iterator = _Batches(map(Placed, self.source.epoch()), left)
        self.step, self.first_step = self.first_step, 0
        stop = self.steps_per_epoch or self.source.num_batches
        while stop is None or self.step < stop:
            step, self.step = self.step, self.step + self._stride
            yield trainer.epoch_item(step, step + self._stride - 1, self._iterator)
            if self.steps_per_epoch and self._iterator.has_ended:  # within a call of several batches, which Keras does not tell
                self._run_out()
                return
        self.source.end()

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """End the epoch if the data ends early. Warn if steps were promised."""
        try:
            yield
        except (StopIteration, tf.errors.OutOfRangeError):
            if self.steps_per_epoch is None:
                self._counted = max(self.step - self._stride, 0)
            self._run_out()

    def _run_out(self) -> None:
        """Note the end of the data: the next epoch starts again."""
        if self.steps_per_epoch:
            warnings.warn(
                "Your input ran out of data; interrupting training. Make sure that it can generate at least "
                "`steps_per_epoch * epochs` batches.",
                stacklevel=3,
            )
        self._iterator = None
        self.source.end()


class _Batches:
    """Iterate batches, and know whether any is left.

    Args:
        batches: The batches.
        number: Their number; None if it is unknown.
    """

    def __init__(self, batches: Iterator[Any], number: int | None) -> None:
        self._batches = batches
        self._left = number
        self._ahead: list[Any] = []
        self.has_ended = False

    def is_empty(self) -> bool:
        """Return whether no batch is left. If the number is unknown, fetch the next batch and keep it."""
        if self._left is not None:
            return self._left <= 0
        with contextlib.suppress(StopIteration):
            self._ahead = self._ahead or [next(self._batches)]
        return not self._ahead

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        if self._ahead:
            return self._ahead.pop()
        try:
            batch = next(self._batches)
        except StopIteration:
            self.has_ended = True
            raise
        self._left = None if self._left is None else self._left - 1
        return batch


def common_seed(strategy: Any, number: int) -> int:
    """Return a seed for one of several uses.

    Args:
        strategy: The strategy. All its hosts must ask.
        number: The number of the use.

    Returns:
        A function of the seed from `keras.utils.set_random_seed` on the first host, and of the number. Without such a seed, the
        first host draws one.
    """
    user_seed = trainer.seed()
    seed = of_first_host(strategy, secrets.randbits(32) if user_seed is None else int(user_seed))
    return derived(seed, number)


def derived(seed: int, number: int) -> int:
    """Derive a seed for each use from one seed.

    Args:
        seed: The seed.
        number: The number of the use.

    Returns:
        An integer below 2**31.
    """
    return int(words(seed, number)[0]) >> 33
