"""Let optimizers of Keras 3 sum gradients over the replicas *before* they use them.

Keras 3.15 checks, clips and accumulates each replica's own gradients and sums afterwards (`BaseOptimizer.apply`, then
`TFOptimizer._backend_apply_gradients`, then `_all_reduce_sum_gradients`). Clipping by each replica's own norm is wrong, and
`LossScaleOptimizer` asks only the first replica whether all gradients are finite. Here the sum comes first.

An exact optimizer keeps the sums of `gradient_accumulation_steps` elsewhere, over replicas. In a file they are among its
variables, where Keras looks for them. Keras 3.12 and 3.15 number the iterations, the learning rate if it is a variable, the
averages, the sums, and the optimizer's own variables. Keras 3.8 numbers each sum after the average of the same variable.

What an optimizer applies, and the arguments of `Strategy.run` around it, can be seen without a change of its class.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gpudist_core import gradients, state
from gpudist_core.errors import UsageError
from gpudist_core.upstream import custom_step, patches

Reduce = Callable[[list[Any], list[Any]], list[Any]]
# The optimizers whose gradients this thread, that of one replica, has summed already.
_summed: state.PerThread[frozenset[int]] = state.PerThread(frozenset())


def exact_optimizer(optimizer: Any, strategy: tf.distribute.Strategy) -> Any:
    """Make a Keras optimizer sum gradients first. Its class changes; its name, variables and config do not.

    Args:
        optimizer: A `keras.optimizers.Optimizer`, made in the strategy's scope, or not built and without a strategy.
        strategy: The `tf.distribute.Strategy` whose replicas' gradients are summed.

    Returns:
        The same object.

    Raises:
        UsageError: If it is not a Keras 3 optimizer, and for `MultiOptimizer`, whose parts apply gradients by themselves.
    """
    check(optimizer)
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        exact_optimizer(inner, strategy)
        state.of_optimizer.of(inner).is_reduced = True
    if not state.of_optimizer.of(optimizer).is_exact:
        if inner is None and optimizer.built:
            take_over_sums(optimizer)
        patches.mix_in(optimizer, _Exact if inner is None else _LossScaling)
        _keep_what_waits(optimizer)
    if not optimizer.built:  # Keras keeps the strategy around the optimizer's creation, which may be none (3.15, TFOptimizer)
        optimizer._distribution_strategy = strategy
    return optimizer


def check(optimizer: Any) -> None:
    """Refuse anything but a single optimizer of Keras 3.

    Args:
        optimizer: The `optimizer` argument.

    Raises:
        UsageError: If it is not a Keras 3 optimizer, and for `MultiOptimizer`, whose parts apply gradients by themselves.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer) or type(optimizer).__name__ == "MultiOptimizer":
        raise UsageError(
            "optimizer must be a Keras 3 optimizer, but no MultiOptimizer",
            "Use one of keras.optimizers. For several optimizers in one model, make a TrainStep for each, with its "
            "`variables`.",
            optimizer=f"{type(optimizer).__module__.partition('.')[0]}: {type(optimizer).__name__}",
        )


def check_slices(optimizer: Any, variables: list[Any]) -> None:
    """Refuse an optimizer that needs a whole variable for a sharded table: it would take a slice for the table.

    Args:
        optimizer: A built Keras optimizer.
        variables: Its trained variables.

    Raises:
        UsageError: For Lamb and Adafactor, and for variables that Muon does not pass to its AdamW.
    """
    for variable in variables:
        if gradients.is_sharded(variable) and _looks_at_all(optimizer, variable):
            raise UsageError(
                "A sharded table needs an optimizer that updates each element by itself",
                "Use Adam, Adagrad or SGD. To keep this one for the other variables, make a TrainStep for each, with its "
                "`variables`.",
                optimizer=type(optimizer).__name__,
                variable=getattr(variable, "path", variable.name),
            )


def _looks_at_all(optimizer: Any, variable: Any) -> bool:
    muon = getattr(keras.optimizers, "Muon", None)  # Keras 3.8 has none
    if muon is not None and isinstance(optimizer, muon):
        return not optimizer._should_use_adamw(variable)
    return isinstance(optimizer, (keras.optimizers.Lamb, keras.optimizers.Adafactor))


def _keep_what_waits(optimizer: Any) -> None:
    """Take from Keras what it would do inside a `cond`, where replicas cannot meet (`merge_call called while defining ...`)."""
    kept = state.of_optimizer.of(optimizer)
    kept.is_exact, kept.accumulate = True, optimizer.gradient_accumulation_steps
    kept.overwrite = getattr(optimizer, "ema_overwrite_frequency", None)
    for name in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
        object.__setattr__(optimizer, name, None)


