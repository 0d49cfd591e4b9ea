"""Let an optimizer report its first steps, inside of the steps, to the comparison with a certificate."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from gpudist_core.certificates import fingerprints
from gpudist_core.certificates.certificate import Certificate, CertificateMismatch, Input
from gpudist_core.certificates.comparison import Fingerprints, StepChecker
from gpudist_core.errors import UsageError
from gpudist_core.upstream import applies, optimizers

_TIMEOUT = 300.0
_numbers = itertools.count()


class Watch:
    """Watch one optimizer.

    Args:
        certificate: The certificate.
        precision: The precision in which the devices multiply; None for that of the devices.

    Attributes:
        certificate: The certificate.
    """

    def __init__(self, certificate: Certificate, precision: str | None) -> None:
        self.certificate, self._precision = certificate, precision
        self._comparison: StepChecker | None = None
        self._optimizer: Any = None
        self._has_ended = self._in_fit = False
        self._mismatch: CertificateMismatch | None = None
        self._ends: list[Callable[[], None]] = []
        self._prefix = f"gpudist/certificate/{next(_numbers)}"

    @property
    def num_applied(self) -> int:
        """Return the number of steps that the optimizer has made."""
        return optimizers.num_applied(self._optimizer)

    @property
    def _num_compared(self) -> int:
        return 0 if self._comparison is None else self._comparison.num_compared

    def optimizer(self, optimizer: Any, *, in_fit: bool = False) -> None:
        """Watch an optimizer, unless the certified steps are over. In a `fit`, `compare_loss` is called after each step."""
        self._in_fit = self._in_fit or in_fit
        if optimizer is self._optimizer or self._has_ended:
            return
        optimizers.check(optimizer)
        if self._optimizer is not None:
            raise UsageError("A certificate has one optimizer", certified=self.certificate.optimizer, second=optimizer.name)
        self._optimizer = optimizer
        if self.num_applied >= self.certificate.steps:
            self._has_ended = True
            self._warn("The run goes on from a later step: nothing is compared.", stacklevel=4)
            return
        atexit.register(self._warn, "The run ended too early, or went on from a later step.")
        applies.of_run.__enter__()
        optimizer._gpudist_losses = self._compare_losses
        self._ends = [applies.before_apply(optimizer, self._before_apply), partial(applies.of_run.__exit__, None, None, None)]

    def compare_loss(self, step: int | None, logs: Mapping[str, Any]) -> None:
        """Compare the loss in a step's logs; None for the step of another loss. Raise UsageError if no step was checked."""
        with self._ended_by_errors():
            if self._mismatch is not None:
                raise self._mismatch.with_traceback(None)  # the frames of a step, of no use
            if self._comparison is None and not self._has_ended:
                raise UsageError(
                    "A checked model must not have trained before",
                    "Pass the check to the first fit.",
                    certificate=self.certificate.program,
                    steps=self.num_applied,
                )
            if self._comparison is not None and step is not None and step < self.certificate.steps:
                self._comparison.compare_loss(step, float(logs.get("loss", np.nan)))  # read only here: it may cost time

    def _compare_losses(self, losses: Any, number: int) -> None:
        """Compare the losses that a `TrainStep` returns of its last steps."""
        after = self.num_applied
        if self._num_compared >= min(after, self.certificate.steps):
            for step, loss in enumerate(np.reshape(losses, -1), after - number):
                self.compare_loss(step, {"loss": loss})
        if self._has_ended:
            del self._optimizer._gpudist_losses

    def _agree(self) -> None:
        self._end()
        print(f"gpudist_core: the gradients of {self._num_compared} certified steps agree", file=sys.stderr, flush=True)

    def _end(self) -> None:
        ends, self._ends, self._has_ended = self._ends, [], True
        for end in ends:
            end()
        atexit.unregister(self._warn)

    @contextlib.contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._end()
            raise

    def _warn(self, why: str, stacklevel: int = 1) -> None:
        warnings.warn(
            f"All certified steps must be compared. Received: compared={self._num_compared}, "
            f"certified={self.certificate.steps}. {why}",
            stacklevel=stacklevel,
        )

    def _before_apply(self, grads: list[Any], variables: list[Any]) -> Any:
        """Return the operation that reports a step, which does nothing after the certified ones."""
        with self._ended_by_errors():
            return self._reporting(grads, variables)

    def _reporting(self, grads: list[Any], variables: list[Any]) -> Any:
        import tensorflow as tf

        certificate = self.certificate
        pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None and _is_floating(v)]
        _check_tensors(certificate, [variable for _, variable in pairs])
        replica, local = self._place()
        summed = tf.distribute.get_strategy().num_replicas_in_sync if optimizers.is_summed(self._optimizer) else 1
        inputs = _inputs(certificate, local)
        # Strategy.run was called outside of this graph: its arguments are others in the next step.
        is_outside = any(hasattr(value, "numpy") for value in inputs) and not tf.executing_eagerly()
        names = [tensor.name for tensor in certificate.tensors]
        counter = tf.cast(tf.convert_to_tensor(applies.counter_of(self._optimizer)), tf.int64)

        def start() -> Any:
            values = [tf.convert_to_tensor(variable) for _, variable in pairs]
            return fingerprints.projected(values, names, tf.constant(fingerprints.START, tf.int64))

        def report() -> Any:
            projections = fingerprints.projected([gradient for gradient, _ in pairs], names, counter) / summed
            first = tf.cond(tf.equal(counter, 0), start, lambda: tf.zeros_like(projections))
            examples = fingerprints.examples_in(inputs) if inputs and not is_outside else tf.zeros([3], tf.int64)
            taken = partial(self._take, replica, local if is_outside else None)
            return tf.numpy_function(taken, [counter, projections, first, examples], tf.int64)

        return tf.cond(counter < certificate.steps, report, lambda: tf.constant(0, tf.int64))

    def _take(self, replica: int, outside: int | None, step: Any, projections: Any, start: Any, examples: Any) -> Any:
        """Take a replica's report.

        Args:
            replica: The number of the replica.
            outside: Its number on this host if the examples are not in the graph, else None.
            step: The number of the step.
            projections: The projections of its gradients.
            start: Those of its variables, in the first step.
            examples: The fingerprint of its examples.

        Returns:
            Zero, as an operation must return something.
        """
        assert self._comparison is not None
        with self._ended_by_errors():
            if outside is not None:
                examples = fingerprints.examples_of([np.asarray(value) for value in _inputs(self.certificate, outside)])
            try:
                self._comparison.take(int(step), replica, Fingerprints(projections, start, examples))
            except CertificateMismatch as mismatch:
                # TensorFlow would print what a compiled step raises ten times, with 170 lines of its own.
                self._mismatch = self._mismatch or mismatch
                if not self._in_fit:
                    raise
        return np.int64(0)

    def _place(self) -> tuple[int, int]:
        """Return the number of this replica, over all hosts and on its own; begin the comparison with the first."""
        import tensorflow as tf

        from gpudist_core.checkpoints.exchange import TextExchange, store_of_job
        from gpudist_core.replicas import replicas_of

        certificate, places = self.certificate, replicas_of(tf.distribute.get_strategy())
        if places.total != certificate.replicas and not certificate.reduced:
            raise UsageError(
                f"The certificate holds for {certificate.replicas} replicas",
                f"It was made on {certificate.topology}. Make another with gpudist verify --topology HxD --certificate FILE.",
                replicas=places.total,
            )
        if self._comparison is None:
            hosts = 1 if certificate.reduced else places.num_hosts  # each host has the whole sum
            exchange = TextExchange(store_of_job(hosts), self._prefix, places.host, hosts, _TIMEOUT)
            local = 1 if certificate.reduced else len(places.devices)
            precision = self._precision or _precision(places.devices)
            self._comparison = StepChecker(certificate, precision, local, exchange, self._agree)
        context = tf.distribute.get_replica_context()
        if certificate.reduced or context is None:
            return 0, 0
        number = int(tf.get_static_value(context.replica_id_in_sync_group))
        return number, number - places.first


