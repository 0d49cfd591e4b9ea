"""Run a training step whose result does not depend on the topology.

TensorFlow's strategies give each replica a part of the batch, and add up what the replicas compute. A step as one writes it
for one device takes the mean over the examples of its replica. The mean of such means is that of the batch only where all
replicas have equally many examples with equal weights: not in the last batch of an epoch, and not with masks. To divide by
the size of the global batch instead (`tf.nn.compute_average_loss`) needs a size that each replica knows, and is wrong for
weights and masks.

So a step works with sums. Each replica returns the weighted sum of its losses, the gradients of that sum, and the sum of
the weights. These are added up over the replicas, and over the batches that make one update. Only then they are divided,
once. A replica without examples adds zeros: no case of its own is needed. This order is the reason for the rest of the
file:

- Sum, divide, check that all is finite, clip, decay, update. Keras clips and checks each replica's own gradients and sums
  afterwards, so that two replicas with opposite gradients are clipped to another update than one device. A step cannot call
  the parts of an optimizer in its own order, as users' subclasses override them. So `optimizers.exact_optimizer` changes
  the order inside of the optimizer, and `optimizers.reducing` tells it, while a step is traced, how this step sums.
- Gradients, losses and weights are summed in one collective for each dtype. A collective takes time however small it is,
  and a step has three scalars to sum.
- With a loss scale, the gradients of activations are 16 bits wide. The sum over many examples would overflow where the mean
  does not. So what is differentiated is the scaled mean (`local.scaled`), and the gradients are turned back into those of
  the sum at once. The divisor is the same on all replicas: a synchronized BatchNormalization carries part of a loss to the
  others' gradients.
- A model's own losses are no losses of examples. A regularizer counts once for each update, so it enters times the weight.
  A loss of the inputs is a mean over the rows of the replica, so it enters with the replica's fraction of the rows.
- Whether a batch makes an update is known in Python, and each pattern of updates is a function of its own. A `tf.cond`
  would keep one function, but replicas cannot meet inside of it (`merge_call called while defining a new graph`).
- The accumulated sums stay on the replica that computed them. To add them up after each batch would be a collective of the
  size of all gradients for batches that change nothing.
- The variables are those of the first call. TensorFlow traces a step again for each new shape of a batch, and a variable
  that has become trainable meanwhile would be trained in some shapes only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from gpudist_core import gradients
from gpudist_core import share as shares
from gpudist_core.errors import UsageError, check_choice
from gpudist_core.replicas import replicas_of
from gpudist_core.steps import arguments, local
from gpudist_core.steps.accumulators import Accumulators
from gpudist_core.strategies.make import warn_of_one_device
from gpudist_core.strategies.waiting import limited
from gpudist_core.upstream import layers, losses, models, optimizers, patches, randomness
from gpudist_core.upstream.row_means import counting, make_variables_local


class TrainStep:
    """Train one step, with the result of one device on every topology.

    The loss of a batch is sum(weight * loss) / sum(weight) over the examples of all replicas, plus the model's own losses once.
    The step sums the gradients over the replicas, clips them, and applies them. A replica without examples adds nothing.

    With `accumulate=n`, n batches make one update. The sums of the losses and of the weights are added, not the means. So the
    gradient is that of the n batches taken together.

    If a gradient is not finite on one replica, it is not finite in the sum on all replicas. With a loss scale all replicas skip
    the step. Without a loss scale all variables become non-finite (`check_finite=True` raises instead).

    Example:
        >>> import keras, numpy as np, gpudist_core as gd
        >>> strategy = gd.make_strategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        ...     optimizer = keras.optimizers.SGD(0.1)
        >>> loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        >>> step = gd.TrainStep(model, optimizer, loss, clip_global_norm=1.0)
        >>> data = gd.Pipeline.from_arrays((np.ones((8, 4), "float32"), np.zeros(8, "int32")), global_batch_size=4)
        >>> losses = [float(step(batch)) for batch in data.distribute(strategy)]
        >>> losses[1] < losses[0]
        True

    Args:
        model: A Keras model, or a callable with `trainable_variables`, made in the strategy's scope.
        optimizer: A Keras 3 optimizer, made in the strategy's scope. The step changes it in place: its clipping, weight decay,
            EMA and loss scale then act on the gradients of all replicas. An optimizer with `gradient_accumulation_steps` is
            refused; use `accumulate`.
        per_example_loss: A function (y, y_pred) -> losses of shape (examples, ...), a `keras.losses.Loss` or its name. The step
            applies a mask on the model's output. With several outputs the function must apply their masks (a warning says so).
        clip_norm: The largest L2 norm of each variable's gradient.
        clip_global_norm: The largest L2 norm of all gradients together.
        clip_value: The largest absolute value in a gradient.
        accumulate: Number of batches that make one update.
        draws: How a Keras layer's dropout or noise is drawn. `replica`: differently on each replica. `row`: by the example's
            index in the global batch, so that it is the same on every topology.
        metrics: Keras metrics, updated with (y, y_pred, weight). Read their `result()` outside the step.
        variables: The variables to train. Default: the model's trainable variables at the first call. Make another step after
            `trainable` changes. Add the variables of sharded tables here.
        jit_compile: Compile each replica's forward and backward pass with XLA.
        check_finite: Raise `InvalidArgumentError`, which names the variable, if a gradient is not finite. Then no trained
            variable, optimizer state or metric changes, and the accumulated sums of this update are discarded.
        synchronize_batch_norm: Use the moments of the global batch in BatchNormalization layers.
        strategy: The strategy. Default: the strategy of the model.

    Raises:
        UsageError: If an argument is not valid, or arguments do not fit together.
    """

    def __init__(
        self,
        model: keras.Model | Callable[..., Any],
        optimizer: keras.optimizers.Optimizer,
        per_example_loss: keras.losses.Loss | Callable[[Any, Any], Any] | str,
        *,
        clip_norm: float | None = None,
        clip_global_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        draws: str = "replica",
        metrics: Sequence[keras.metrics.Metric] = (),
        variables: Sequence[tf.Variable | keras.Variable] | None = None,
        jit_compile: bool = False,
        check_finite: bool = False,
        synchronize_batch_norm: bool = True,
        strategy: tf.distribute.Strategy | None = None,
    ) -> None:
        arguments.check_accumulate(accumulate)
        if jit_compile and variables is not None:
            raise UsageError(
                "jit_compile=True can train the model's own variables only", "Leave variables out.", variables=len(variables)
            )
        check_choice(randomness.DRAWS, draws=draws)
        if jit_compile and draws == "row":
            raise UsageError(
                "A pass compiled by XLA does not know the other replicas' numbers of examples, which draws='row' needs",
                "Leave jit_compile out, or use draws='replica'.",
                draws=draws,
            )
        if tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None:
            raise UsageError(
                "A step must be made outside Strategy.run",
                "Make it once, where you make the model and the optimizer, and call it with batches.",
                strategy=type(tf.distribute.get_strategy()).__name__,
            )
        optimizers.check(optimizer)
        optimizers.check_single_updates(optimizer)
        arguments.check_model(model, variables)
        patches.of_step.prepare()
        self.strategy = strategy if strategy is not None else models.strategy_of(model)
        if strategy is None:
            warn_of_one_device(model, self.strategy)
        models.check_strategy(self.strategy)
        self.model: Any = model
        self.metrics = arguments.checked_metrics(metrics)
        self.accumulate, self.draws, self.check_finite = int(accumulate), draws, check_finite
        self._replicas = replicas_of(self.strategy)
        self._loss = losses.per_example_function(per_example_loss)
        if self._replicas.total > 1:
            losses.check_rows(per_example_loss)
        self._clip = gradients.Clipping(clip_norm, clip_global_norm, clip_value)
        self._synchronizes = synchronize_batch_norm
        if synchronize_batch_norm:
            layers.mark_batch_norm(model)
        self._variables = arguments.checked_variables(variables)
        self._compiled_pass = (
            local.CompiledPass(model, self._loss, synchronizes=synchronize_batch_norm) if jit_compile else None
        )
        models.check_scope(self.strategy, model, optimizer, self.metrics, self._variables)
        make_variables_local(self.strategy, self.metrics)
        with self.strategy.scope():
            optimizer = models.scaled_where_needed(model, optimizer)
        self.optimizer = optimizers.exact_optimizer(optimizer, self.strategy)
        self._accumulators = Accumulators(self.strategy) if accumulate > 1 else None
        self._pending = 0  # below `accumulate`; equal on all hosts, as all hosts make the same calls
        self._trained: list[Any] = []  # empty up to the first call, never changed after it
        # By what each batch of a call does: True for an update, False for adding to the sums.
        self._compiled: dict[tuple[bool, ...], Any] = {}
        self._flush: Any = None

    def __call__(self, batch: Sequence[Any]) -> tf.Tensor:
        """Train on one global batch.

        Args:
            batch: (x, y) or (x, y, weight). Each part is a `PerReplica`, as `Pipeline.distribute` returns it, or with one
                replica a tensor or an array. Weights have shape (examples,) or the shape of the losses. None means no weights.

        Returns:
            The loss of the batch before the update, with the model's own losses. It is a float32 scalar (float64 if the losses
            are), equal on all hosts.

        Raises:
            UsageError: If the batch is not distributed, or the step is called inside another strategy.
        """
        return self._run([batch])

    def several(self, batches: Sequence[Sequence[Any]]) -> tf.Tensor:
        """Train on several global batches in one call of one compiled function.

        Args:
            batches: A list of batches as in `__call__`. They may have different numbers of examples.

        Returns:
            The loss of each batch, as a tensor of shape (batches,).

        Raises:
            UsageError: If `batches` is not a list of batches.
        """
        if not isinstance(batches, Iterable):
            raise UsageError("several needs a list of batches", "For one batch, call the step itself.", batches=batches)
        batches = list(batches)
        results = self._run(batches)
        return results[tf.newaxis] if len(batches) == 1 else results

    def _run(self, batches: Sequence[Any]) -> Any:
        """Train as `several` does. For one batch, return a scalar: extracting it would take as long as a small step."""
        arguments.check_place(self.strategy, self.accumulate)
        checked = [arguments.checked_parts(batch, self.strategy, len(self._replicas.devices)) for batch in batches]
        if not checked:
            raise UsageError("several needs at least one batch", "Skip the call if there is no batch.", batches=batches)
        updates = tuple((self._pending + i + 1) % self.accumulate == 0 for i in range(len(checked)))
        if updates not in self._compiled:
            self._build(checked[0])
            self._compiled[updates] = tf.function(functools.partial(self._train, updates), autograph=False)
        try:
            with limited(self.strategy, len(checked)):
                results = self._compiled[updates](checked)
        except tf.errors.InvalidArgumentError:
            if self.check_finite and self._accumulators is not None:
                self._accumulators.drop()
                self._pending = 0
            raise
        self._pending = (self._pending + len(checked)) % self.accumulate
        assert self._pending == 0 or self._accumulators is not None
        compare = getattr(getattr(self.optimizer, "inner_optimizer", self.optimizer), "_gpudist_losses", None)  # gd.check
        if compare is not None and self.accumulate == 1:
            compare(results, len(checked))
        return results

    def flush(self) -> None:
        """Apply the pending batches as one update.

        Call it at the end of data whose number of batches `accumulate` does not divide.
        """
        if self._pending:
            if self._flush is None:
                self._flush = tf.function(lambda: self.strategy.run(self._apply_pending), autograph=False)
            self._flush()
            self._pending = 0

    @property
    def pending(self) -> int:
        """Return the number of accumulated batches that have not made an update yet."""
        return self._pending

    @property
    def trained_variables(self) -> list[tf.Variable | keras.Variable]:
        """Return the trained variables, in the order of the gradients."""
        return self._trained or self._trainable()

    def _trainable(self) -> list[Any]:
        return self._variables if self._variables is not None else list(self.model.trainable_variables)

    def _check_trained(self) -> None:
        """Refuse to trace a step for other variables than before. Otherwise each batch shape would train others."""
        now = self._trainable()
        if self._trained and [*map(id, now)] != [*map(id, self._trained)]:
            raise UsageError(
                "A step must train the variables that were trainable at its first call",
                "Make another step after `trainable` changes.",
                trained=len(self._trained),
                trainable=len(now),
            )

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint besides model and optimizer: the pending batches and their sums over replicas."""
        kept = self._accumulators.state() if self._accumulators is not None and self._pending else {}
        return {"pending": self._pending, "accumulators": kept, "accumulate": self.accumulate}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, on any topology.

        Args:
            state: The result of `state`.

        Raises:
            UsageError: If it comes from a step with another `accumulate`.
        """
        pending = arguments.checked_pending(state, self.accumulate, "TrainStep", "accumulators")
        if pending and not self.trained_variables:
            raise UsageError(
                "A model must be built before its accumulated gradients are restored",
                "Build it in the strategy's scope: model.build(shape), or call it with some examples.",
                pending=pending,
                model=getattr(self.model, "name", type(self.model).__name__),
            )
        self._pending = pending
        if self._accumulators is not None and pending:
            self._accumulators.build(self.trained_variables)
            self._accumulators.restore(state["accumulators"])
            self._flush = None  # what had a gradient before is known again

    def _train(self, updates: tuple[bool, ...], batches: Sequence[Any]) -> Any:
        """Build the graph of some batches, one after the other."""
        results: list[Any] = []
        for update, batch in zip(updates, batches, strict=True):
            with tf.control_dependencies(results):
                loss = self.strategy.run(self._on_replica, args=tuple(batch), kwargs={"update": update})
            results.append(self.strategy.experimental_local_results(loss)[0])
        return results[0] if len(results) == 1 else tf.stack(results)

    def _on_replica(self, *batch: Any, update: bool) -> Any:
        """Compute one replica's part of one batch, and return the loss of all replicas."""
        batch = randomness.with_unknown_rows(self.draws, batch, self._replicas.total)
        x, y, weight = local.unpack(batch)
        with (
            shares.sharing(shares.Share(shares.rows_of(batch))) as share,
            randomness.drawing(self.draws),
            layers.synchronizing_batch_norm(self._synchronizes),
        ):
            self._check_trained()
            variables = self.trained_variables
            scaling = optimizers.loss_scaling_of(self.optimizer)
            scale = None if scaling is None else scaling(tf.constant(1.0))
            run = self._compiled_pass or functools.partial(self._pass, variables)
            sums, y_pred = run(share, x, y, weight, scale)
            loss = self._apply(sums, variables) if update else self._keep(sums, variables)
            # A batch that is refused counts nowhere. A loss that is one number for a batch is the mean over its examples.
            with tf.control_dependencies([loss] if self.check_finite else []), counting(tapes=False):
                for metric in self.metrics:
                    metric.update_state(y, y_pred, sample_weight=weight)
            return loss

    def _pass(
        self, variables: list[Any], share: shares.Share, x: Any, y: Any, weight: Any, scale: Any
    ) -> tuple[local.Sums, Any]:
        """Run forward and backward: return this replica's sums and the model's output."""
        with tf.GradientTape() as tape:
            y_pred = models.call(self.model, x)
            loss, total = local.weighted_losses(self._loss, y, y_pred, weight)
            of_variables, of_inputs = local.separate(self.model, getattr(self.model, "losses", []), loss.dtype)
            if of_variables is not None:
                loss += of_variables * total
            if of_inputs is not None:
                # Its mean over this replica's rows becomes this replica's part of the mean over all rows, in units of weight.
                loss += of_inputs * tf.cast(share.fraction, loss.dtype) * gradients.all_reduce(total)
            target = local.scaled(share, loss, scale)
        return local.Sums(local.unscaled_rows(share, tape.gradient(target, variables), scale), loss, total), y_pred

    def _apply(self, sums: local.Sums, variables: list[Any]) -> Any:
        """Sum over the replicas (and the accumulated batches), divide by the total weight, and apply."""
        grads, weight = sums.grads, sums.weight
        if self._accumulators is not None:
            grads, weight = self._accumulators.take(grads, weight)
        reported: list[Any] = []

        def mean_of_all(grads: list[Any], variables: list[Any]) -> list[Any]:
            summed, (total, loss, own) = gradients.sum_with(grads, variables, [weight, sums.loss, sums.weight])
            part = tf.math.reciprocal_no_nan(total)
            means = checked([gradients.scale(g, part) for g in summed], variables)
            reported.append(tf.math.divide_no_nan(loss, own))
            return means

        with (
            gradients.checking_finite(on=self.check_finite) as checked,
            optimizers.reducing(self.optimizer, mean_of_all, self._clip),
        ):
            self.optimizer.apply_gradients(zip(grads, variables, strict=True))
        return reported[0]

    def _keep(self, sums: local.Sums, variables: list[Any]) -> Any:
        """Add to the accumulated sums. Only the loss needs the other replicas."""
        assert self._accumulators is not None
        self._accumulators.add(sums.grads, sums.weight)
        loss, weight = gradients.all_reduce_all([sums.loss, sums.weight])
        return tf.math.divide_no_nan(loss, weight)

    def _apply_pending(self) -> None:
        assert self._accumulators is not None
        nothing = local.Sums(self._accumulators.nothing_more(), tf.constant(0.0), tf.constant(0.0))
        self._apply(nothing, self.trained_variables)

    def _build(self, batch: Any) -> None:
        """Create the missing variables in the strategy's scope: a step cannot do it while it is traced."""
        with self.strategy.scope():
            models.build(self.model, self.strategy.experimental_local_results, batch[0])
            if not self.trained_variables:
                raise UsageError(
                    "A step needs at least one variable to train",
                    "Set trainable=True on a layer, or give variables=[...].",
                    model=getattr(self.model, "name", type(self.model).__name__),
                )
            self._trained = self.trained_variables
            if not self.optimizer.built:
                self.optimizer.build(self.trained_variables)
            if self._accumulators is not None:
                self._accumulators.build(self.trained_variables)