@contextlib.contextmanager
def reducing(optimizer: Any, reduce: Reduce, clip: gradients.Clipping | None = None) -> Iterator[None]:
    """Set, while a step is traced, how this replica's gradients are summed and clipped.

    Args:
        optimizer: The result of `exact_optimizer`.
        reduce: A function of the local gradients and their variables that returns the gradients of the whole step, equal on all
            replicas.
        clip: Clipping before the optimizer's own.
    """
    kept = state.of_optimizer.of(optimizer)
    kept.reduce, kept.clip = reduce, clip
    try:
        yield
    finally:
        kept.reduce = kept.clip = None


def accumulates(optimizer: Any) -> int:
    """Return over how many batches the optimizer takes the mean; 0 without accumulation."""
    return int(_kept_inside(optimizer).accumulate or 0)


def may_skip(optimizer: Any) -> bool:
    """Return whether the optimizer skips gradients that are not finite: a `LossScaleOptimizer`."""
    return hasattr(optimizer, "inner_optimizer")


def loss_scaling_of(optimizer: Any) -> Callable[[Any], Any] | None:
    """Return the function that scales a loss before differentiation; the optimizer divides the gradients again.

    Args:
        optimizer: A Keras optimizer: a `LossScaleOptimizer`, or one with a constant `loss_scale_factor`.

    Returns:
        A function of the loss; None if the optimizer does not scale.
    """
    scales = hasattr(optimizer, "inner_optimizer") or optimizer.loss_scale_factor is not None
    return optimizer.scale_loss if scales else None


def check_single_updates(optimizer: Any) -> None:
    """Refuse an optimizer that accumulates in a step that accumulates itself.

    Args:
        optimizer: A Keras optimizer.

    Raises:
        UsageError: If it has `gradient_accumulation_steps`.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps = accumulates(optimizer) or inner.gradient_accumulation_steps
    if steps:
        raise UsageError(
            "An optimizer for a TrainStep must not have gradient_accumulation_steps",
            "Leave gradient_accumulation_steps out of the optimizer, and pass the step accumulate=...: it takes the mean over "
            "the examples of these batches.",
            gradient_accumulation_steps=steps,
        )


def num_applied(optimizer: Any) -> int:
    """Return the number of batches whose gradients an optimizer was applied with, including accumulated ones."""
    return int(getattr(optimizer, "inner_optimizer", optimizer)._iterations.numpy())


def accumulation_of(optimizer: Any) -> Any:
    """Return the object that `accumulate_by` set, or None."""
    return _kept_inside(optimizer).accumulation


def accumulate_by(optimizer: Any, accumulation: Any) -> None:
    """Let an optimizer ask `accumulation(grads, variables, reduced=...)` what to update with; None for nothing yet."""
    _kept_inside(optimizer).accumulation = accumulation


def _kept_inside(optimizer: Any) -> state.OfOptimizer:
    return state.of_optimizer.of(getattr(optimizer, "inner_optimizer", optimizer))


def variables_of(optimizer: Any) -> list[Any]:
    """Return all variables of an optimizer. Keras omits the product of rates of a Nadam inside a `LossScaleOptimizer`."""
    inner = getattr(optimizer, "inner_optimizer", None)
    owners = [optimizer] if inner is None else [optimizer, inner]
    kept = [value for owner in owners for value in vars(owner).values() if isinstance(value, keras.Variable)]
    return list({id(variable): variable for variable in [*optimizer.variables, *kept]}.values())


def trained_by(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer was built for."""
    return list(getattr(optimizer, "inner_optimizer", optimizer)._trainable_variables)


def place_of(optimizer: Any, variable: Any) -> int:
    """Return the index of a variable among them."""
    return int(getattr(optimizer, "inner_optimizer", optimizer)._get_variable_index(variable))


def _gradients_of_all(optimizer: Any, grads: list[Any], variables: list[Any]) -> list[Any]:
    reduce = state.of_optimizer.of(optimizer).reduce or gradients.sum_over_replicas
    with _meeting():
        return list(reduce(list(grads), list(variables)))


@contextlib.contextmanager
def _meeting() -> Iterator[None]:
    """Explain the error of a collective in a branch or function of the step, where threads of one process cannot wait."""
    try:
        yield
    except RuntimeError as error:
        if "called while defining a new graph" not in str(error):
            raise
        raise not_in_a_branch() from error


