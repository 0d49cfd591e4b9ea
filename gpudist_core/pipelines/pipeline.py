"""Define `Pipeline`, the public interface to the data. The order of its calls does not matter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from gpudist_core.errors import UsageError, is_whole
from gpudist_core.pipelines.distributed import Distributed, Rowwise, batch_spec
from gpudist_core.pipelines.mapping import Stage
from gpudist_core.pipelines.plan import Plan, Position, Positioned, Remainder
from gpudist_core.pipelines.sources import ArraySource, DatasetStream, FileRows, FileStream, GeneratorStream, RecordSource
from gpudist_core.pipelines.weighting import Weighting, balancing, by_class, check_weights, checked, label_component, of_classes


class Pipeline(Positioned):
    """Feed examples to the replicas of any strategy, in global batches that are the same on every topology.

    In each epoch every example comes exactly once. Order and augmentation depend on the seed, the epoch and the example only.
    Each replica gets a contiguous share of each global batch (see `shares`). Each method returns a new pipeline at its start.
    The order of the calls does not matter, except among maps and the cache.

    Make one with `from_arrays`, `from_tfrecord`, `from_files`, `from_generator` or `from_dataset`.

    Args:
        plan: What the pipeline does.

    Examples:
        >>> import numpy as np, tensorflow as tf
        >>> from gpudist_core import Pipeline
        >>> x, y = np.arange(10.0), np.arange(10)
        >>> data = Pipeline.from_arrays((x, y), global_batch_size=4, shuffle=True, seed=1).map(lambda x, y: (x / 10, y))
        >>> [len(y) for x, y in data.distribute(tf.distribute.get_strategy())]
        [4, 4, 2]
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, Position())

    @classmethod
    def from_arrays(
        cls, arrays: Any, *, global_batch_size: int, shuffle: bool = False, seed: int = 0, remainder: Remainder = "keep"
    ) -> Pipeline:
        """Make a pipeline from arrays, in memory or mapped from a file (`mmap_mode="r"`). Only the needed examples are read.

        Args:
            arrays: Arrays or tensors with the examples along their first axes, in tuples and dicts.
            global_batch_size: Number of examples in a global batch, over all replicas.
            shuffle: Whether to shuffle all examples in each epoch.
            seed: The seed of everything random in the pipeline.
            remainder: "keep" makes a smaller last batch in an epoch; "drop" leaves those examples out.

        Returns:
            The pipeline.

        Example:
            >>> len(Pipeline.from_arrays({"x": np.zeros((10, 3))}, global_batch_size=4, remainder="drop"))
            2
        """
        return cls._of(ArraySource(arrays), global_batch_size, seed, remainder, shuffle)

    @classmethod
    def from_tfrecord(
        cls,
        files: Any,
        parse: Callable[..., Any] | None = None,
        *,
        global_batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        remainder: Remainder = "keep",
    ) -> Pipeline:
        """Make a pipeline from uncompressed TFRecord files. Each host reads all headers once, then only the records it needs.

        Args:
            files: A path, or several paths in the order of their records. There may be fewer files than hosts.
            parse: A function that makes an example from a record (a scalar string tensor), as the first map. None keeps the
                strings.
            global_batch_size: Number of examples in a global batch, over all replicas.
            shuffle: Whether to shuffle all records of all files in each epoch.
            seed: The seed of everything random in the pipeline.
            remainder: "keep" makes a smaller last batch in an epoch; "drop" leaves those examples out.

        Returns:
            The pipeline.
        """
        pipeline = cls._of(RecordSource(files), global_batch_size, seed, remainder, shuffle)
        return pipeline if parse is None else pipeline.map(parse)

    @classmethod
    def from_files(
        cls,
        files: Any,
        read: Callable[[str], Any],
        *,
        global_batch_size: int,
        row_per_file: bool = False,
        shuffle: bool | int = False,
        seed: int = 0,
        remainder: Remainder = "keep",
    ) -> Pipeline:
        """Make a pipeline from files that your own function reads.

        Args:
            files: The paths.
            read: A function from a path to the examples in the file: arrays with the examples along their first axes. With
                `row_per_file` it returns the one example. Several threads may call it at once.
            global_batch_size: Number of examples in a global batch, over all replicas.
            row_per_file: Whether each file is one example. Then each host reads only the files it needs. Otherwise each host
                reads all files.
            shuffle: With `row_per_file`: whether to shuffle all examples in each epoch. Otherwise: the number of examples in
                the shuffle buffer; each epoch then also has its own order of files.
            seed: The seed of everything random in the pipeline.
            remainder: "keep" makes a smaller last batch in an epoch; "drop" leaves those examples out.

        Returns:
            The pipeline.
        """
        source = FileRows(files, read) if row_per_file else FileStream(files, read)
        return cls._of(source, global_batch_size, seed, remainder, shuffle)

    @classmethod
    def from_generator(
        cls,
        make: Callable[[], Iterable[Any]],
        *,
        global_batch_size: int,
        signature: Any = None,
        rows: int | None = None,
        shuffle: int = 0,
        seed: int = 0,
        remainder: Remainder = "keep",
    ) -> Pipeline:
        """Make a pipeline from a generator. Every host runs all of it and keeps its own examples, before any map.

        Several hosts take each batch together. If a host has read other examples, all hosts raise an error.

        Args:
            make: A function that returns a new iterable of examples. It is called in each epoch and must return the same
                examples in the same order.
            global_batch_size: Number of examples in a global batch, over all replicas.
            signature: The structure of one example, a `tf.TensorSpec` for each component. Default: taken from the first example
                of an extra call of `make`.
            rows: The number of examples. With it the pipeline has a length.
            shuffle: The number of examples in the shuffle buffer; 0 for no shuffle.
            seed: The seed of everything random in the pipeline.
            remainder: "keep" makes a smaller last batch in an epoch; "drop" leaves those examples out.

        Returns:
            The pipeline.

        Raises:
            UsageError: If `make` is not a function.

        Example:
            >>> data = Pipeline.from_generator(lambda: iter(range(5)), global_batch_size=2, rows=5)
            >>> data.num_batches
            3
        """
        if not callable(make):
            raise UsageError(
                "make must be a function that returns a new iterable in each epoch",
                "Pass a function: lambda: zip(x, y).",
                make=type(make).__name__,
            )
        return cls._of(GeneratorStream(make, signature, rows), global_batch_size, seed, remainder, shuffle)

    @classmethod
    def from_dataset(
        cls,
        dataset: tf.data.Dataset,
        *,
        global_batch_size: int,
        batched: bool = False,
        shuffle: int = 0,
        seed: int = 0,
        remainder: Remainder = "keep",
    ) -> Pipeline:
        """Make a pipeline from a `tf.data.Dataset`. Every host runs all of it, keeps its own examples, and maps those.

        Several hosts take each batch together. If a host has read other examples, all hosts raise an error.

        Args:
            dataset: A finite dataset that yields the same examples in the same order each time.
            global_batch_size: Number of examples in a global batch, over all replicas. Batches of the dataset are re-cut.
            batched: Whether the elements of the dataset are batches.
            shuffle: The number of examples in the shuffle buffer; 0 for no shuffle.
            seed: The seed of everything random in the pipeline.
            remainder: "keep" makes a smaller last batch in an epoch; "drop" leaves those examples out.

        Returns:
            The pipeline.
        """
        return cls._of(DatasetStream(dataset, batched), global_batch_size, seed, remainder, shuffle)

    @classmethod
    def _of(cls, source: Any, global_batch_size: int, seed: int, remainder: Remainder, shuffle: bool | int) -> Pipeline:
        if not is_whole(global_batch_size, 1):
            raise UsageError("global_batch_size must be an integer >= 1", global_batch_size=global_batch_size)
        if not is_whole(seed):
            raise UsageError("seed must be an integer", "Use one seed, the same on all hosts.", seed=seed)
        if remainder not in {"keep", "drop"}:
            raise UsageError('remainder must be "keep" or "drop"', remainder=remainder)
        plan = Plan(source, int(global_batch_size), int(seed), remainder)
        if plan.num_batches == 0:
            raise UsageError(
                "An epoch must have at least one global batch",
                'Use remainder="keep", or a smaller global batch.',
                rows=plan.num_rows,
                global_batch_size=global_batch_size,
                remainder=remainder,
            )
        return cls(_with_shuffle(plan, shuffle))

    def map(self, function: Callable[..., Any], *, random: bool = False) -> Pipeline:
        """Apply a function to each example, once, on the host that feeds it. Calls run in parallel; the order is kept.

        Args:
            function: A function of the components of one example (tensors without a batch axis), as for `tf.data.Dataset.map`.
                TensorFlow traces it. It must return examples of one shape. It may use tensors from outside. If it calls Python
                (`tf.numpy_function`), which may draw random numbers, the first example is made twice and compared.
            random: Whether the function takes `seed=`: an int32 pair for `tf.random.stateless_*` and `tf.image.stateless_*`. It
                depends on the seed, the epoch and the example, so it is the same on every topology and differs in each epoch.

        Returns:
            The pipeline.

        Raises:
            UsageError: If the function is not callable.
        """
        if not callable(function):
            raise UsageError("map needs a function of an example", function=function)
        return self._with(stages=(*self._plan.stages, Stage(function, random)))

    def cache(self) -> Pipeline:
        """Keep the examples in memory as the maps before this call made them. Maps after it run in each epoch.

        A host keeps the mapped examples that it has made; with shuffling these are all in the end. For a stream, it also keeps
        all examples as they were read, so that it reads the stream once.

        Returns:
            The pipeline.

        Raises:
            UsageError: If a map before it is random: each epoch would have the same draws.
        """
        if any(stage.random for stage in self._plan.stages):
            raise UsageError(
                "A random map must come after cache(), which keeps its input for all epochs",
                "Call cache() before the random map.",
                maps=[stage.function for stage in self._plan.stages if stage.random],
            )
        source = self._plan.source if self._plan.at_random else self._plan.source.keeping()
        return self._with(source=source, stages=(*self._plan.stages, Stage(None)))

    def shuffle(self, buffer: int | None = None) -> Pipeline:
        """Shuffle each epoch with the seed.

        Args:
            buffer: The number of examples in the shuffle buffer, for a stream. None for sources with random access, which are
                shuffled as a whole.

        Returns:
            The pipeline.
        """
        return Pipeline(_with_shuffle(self._plan, True if buffer is None else buffer))

    def prefetch(self, batches: int) -> Pipeline:
        """Set how many batches are made, and placed on their devices, before they are requested.

        Args:
            batches: The number of batches. Default without this call: 2. With 0, each batch is made on request, without
                threads.

        Returns:
            The pipeline.

        Raises:
            UsageError: If `batches` is not an integer >= 0.
        """
        if not is_whole(batches, 0):
            raise UsageError("prefetch needs an integer >= 0", batches=batches)
        return self._with(ahead=int(batches))

    def balanced(self, labels: Any = None, *, rows: int | None = None) -> Pipeline:
        """Draw every class equally often: examples of rare classes repeat in an epoch, and some of common classes are left out.

        Each run of as many examples as there are classes has each class once. A repeated example gets another seed in a random
        map.

        Args:
            labels: The class of each example, integers of shape (examples,). Default: the second component of the arrays.
            rows: The number of examples in an epoch. Default: the number of examples in the data.

        Returns:
            The pipeline.

        Raises:
            UsageError: If the data is a stream, or `rows` is not an integer >= 1.
        """
        if rows is not None and not is_whole(rows, 1):
            raise UsageError("rows must be an integer >= 1", rows=rows)
        classes = self._labels(labels, "balanced")
        return self._with(labels=classes, epoch_rows=rows or len(classes))

    def weights(
        self,
        weights: Mapping[int, float] | Literal["balanced"] | Any,
        *,
        labels: Any = None,
        otherwise: float | None = None,
    ) -> Pipeline:
        """Add a weight to each example: batches of (x, y) become (x, y, weight), with weights of shape (examples,).

        The weights are float32, or float64 if that is `keras.config.floatx()`.

        Args:
            weights: The weight of each class, as a dict (a class is y after the maps, a number or one-hot, as for Keras's
                `class_weight`). Or "balanced": weight(c) = examples / (classes * examples of class c). Or the weight of each
                example, an array of shape (examples,).
            labels: The class of each example, integers of shape (examples,), for weights by class. "balanced" uses the second
                component of an example before the maps if it is None.
            otherwise: The weight of classes that `weights` does not list. None refuses such classes.

        Returns:
            The pipeline.

        Raises:
            UsageError: If the number of weights is wrong, a class has no weight, a weight is negative or not finite, examples
                already have weights, or the data is a stream of unknown length.
        """
        if self._plan.weighting is not None:
            raise UsageError(
                "An example must have one weight only", "Call weights() once, with the product of all weights.", weights=weights
            )
        if isinstance(weights, Mapping):
            check_weights([*weights.values(), *([] if otherwise is None else [otherwise])])
            if labels is None:
                return self._with(weighting=Weighting(None, of_classes(weights), otherwise))
            return self._with(weighting=Weighting(by_class(self._labels(labels, "weights"), of_classes(weights), otherwise)))
        if isinstance(weights, str):
            if weights != "balanced":
                raise UsageError('weights must be numbers or "balanced"', weights=weights)
            classes = self._labels(labels, "weights")
            return self._with(weighting=Weighting(by_class(classes, balancing(classes))))
        check_weights(weights)
        of_rows = np.asarray(weights, np.float64)
        self._check_counted("weights")
        if of_rows.shape != (self._plan.source.num_rows,):
            raise UsageError(
                "weights must hold one weight for each example",
                shape=of_rows.shape,
                rows=self._plan.source.num_rows,
            )
        return self._with(weighting=Weighting(of_rows))

    def _labels(self, labels: Any, use: str) -> Any:
        self._check_counted(use)
        source = self._plan.source
        if labels is None and not isinstance(source, ArraySource):
            raise UsageError(
                "The class of each example must be known",
                "Pass labels=..., one for each example.",
                source=type(source).__name__,
            )
        return checked(source.parts[label_component(source.spec)] if labels is None else labels, (source.num_rows,))

    def _check_counted(self, use: str) -> None:
        if not self._plan.at_random:
            raise UsageError(
                f"{use}() needs examples with random access",
                "Make the pipeline from arrays, TFRecord files or files of one example each. Or return the weight from a map.",
                source=type(self._plan.source).__name__,
            )

    def _with(self, **changes: Any) -> Pipeline:
        return Pipeline(replace(self._plan, **changes))

    def distribute(self, strategy: tf.distribute.Strategy, *, allow_idle: bool = False) -> Distributed:
        """Return the batches of this pipeline for the replicas of a strategy. This call traces the maps.

        Args:
            strategy: A `tf.distribute.Strategy`. Without one use `tf.distribute.get_strategy()`.
            allow_idle: Whether every batch may have fewer examples than there are replicas, for example in a small evaluation.

        Returns:
            An iterable; each iteration is an epoch. It moves this pipeline's position.
        """
        return Distributed(self._plan, self._position, strategy, allow_idle=allow_idle)

    def __iter__(self) -> Iterator[Any]:
        raise UsageError(
            "A pipeline must be distributed before it is iterated",
            "Iterate over pipeline.distribute(strategy). Without a strategy use tf.distribute.get_strategy().",
            pipeline=type(self).__name__,
        )

    @property
    def element_spec(self) -> Any:
        """Return the structure of a batch, with a `tf.TensorSpec` of an unknown number of examples for each component."""
        return batch_spec(Rowwise(self._plan).spec)


def _with_shuffle(plan: Plan, shuffle: bool | int) -> Plan:
    if plan.at_random:
        if not isinstance(shuffle, bool):
            raise UsageError(
                "Examples with random access must be shuffled as a whole",
                "Use shuffle=True, without a buffer.",
                shuffle=shuffle,
            )
        return replace(plan, shuffle=shuffle)
    if shuffle is True or shuffle < 0:
        raise UsageError(
            "A stream needs a shuffle buffer of a fixed size", "Pass its number of examples: shuffle=10_000.", shuffle=shuffle
        )
    return replace(plan, buffer=int(shuffle))
