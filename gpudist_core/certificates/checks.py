"""Check a real run against a certificate: with an optimizer in a loop of one's own, or as a callback of `fit`."""

from __future__ import annotations

import os
from typing import Any

from gpudist_core.certificates.certificate import UNITS, Certificate
from gpudist_core.certificates.watch import Watch
from gpudist_core.errors import UsageError

AUTO = "auto"


def check(certificate: str | os.PathLike[str] | None, *, precision: str = AUTO) -> Check:
    """Compare the first steps of this run with a certificate, and stop in the step that leaves it.

    Args:
        certificate: A file written by `gpudist verify --certificate`. None checks nothing, for the verification itself.
        precision: The precision in which the devices multiply: `float32`, `tfloat32` or `bfloat16`. `auto`: `tfloat32` on GPUs
            for which TensorFlow allows it, else `float32`.

    Returns:
        An object for `fit(callbacks=[...])`. In a loop of your own, pass your optimizer to its `optimizer` method.

    Raises:
        UsageError: If the file is no certificate, or `precision` has another value.

    Example:
        >>> optimizer = gd.check(None).optimizer(keras.optimizers.SGD())
    """
    if precision not in (AUTO, *UNITS):
        raise UsageError(f"precision must be one of {', '.join((AUTO, *UNITS))}", precision=precision)
    return Check(
        None if certificate is None else Watch(Certificate.read(certificate), None if precision == AUTO else precision)
    )


class Check:
    """Compare the first steps of a run with a certificate. After them the optimizer is as before.

    Args:
        watch: Compares; None checks nothing.
    """

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch
        self._batches: int | None = 0

    def optimizer(self, optimizer: Any) -> Any:
        """Let an optimizer compare its steps, before its first step is traced.

        Args:
            optimizer: The Keras optimizer of the certified program.

        Returns:
            The same object.

        Raises:
            UsageError: If it is no Keras 3 optimizer, or a second one.
        """
        if self._watch is not None:
            self._watch.optimizer(optimizer)
        return optimizer

    def set_model(self, model: Any) -> None:
        """Check the model's optimizer. Keras calls this before it traces the training step."""
        if self._watch is not None:
            self._watch.optimizer(model.optimizer, in_fit=True)

    def on_train_begin(self, logs: Any = None) -> None:
        """Leave the loss alone in a run that goes on from a later step."""
        del logs
        if self._watch is not None and self._batches == 0 and self._watch.num_applied:
            self._batches = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Compare the loss in the logs."""
        del batch
        if self._watch is not None:
            self._watch.compare_loss(self._batches, logs or {})
            self._batches = None if self._batches is None else self._batches + 1

    def __getattr__(self, name: str) -> Any:
        # The other methods of a Keras callback, of which Keras asks whether they are overridden.
        if name.startswith("on_") or name == "set_params":
            return _nothing
        raise AttributeError(name)


def _nothing(*_: Any, **__: Any) -> None: ...