def not_in_a_branch() -> UsageError:
    """Return the error for gradients that are applied in a branch, a loop or a function of a step."""
    return UsageError(
        "Gradients must be applied outside of branches, loops and functions of a step, where collectives do not work",
        "To update with several batches, use gradient_accumulation_steps of the optimizer, which gd.distributed supports, "
        "and apply each batch's gradients. Or use gd.TrainStep(accumulate=...).",
        apply="in a tf.cond, tf.while_loop or tf.function",
    )


def _overrides(optimizer: Any, name: str) -> bool:
    """Return whether a user's subclass has a method that reads gradients: it must get those of all replicas."""
    kinds = [kind for kind in type(optimizer).__mro__ if name in vars(kind) and kind not in (_Base, _Exact)]
    return bool(kinds) and not kinds[0].__module__.startswith("keras.")


def is_summed(optimizer: Any) -> bool:
    """Return whether the optimizer's gradients are already summed over all replicas."""
    kept = state.of_optimizer.known(optimizer)
    if kept is None or not (kept.is_exact or kept.is_reduced):
        return False
    return kept.is_reduced or id(optimizer) in _summed.value or custom_step.are_gradients_summed()


@contextlib.contextmanager
def _summed_first(optimizer: Any, grads: list[Any], variables: list[Any]) -> Iterator[list[Any]]:
    """Yield the gradients of all replicas. The optimizer does not sum them again meanwhile."""
    if is_summed(optimizer):
        yield list(grads)
        return
    grads = _gradients_of_all(optimizer, list(grads), variables)
    with _summed.set(_summed.value | {id(optimizer)}):
        yield grads


def _is_complete(optimizer: Any) -> bool:
    """Return whether an optimizer has its variables, and its accumulation its sums."""
    accumulation = accumulation_of(optimizer)
    return bool(optimizer.built) and (accumulation is None or accumulation.is_built)


def _build_outside(optimizer: Any, variables: list[Any]) -> None:
    """Create an optimizer's missing variables during tracing, on all replicas at once, outside of the graph."""

    def build(_: tf.distribute.Strategy | None) -> None:
        with tf.init_scope():
            if not optimizer.built:
                optimizer.build(variables)
            if (accumulation := accumulation_of(optimizer)) is not None:
                accumulation.build()

    context = tf.distribute.get_replica_context()
    build(None) if context is None else context.merge_call(build)


class _Base:
    """Share what both kinds need: variables that can be made late, and a config with the user's settings."""

    _trainable_variables: Any  # what the class has that it extends

    def apply(self, grads: list[Any], trainable_variables: Any = None) -> None:
        grads = list(grads)
        if grads and all(grad is None for grad in grads):
            raise UsageError(
                "At least one trained variable must have a gradient",
                "Compute the loss from the model's outputs with differentiable operations: no argmax, rounding or cast to "
                "integers.",
                gradients=f"{len(grads)} times None",
            )
        with _meeting():
            if trainable_variables is not None and not _is_complete(self):
                trainable_variables = list(trainable_variables)
                _build_outside(self, trainable_variables)
            super().apply(grads, trainable_variables=trainable_variables)  # type: ignore[misc]

    def save_own_variables(self, store: Any) -> None:
        own: dict[str, Any] = {}
        super().save_own_variables(own)  # type: ignore[misc]
        save_with_sums(self, list(own.values()), store)

    def load_own_variables(self, store: Any) -> None:
        super().load_own_variables(without_sums(self, store))  # type: ignore[misc]

    def get_config(self) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        kept = state.of_optimizer.known(self)
        if kept is None or not kept.is_exact:
            return config
        asked = {"gradient_accumulation_steps": kept.accumulate, "ema_overwrite_frequency": kept.overwrite}
        return config | {name: value for name, value in asked.items() if name in config}


class _LossScaling(_Base):
    """Sum first in a `LossScaleOptimizer`: one check, one skip and one scale for all replicas."""

    inner_optimizer: Any

    def _tf_apply(self, grads: list[Any], trainable_variables: Any = None) -> None:
        variables = list(trainable_variables if trainable_variables is not None else self._trainable_variables)
        if (accumulation := accumulation_of(self)) is not None:
            accumulation.check_none_was_skipped()
        if not is_summed(self):
            grads = _gradients_of_all(self, grads, variables)
        state.of_optimizer.of(self.inner_optimizer).clip = state.of_optimizer.of(self).clip
        super()._tf_apply(gradients.agree_on_finite(grads, variables), variables)  # type: ignore[misc]