def _is_floating(variable: Any) -> bool:
    dtype = getattr(variable, "dtype", "")
    return str(getattr(dtype, "name", dtype)).startswith(("float", "bfloat"))


def _check_tensors(certificate: Certificate, variables: list[Any]) -> None:
    """Raise CertificateMismatch where the optimizer gets gradients of other variables."""
    for number in range(max(len(certificate.tensors), len(variables))):
        tensor = certificate.tensors[number] if number < len(certificate.tensors) else None
        variable = variables[number] if number < len(variables) else None
        seen = None if variable is None else (_kept(variable.shape), str(getattr(variable.dtype, "name", variable.dtype)))
        certified = None if tensor is None else (_kept(tensor.shape), tensor.dtype)
        if seen != certified:
            name = tensor.name if tensor is not None else str(getattr(variable, "path", getattr(variable, "name", "")))
            advice = "The model has other variables than the certified one."
            raise CertificateMismatch(0, "start", name, seen, certified, 0.0, advice)


def _kept(shape: Any) -> tuple[int, ...]:
    return tuple(shape) or (1,)  # as a verification keeps scalars


def _inputs(certificate: Certificate, replica: int) -> list[Any]:
    """Return the arguments of `Strategy.run` with the examples of a replica, with known shapes.

    Args:
        certificate: What was certified.
        replica: The number of the replica on this host.

    Returns:
        A tensor for each certified input.

    Raises:
        UsageError: If the optimizer is applied outside of `Strategy.run`.
        CertificateMismatch: If an argument is not of the certified kind.
    """
    import tensorflow as tf

    if not certificate.inputs:
        return []
    arguments = applies.arguments_of_run(replica)
    if arguments is None:
        raise UsageError(
            "A checked optimizer must be applied inside Strategy.run, as in the certified program",
            certified_inputs=len(certificate.inputs),
        )
    inputs = []
    for place in certificate.inputs:
        value = arguments[place.position] if place.position < len(arguments) else None
        dtype = getattr(getattr(value, "dtype", None), "name", None)
        shape = getattr(value, "shape", None)
        if dtype != place.dtype or shape is None or not shape[1:].is_compatible_with(place.shape):
            raise _other_input(place, dtype, shape)
        inputs.append(value if shape[1:].is_fully_defined() else tf.ensure_shape(value, [None, *place.shape]))
    return inputs


def _other_input(place: Input, dtype: Any, shape: Any) -> CertificateMismatch:
    seen, certified = f"'{dtype} {None if shape is None else list(shape)[1:]}'", f"'{place.dtype} {list(place.shape)}'"
    advice = "The examples have another type or shape than the certified ones."
    return CertificateMismatch(0, "examples", f"input {place.position + 1}", seen, certified, 0.0, advice)


def _precision(devices: tuple[str, ...]) -> str:
    import tensorflow as tf

    is_short = any("GPU" in name for name in devices) and tf.config.experimental.tensor_float_32_execution_enabled()
    return "tfloat32" if is_short else "float32"
