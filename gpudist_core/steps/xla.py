"""Compile a replica's forward and backward pass with XLA.

XLA refuses a function that reads variables of another device than the first, and does not support the collectives of
tf.distribute. So the values of the variables are arguments, their changes are results, and the sum over the replicas stays
outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gpudist_core import share as shares
from gpudist_core.errors import UsageError
from gpudist_core.steps import local
from gpudist_core.upstream import layers, losses, runtime


class CompiledPass:
    """Run the local part of a step for a Keras model.

    Args:
        model: A Keras model.
        loss: A function (y, y_pred) -> losses of shape (rows, ...).
        synchronizes: Whether BatchNormalization uses the moments of all replicas. Such a layer is then refused.

    Raises:
        UsageError: If the model is not a Keras model.
    """

    def __init__(self, model: Any, loss: Callable[[Any, Any], Any], *, synchronizes: bool) -> None:
        if not hasattr(model, "stateless_call"):
            raise UsageError("jit_compile=True needs a Keras 3 model", "Leave jit_compile out.", model=type(model).__name__)
        self._model, self._loss, self._synchronizes = model, loss, synchronizes
        self._compiled = tf.function(self._pass, jit_compile=True, autograph=False)

    def __call__(self, share: shares.Share, x: Any, y: Any, weight: Any, scale: Any) -> tuple[local.Sums, Any]:
        """Run one replica's pass.

        Args:
            share: Its share of the step.
            x: Its inputs.
            y: Its targets.
            weight: Its weights, or None.
            scale: The loss scale, a float32 scalar, or None.

        Returns:
            Its sums and the model's output.
        """
        changing = self._model.non_trainable_variables
        values = [[tf.convert_to_tensor(v.value) for v in some] for some in (self._model.trainable_variables, changing)]
        replica = tf.convert_to_tensor(share.replica)
        counts = None if scale is None else share.counts  # asked for here, as the compiled pass cannot
        grads, loss, total, (y_pred, masks), changed = self._compiled(*values, x, y, weight, replica, counts, scale)
        for variable, value in zip(changing, changed, strict=True):
            variable.assign(layers.of_all(share, variable, value))
        return local.Sums(grads, loss, total), tf.nest.map_structure(losses.masked, y_pred, masks)

    def _pass(
        self, trained: list[Any], changing: list[Any], x: Any, y: Any, weight: Any, replica: Any, counts: Any, scale: Any
    ) -> Any:
        with (
            shares.sharing(shares.Share(shares.rows_of(x), replica, counts)) as share,
            layers.synchronizing_batch_norm(self._synchronizes, compiled=True),
            tf.GradientTape() as tape,
        ):
            tape.watch(trained)
            y_pred, changed, own = self._model.stateless_call(trained, changing, x, training=True, return_losses=True)
            if share.num_replicas > 1:
                self._check_layers_keep_nothing(changing, changed)
            loss, total = local.weighted_losses(self._loss, y, y_pred, weight)
            of_variables, of_inputs = local.separate(self._model, own, loss.dtype)
            if of_inputs is not None:
                raise UsageError(
                    "A pass compiled by XLA does not support losses of its inputs (activity regularizers, add_loss)",
                    "Leave jit_compile out.",
                    losses=len(own),
                )
            if of_variables is not None:
                loss += of_variables * total
            target = local.scaled(share, loss, scale)
        outputs = y_pred, tf.nest.map_structure(losses.mask_of, y_pred)  # what a function returns has lost its masks
        return local.unscaled_rows(share, tape.gradient(target, trained), scale), loss, total, outputs, changed

    def _check_layers_keep_nothing(self, before: list[Any], after: list[Any]) -> None:
        """Refuse a layer that keeps a mean over its examples and may read it again.

        BatchNormalization does not read it in training.
        """
        own = {id(v) for layer in runtime.flat_layers(self._model) if layers.is_batch_norm(layer) for v in layer.variables}
        for variable, old, new in zip(self._model.non_trainable_variables, before, after, strict=True):
            if new is not old and id(variable) not in own and layers.is_of_rows(variable):
                raise UsageError(
                    "A pass compiled by XLA cannot synchronize replicas, which a layer that keeps a mean over its examples "
                    "needs",
                    "Leave jit_compile out.",
                    variable=variable.path,
                )