class _Exact(_Base):
    """Sum first in an optimizer's `apply`, then clip, decay, update and average."""

    learning_rate: Any
    use_ema: Any
    _apply_weight_decay: Any
    _backend_update_step: Any
    _clip_gradients: Any
    _iterations: Any
    _update_model_variables_moving_average: Any

    @property
    def iterations(self) -> Any:
        """Return the number of updates: Keras counts batches, and divides if it accumulates itself."""
        kept = state.of_optimizer.of(self)
        return self._iterations if kept.accumulation is None else self._iterations // kept.accumulate

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        if _overrides(self, "apply_gradients"):
            grads, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
            with _summed_first(self, grads, variables) as grads:
                return super().apply_gradients(zip(grads, variables, strict=True), *args, **kwargs)  # type: ignore[misc]
        return super().apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc]

    def apply(self, grads: list[Any], trainable_variables: Any = None) -> None:
        if _overrides(self, "apply"):
            variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
            with _summed_first(self, grads, variables) as grads:
                super().apply(grads, trainable_variables)
        else:
            super().apply(grads, trainable_variables)

    def _backend_apply_gradients(self, grads: list[Any], trainable_variables: list[Any]) -> None:
        held: list[Any] | None = grads
        if (accumulation := accumulation_of(self)) is not None:
            held = accumulation(grads, trainable_variables, reduced=is_summed(self))
        if held is not None:
            self._gpudist_update(held, trainable_variables)
        if self.use_ema:
            self._update_model_variables_moving_average(self._trainable_variables)
            _overwrite(self)
        if _counts_here():
            self._iterations.assign_add(1)

    def _gpudist_update(self, grads: list[Any], trainable_variables: list[Any]) -> None:
        check_slices(self, trainable_variables)
        if not is_summed(self):
            grads = _gradients_of_all(self, grads, trainable_variables)
        # Keras squares the values of a row of a table that stands in a sparse gradient several times each by itself: as often
        # as it was looked up, which depends on the replicas. Keras 2 added them up, as a dense gradient does.
        grads = [g if g is None else gradients.merge_repeated(g) for g in grads]
        if (clip := state.of_optimizer.of(self).clip) is not None:
            grads = clip(grads, trainable_variables)
        if _overrides(self, "_clip_gradients"):
            grads = self._clip_gradients(grads)
        else:
            grads = gradients.clipping_of(self)(grads, trainable_variables)
        self._apply_weight_decay(trainable_variables)
        self._backend_update_step(grads, trainable_variables, self.learning_rate)

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> list[Any]:
        return list(grads_and_vars)


@functools.cache
def _counts_here() -> bool:
    """Return whether `_backend_apply_gradients` counts an optimizer's applies, as in Keras 3.8; later `apply` does."""
    original = inspect.unwrap(keras.optimizers.Optimizer._backend_apply_gradients)  # an emulated host may have wrapped it
    return "assign_add" in original.__code__.co_names


def _overwrite(optimizer: Any) -> None:
    """Replace the variables by their averages every n steps, by value: collectives do not work inside a `cond`."""
    every = state.of_optimizer.of(optimizer).overwrite
    if not every:
        return
    now = tf.equal((tf.convert_to_tensor(optimizer.iterations) + 1) % every, 0)
    for variable, average in zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True):
        if average is not None:
            variable.assign(tf.where(now, tf.convert_to_tensor(average), tf.convert_to_tensor(variable)))


def take_over_sums(optimizer: Any) -> None:
    """Take over the sums that a plain Keras optimizer was built or loaded with as the first state of its accumulation.

    Args:
        optimizer: A built optimizer, before it is exact, that is not a `LossScaleOptimizer`.
    """
    sums = optimizer.__dict__.get("_accumulated_gradients")
    if sums:
        values = [variable.numpy() for variable in sums]
        for variable in sums:
            optimizer._untrack_variable(variable)
        object.__setattr__(optimizer, "_accumulated_gradients", None)
        state.of_optimizer.of(optimizer).taken_over = values


def sums_taken_over(optimizer: Any) -> list[Any] | None:
    """Return the sums from `take_over_sums` or a loaded file, once; None if there are none."""
    kept = state.of_optimizer.of(_inner(optimizer))
    values, kept.taken_over = kept.taken_over, None
    return values


def save_with_sums(optimizer: Any, values: list[Any], store: Any) -> None:
    """Write an optimizer's variables in Keras's numbering.

    Args:
        optimizer: An exact optimizer.
        values: The values of its own variables.
        store: Keras's store for one optimizer.
    """
    places = _places_of_sums(optimizer)
    own, sums = iter(values), iter(_saved_sums(optimizer) if places else ())
    for number in range(len(values) + len(places)):
        store[str(number)] = next(sums if number in places else own)


