"""The public face of the pipelines: what a user says about the data, in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from gpudist_core.errors import WrongUse
from gpudist_core.pipelines.distributed import Distributed, Rowwise, batch_spec, length_of, restore
from gpudist_core.pipelines.mapping import Stage
from gpudist_core.pipelines.plan import Plan, Remainder
from gpudist_core.pipelines.position import Position, state_of
from gpudist_core.pipelines.sources import ArraySource, DatasetStream, FileRows, FileStream, GeneratorStream, RecordSource
from gpudist_core.pipelines.weighting import Weighting, balancing, by_class, check_weights, checked, label_component, of_classes
from gpudist_core.values import is_whole


class Pipeline:
    """Rows, as global batches that are the same on every topology, to the replicas of any strategy.

    In each epoch every row comes exactly once, whatever the topology; order and augmentation are functions of the seed, the
    epoch and the row. Each replica has a contiguous share of each global batch (`shares`). Each method returns a new pipeline,
    at its beginning; the order of the calls does not matter, but for maps and the cache among each other.

    Make one with `from_arrays`, `from_tfrecord`, `from_files`, `from_generator` or `from_dataset`.

    Args:
        plan: What is to be done.

    Examples:
        >>> import numpy as np, tensorflow as tf
        >>> from gpudist_core import Pipeline
        >>> x, y = np.arange(10.0), np.arange(10)
        >>> data = Pipeline.from_arrays((x, y), global_batch_size=4, shuffle=True, seed=1).map(lambda x, y: (x / 10, y))
        >>> [len(y) for x, y in data.distribute(tf.distribute.get_strategy())]
        [4, 4, 2]
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._position = Position()

    @classmethod
    def from_arrays(
        cls, arrays: Any, *, global_batch_size: int, shuffle: bool = False, seed: int = 0, remainder: Remainder = "keep"
    ) -> Pipeline:
        """The rows of arrays, in memory or mapped from a file (`mmap_mode="r"`), of which only the rows needed are read.

        Args:
            arrays: Arrays or tensors with the rows along their first axes, in tuples and dicts.
            global_batch_size: Rows of a global batch, over all replicas.
            shuffle: Whether each epoch has its own order, over all rows.
            seed: Of all that is random in the pipeline.
            remainder: "keep" makes a smaller batch of the last rows of an epoch, "drop" leaves them out.

        Returns:
            The pipeline.
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
        """The records of uncompressed TFRecord files. Each host reads all headers once, then the records it needs.

        Args:
            files: A path, or paths in the order in which their records count; fewer than hosts is no matter.
            parse: Makes a row of a record (a scalar string tensor), as the first map; None leaves the strings.
            global_batch_size: Rows of a global batch, over all replicas.
            shuffle: Whether each epoch has its own order, over all records of all files.
            seed: Of all that is random in the pipeline.
            remainder: "keep" makes a smaller batch of the last rows of an epoch, "drop" leaves them out.

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
        """Rows that a function of your own reads from files.

        Args:
            files: The paths.
            read: From a path to the rows of the file, arrays with the rows along their first axes; with `row_per_file` to its
                one row. It may be called in several threads at once.
            global_batch_size: Rows of a global batch, over all replicas.
            row_per_file: Whether each file is one row. Then each host reads only the files of its rows; else each reads all.
            shuffle: With `row_per_file`, whether each epoch has its own order. Else the rows of a buffer: each epoch has its
                own order of files, whose rows are mixed in the buffer.
            seed: Of all that is random in the pipeline.
            remainder: "keep" makes a smaller batch of the last rows of an epoch, "drop" leaves them out.

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
        """The rows of a generator. Every host runs all of it and keeps its own rows, before any map.

        Several hosts take each batch together, and one that has read other rows is an error on all of them.

        Args:
            make: Makes an iterable of rows: called at each epoch, it returns a new one each time, of the same rows in the same
                order.
            global_batch_size: Rows of a global batch, over all replicas.
            signature: The structure of one row, a `tf.TensorSpec` for each component; None calls `make` once more, for its
                first row.
            rows: How many rows there are; then the pipeline has a length.
            shuffle: Rows of the buffer in which they are shuffled, 0 for none.
            seed: Of all that is random in the pipeline.
            remainder: "keep" makes a smaller batch of the last rows of an epoch, "drop" leaves them out.

        Returns:
            The pipeline.

        Raises:
            WrongUse: `make` is no function.
        """
        if not callable(make):
            raise WrongUse(
                "The rows of a generator are made anew in each epoch",
                "Give a function that makes them: lambda: zip(x, y).",
                make=type(make).__name__,
            )
        return cls._of(GeneratorStream(make, signature, rows), global_batch_size, seed, remainder, shuffle)

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        *,
        global_batch_size: int,
        batched: bool = False,
        shuffle: int = 0,
        seed: int = 0,
        remainder: Remainder = "keep",
    ) -> Pipeline:
        """The rows of a `tf.data.Dataset`. Every host runs all of it and keeps its own rows; maps of the pipeline see those.

        Several hosts take each batch together, and one that has read other rows is an error on all of them.

        Args:
            dataset: Gives the same rows in the same order each time, and ends.
            global_batch_size: Rows of a global batch, over all replicas; batches of the dataset are cut anew.
            batched: Whether its elements are batches of rows.
            shuffle: Rows of the buffer in which they are shuffled, 0 for none.
            seed: Of all that is random in the pipeline.
            remainder: "keep" makes a smaller batch of the last rows of an epoch, "drop" leaves them out.

        Returns:
            The pipeline.
        """
        return cls._of(DatasetStream(dataset, batched), global_batch_size, seed, remainder, shuffle)

    @classmethod
    def _of(cls, source: Any, global_batch_size: int, seed: int, remainder: Remainder, shuffle: bool | int) -> Pipeline:
        if not is_whole(global_batch_size, 1):
            raise WrongUse("A global batch has 1 or more rows", "Give a count.", global_batch_size=global_batch_size)
        if not is_whole(seed):
            raise WrongUse("A seed is a whole number", "Give one, the same on all hosts.", seed=seed)
        if remainder not in {"keep", "drop"}:
            raise WrongUse('The remainder is "keep" or "drop"', "Say one of them.", remainder=remainder)
        plan = Plan(source, int(global_batch_size), int(seed), remainder)
        if plan.num_batches == 0:
            raise WrongUse(
                "An epoch has at least one global batch",
                'Say remainder="keep", or make the global batch smaller.',
                rows=plan.num_rows,
                global_batch_size=global_batch_size,
                remainder=remainder,
            )
        return cls(_with_shuffle(plan, shuffle))

    def map(self, function: Callable[..., Any], *, random: bool = False) -> Pipeline:
        """Apply a function to each row, once, on the host whose row it is; in parallel, in order.

        Args:
            function: As for `tf.data.Dataset.map`, a function of the components of one row (tensors without a batch axis) that
                TensorFlow traces; it returns rows of one shape. It may use tensors from outside. Where it calls Python
                (`tf.numpy_function`), which may draw from any generator, the first row is made twice and compared.
            random: Whether it takes `seed=`, an int32 pair for `tf.random.stateless_*` and `tf.image.stateless_*` that is a
                function of the seed, the epoch and the row: the same on every topology, another in each epoch.

        Returns:
            The pipeline.

        Raises:
            WrongUse: It cannot be called.
        """
        if not callable(function):
            raise WrongUse("A map is a function of a row", "Give a function.", function=function)
        return self._with(stages=(*self._plan.stages, Stage(function, random)))

    def cache(self) -> Pipeline:
        """Keep the rows in memory as the maps before this call made them; maps after it run in each epoch.

        A host keeps the mapped rows that it has met, which with shuffling are all in the end; of a stream it keeps all rows
        besides, as they were read, so that it is read once.

        Returns:
            The pipeline.

        Raises:
            WrongUse: A map before it is random: each epoch would have the same draws.
        """
        if any(stage.random for stage in self._plan.stages):
            raise WrongUse(
                "What is cached is the same in each epoch",
                "Call cache() before the random map.",
                maps=[stage.function for stage in self._plan.stages if stage.random],
            )
        source = self._plan.source if self._plan.at_random else self._plan.source.keeping()
        return self._with(source=source, stages=(*self._plan.stages, Stage(None)))

    def shuffle(self, buffer: int | None = None) -> Pipeline:
        """Give each epoch an order of its own, by the seed.

        Args:
            buffer: Rows of the buffer in which a stream is shuffled; None where rows are at random access and all are shuffled.

        Returns:
            The pipeline.
        """
        return Pipeline(_with_shuffle(self._plan, True if buffer is None else buffer))

    def prefetch(self, batches: int) -> Pipeline:
        """Say how many batches are made, and on their devices, before they are asked for.

        Args:
            batches: How many; 2 unless told, 0 makes each when it is asked for, without threads.

        Returns:
            The pipeline.

        Raises:
            WrongUse: `batches` is not a count.
        """
        if not is_whole(batches, 0):
            raise WrongUse("Prefetching is for 0 or more batches", "Give a count.", batches=batches)
        return self._with(ahead=int(batches))

    def balanced(self, labels: Any = None, *, rows: int | None = None) -> Pipeline:
        """Draw every class equally often, by the seed: rare classes' rows come several times an epoch, of common ones not all.

        Each run of as many rows as there are classes has each class once. A row that comes again gets a seed of its own in a
        random map.

        Args:
            labels: The class of each row, integers of shape [rows]; None takes the second component of the arrays.
            rows: Rows of an epoch; None takes as many as there are.

        Returns:
            The pipeline.

        Raises:
            WrongUse: Rows come in a stream, or `rows` is not a count.
        """
        if rows is not None and not is_whole(rows, 1):
            raise WrongUse("An epoch has 1 or more rows", "Give a count.", rows=rows)
        known = self._labels(labels, "balanced")
        return self._with(labels=known, epoch_rows=rows or len(known))

    def weights(
        self,
        weights: Mapping[int, float] | Literal["balanced"] | Any,
        *,
        labels: Any = None,
        otherwise: float | None = None,
    ) -> Pipeline:
        """Add a weight to each row: batches of (x, y) become (x, y, weight), float32 of shape [rows].

        Args:
            weights: The weight of each class, which is y as the maps leave it (a number, or one-hot; as Keras takes
                `class_weight`); or "balanced", with which all classes count the same in all and a row 1 in the mean over the
                data; or the weight of each row, of shape [rows].
            labels: The class of each row, integers of shape [rows], for weights by class. Where None, "balanced" takes the
                second component of a row as it is before the maps.
            otherwise: The weight of a class that is given none; None refuses it.

        Returns:
            The pipeline.

        Raises:
            WrongUse: There are not as many weights as rows, a class has none, one is negative or not finite, rows have weights
                already, or rows come in a stream and are not counted.
        """
        if self._plan.weighting is not None:
            raise WrongUse("A row has one weight", "Call weights() once, with the product of several.", weights=weights)
        if isinstance(weights, Mapping):
            check_weights([*weights.values(), *([] if otherwise is None else [otherwise])])
            if labels is None:
                return self._with(weighting=Weighting(None, of_classes(weights), otherwise))
            return self._with(weighting=Weighting(by_class(self._labels(labels, "weights"), of_classes(weights), otherwise)))
        if isinstance(weights, str):
            if weights != "balanced":
                raise WrongUse('Weights are numbers or "balanced"', "Say one of them.", weights=weights)
            known = self._labels(labels, "weights")
            return self._with(weighting=Weighting(by_class(known, balancing(known))))
        check_weights(weights)
        of_rows = np.asarray(weights, np.float32)
        self._check_counted("weights")
        if of_rows.shape != (self._plan.source.num_rows,):
            raise WrongUse(
                "There is one weight for each row",
                "Give as many as rows.",
                shape=of_rows.shape,
                rows=self._plan.source.num_rows,
            )
        return self._with(weighting=Weighting(of_rows))

    def _labels(self, labels: Any, use: str) -> Any:
        self._check_counted(use)
        source = self._plan.source
        if labels is None and not isinstance(source, ArraySource):
            raise WrongUse("The class of each row is known", "Say labels=..., one for each row.", source=type(source).__name__)
        return checked(source.parts[label_component(source.spec)] if labels is None else labels, (source.num_rows,))

    def _check_counted(self, use: str) -> None:
        if not self._plan.at_random:
            raise WrongUse(
                f"{use}() needs rows at random access",
                "Make the pipeline from arrays, TFRecord files or files of one row each; or return the weight from a map.",
                source=type(self._plan.source).__name__,
            )

    def _with(self, **changes: Any) -> Pipeline:
        return Pipeline(replace(self._plan, **changes))

    def distribute(self, strategy: Any, *, allow_idle: bool = False) -> Distributed:
        """The batches of this pipeline for the replicas of a strategy, by tracing the maps.

        Args:
            strategy: A `tf.distribute.Strategy`; `tf.distribute.get_strategy()` where there is none.
            allow_idle: Whether every batch may have fewer rows than there are replicas, as in an evaluation of few rows.

        Returns:
            What is iterated, once for each epoch. It moves this pipeline's position.
        """
        return Distributed(self._plan, self._position, strategy, allow_idle=allow_idle)

    def __len__(self) -> int:
        return length_of(self._plan)

    def __iter__(self) -> Iterator[Any]:
        raise WrongUse(
            "A pipeline is iterated for the replicas of a strategy",
            "Iterate pipeline.distribute(strategy); tf.distribute.get_strategy() is one, also where there is no other.",
            pipeline=type(self).__name__,
        )

    @property
    def num_batches(self) -> int | None:
        """Global batches of an epoch; None where rows come in a stream and are not counted."""
        return self._plan.num_batches

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next batch belongs to, from 0."""
        return self._position.epoch

    @property
    def element_spec(self) -> Any:
        """The structure of a batch, a `tf.TensorSpec` with an unknown number of rows for each component."""
        return batch_spec(Rowwise(self._plan).spec)

    def state(self) -> dict[str, Any]:
        """The position: which global batches the training loop has had, not what is made ahead of it.

        Returns:
            Plain values that JSON can hold; valid on any topology, and in any process over the same data.
        """
        return state_of(self._plan, self._position)

    def restore(self, state: Any) -> None:
        """Go on from a position: the next iteration gives the rest of that epoch.

        Args:
            state: What `state()` returned, here or elsewhere.
        """
        restore(self._plan, self._position, state)


def _with_shuffle(plan: Plan, shuffle: bool | int) -> Plan:
    if plan.at_random:
        if not isinstance(shuffle, bool):
            raise WrongUse(
                "Rows at random access are shuffled as a whole", "Say shuffle=True, without a buffer.", shuffle=shuffle
            )
        return replace(plan, shuffle=shuffle)
    if shuffle is True or shuffle < 0:
        raise WrongUse("A stream is shuffled in a buffer of some rows", "Say how many: shuffle=10_000.", shuffle=shuffle)
    return replace(plan, buffer=int(shuffle))