def without_sums(optimizer: Any, store: Mapping[str, Any]) -> Mapping[str, Any]:
    """Separate the optimizer's own variables from the saved ones. The sums go to its accumulation.

    Args:
        optimizer: An exact optimizer.
        store: Keras's store for one optimizer.

    Returns:
        A store without the sums; the same one if there are none.
    """
    places = _places_of_sums(optimizer)
    if not places or len(store.keys()) != len(optimizer.variables) + len(places):
        return store
    values = [store[str(number)] for number in range(len(store.keys()))]
    state.of_optimizer.of(_inner(optimizer)).taken_over = [np.array(values[number]) for number in places]
    own = [value for number, value in enumerate(values) if number not in places]
    return {str(number): value for number, value in enumerate(own)}


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _places_of_sums(optimizer: Any) -> range:
    """Return the indices of the sums in Keras's numbering; none if it saves none."""
    inner = _inner(optimizer)
    if not inner.built or not state.of_optimizer.of(inner).accumulate:
        return range(0)
    outer = len(optimizer._variables) if inner is not optimizer else 0
    first = outer + sum(isinstance(value, keras.Variable) for value in (inner._iterations, inner._learning_rate))
    number = len(inner._trainable_variables)
    if not inner.use_ema:
        return range(first, first + number)
    if not hasattr(keras.optimizers.Optimizer, "add_optimizer_variables"):  # Keras 3.8
        return range(first + 1, first + 2 * number, 2)
    first += sum(isinstance(value, keras.Variable) for value in inner._model_variables_moving_average)
    return range(first, first + number)


def _saved_sums(optimizer: Any) -> list[Any]:
    inner = _inner(optimizer)
    accumulation = state.of_optimizer.of(inner).accumulation
    saved: dict[str, Any] | None = {"sums": {}} if accumulation is None else accumulation.state_here()
    if saved is None:
        warnings.warn(
            "A model that Keras saves in the middle of an accumulation loses the batches without an update: hosts cannot add "
            "their sums while one of them saves. To continue exactly use gd.Checkpoints.",
            stacklevel=2,
        )
    kept = dict(saved["sums"]).get("sums") if saved else None
    if kept is not None:
        return [np.asarray(array) for array in kept]
    return [np.zeros(v.shape, v.dtype) for v in inner._trainable_variables]


Before = Callable[[list[Any], list[Any]], Any]
_calls: list[list[Any]] = []  # of the process: MirroredStrategy runs replicas in threads of their own


def before_apply(optimizer: Any, before: Before) -> Callable[[], None]:
    """Call a function before each apply of an optimizer. Its class stays as it is.

    Args:
        optimizer: A Keras optimizer.
        before: A function of gradients and variables. The update waits for the tensor that it returns.

    Returns:
        A function that ends this.
    """
    before = tf.autograph.experimental.do_not_convert(before)  # in the step of a user, autograph would convert it

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
        with tf.control_dependencies([before(grads, variables)]):
            return type(optimizer).apply(optimizer, grads, None if trainable_variables is None else variables)

    optimizer.apply = apply

    def end() -> None:
        if vars(optimizer).get("apply") is apply:
            del optimizer.apply

    return end


def counter_of(optimizer: Any) -> Any:
    """Return the variable that counts an optimizer's applies. Its public `iterations` counts updates of several batches."""
    return getattr(optimizer, "inner_optimizer", optimizer)._iterations


def arguments_of_run(replica: int) -> list[Any] | None:
    """Return the tensors with axes among the arguments of the current `Strategy.run` on a replica; None outside of it.

    Args:
        replica: The number of the replica among those of this host.

    Returns:
        The tensors, flattened.
    """
    from tensorflow.python.distribute import distribute_utils

    if not _calls:
        return None
    values = (distribute_utils.select_replica(replica, value) for value in _calls[-1])
    return [v for v in values if tf.is_tensor(v) and v.shape.rank != 0 and v.dtype not in (tf.resource, tf.variant)]


def _of_runs() -> patches.Replacements:
    from tensorflow.python.distribute import distribute_lib as lib

    for cls in (lib.StrategyBase, lib.Strategy, lib.StrategyV1):
        if "run" in vars(cls):
            yield cls, "run", _noting


def _noting(original: Callable[..., Any], self: Any, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
    _calls.append(tf.nest.flatten((args, kwargs or {})))
    try:
        return original(self, fn, args, kwargs, options)
    finally:
        _calls.pop()


of_run = patches.Patches(_of_runs)
"""Notes the arguments of `Strategy.run` while a block is active."""
