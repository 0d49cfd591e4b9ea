"""Check a real run against a certificate: with an optimizer in a loop of one's own, or as a callback of `fit`.

The optimizer reports its first steps, inside of the steps. What the replicas of all hosts report of a step is added up, and
compared with the certificate.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from gpudist_core.certificates.certificate import (
    SAME,
    START,
    UNITS,
    Certificate,
    CertificateMismatch,
    Floats,
    Integers,
    examples_in,
    examples_of,
    projected,
)
from gpudist_core.checkpoints.hosts import TextExchange, store_of_job
from gpudist_core.errors import UsageError
from gpudist_core.replicas import replicas_of
from gpudist_core.upstream import optimizers

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
        if self._watch is not None and self._batches == 0 and self._watch.num_applied:
            self._batches = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Compare the loss in the logs."""
        if self._watch is not None:
            self._watch.compare_loss(self._batches, logs or {})
            self._batches = None if self._batches is None else self._batches + 1

    def __getattr__(self, name: str) -> Any:
        # The other methods of a Keras callback, of which Keras asks whether they are overridden.
        if name.startswith("on_") or name == "set_params":
            return lambda *_, **__: None
        raise AttributeError(name)


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
        optimizers.of_run.__enter__()
        optimizer._gpudist_losses = self._compare_losses
        self._ends = [
            optimizers.before_apply(optimizer, self._before_apply),
            partial(optimizers.of_run.__exit__, None, None, None),
        ]

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
        certificate = self.certificate
        pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None and _is_floating(v)]
        _check_tensors(certificate, [variable for _, variable in pairs])
        replica, local = self._place()
        summed = tf.distribute.get_strategy().num_replicas_in_sync if optimizers.is_summed(self._optimizer) else 1
        inputs = _inputs(certificate, local)
        # Strategy.run was called outside of this graph: its arguments are others in the next step.
        is_outside = any(hasattr(value, "numpy") for value in inputs) and not tf.executing_eagerly()
        names = [tensor.name for tensor in certificate.tensors]
        counter = tf.cast(tf.convert_to_tensor(optimizers.counter_of(self._optimizer)), tf.int64)

        def start() -> Any:
            values = [tf.convert_to_tensor(variable) for _, variable in pairs]
            return projected(values, names, tf.constant(START, tf.int64))

        def report() -> Any:
            projections = projected([gradient for gradient, _ in pairs], names, counter) / summed
            first = tf.cond(tf.equal(counter, 0), start, lambda: tf.zeros_like(projections))
            examples = examples_in(inputs) if inputs and not is_outside else tf.zeros([3], tf.int64)
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
                examples = examples_of([np.asarray(value) for value in _inputs(self.certificate, outside)])
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
    if not certificate.inputs:
        return []
    arguments = optimizers.arguments_of_run(replica)
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
            seen, certified = f"'{dtype} {None if shape is None else list(shape)[1:]}'", f"'{place.dtype} {list(place.shape)}'"
            advice = "The examples have another type or shape than the certified ones."
            raise CertificateMismatch(0, "examples", f"input {place.position + 1}", seen, certified, 0.0, advice)
        inputs.append(value if shape[1:].is_fully_defined() else tf.ensure_shape(value, [None, *place.shape]))
    return inputs


def _precision(devices: tuple[str, ...]) -> str:
    is_short = any("GPU" in name for name in devices) and tf.config.experimental.tensor_float_32_execution_enabled()
    return "tfloat32" if is_short else "float32"


_CLOSE = 1e-3
_EXPLAIN = "To see why, record these steps with `gpudist launch --record 5`, and compare the trace with `gpudist compare`."


@dataclass(frozen=True)
class Fingerprints:
    """Hold what one replica reports of a step, or what several report together."""

    projections: Floats
    start: Floats
    examples: Integers

    @classmethod
    def total(cls, parts: list[Fingerprints]) -> Fingerprints:
        """Return the sum of the parts. The variables before the first step are those of the first part."""
        projections = np.sum([part.projections for part in parts], axis=0)
        return cls(projections, parts[0].start, np.sum([part.examples for part in parts], axis=0, dtype=np.int64))


class StepChecker:
    """Compare each step as soon as the last replica of this host has reported it.

    Args:
        certificate: The certificate.
        precision: The precision in which the devices multiply.
        local: The number of replicas of this host.
        exchange: Exchanges the hosts' sums.
        end: Called after the last certified step.

    Attributes:
        num_compared: The number of steps that agree.
    """

    def __init__(
        self, certificate: Certificate, precision: str, local: int, exchange: TextExchange, end: Callable[[], None]
    ) -> None:
        self._certificate, self._precision, self._local = certificate, precision, local
        self._exchange, self._end = exchange, end
        self._reports: dict[int, dict[int, Fingerprints]] = {}
        self._lock = threading.Lock()
        self.num_compared = 0

    def take(self, step: int, replica: int, report: Fingerprints) -> None:
        """Take a replica's report.

        Args:
            step: The number of the step.
            replica: The number of the replica.
            report: What it reports.

        Raises:
            CertificateMismatch: In the last replica of a host, on every host alike.
            UsageError: If a replica reports a step twice.
        """
        with self._lock:
            reports = self._reports.setdefault(step, {})
            if replica in reports:
                raise UsageError(
                    "Each replica must apply its gradients once in a step",
                    "Apply them in the function given to Strategy.run, outside of functions that replicas share.",
                    step=step,
                    replica=replica,
                )
            reports[replica] = report
            if len(reports) < self._local:
                return
            del self._reports[step]
            own = Fingerprints.total([reports[number] for number in sorted(reports)])
            values = (own.projections.tolist(), own.start.tolist(), own.examples.tolist())
            gathered = self._exchange.all_gather("the check of a certified step", values)
            of_hosts = [Fingerprints(np.array(p), np.array(s), np.array(e, np.int64)) for p, s, e in gathered]
            self._compare(step, Fingerprints.total(of_hosts))
            self.num_compared += 1
            if step == self._certificate.steps - 1:
                self._end()

    def compare_loss(self, step: int, loss: float) -> None:
        """Compare the loss that a step logs, after its gradients. Raise CertificateMismatch for another one."""
        certified, tolerance = float(self._certificate.losses[step, 0]), self._certificate.loss_tolerance(step, self._precision)
        if np.isfinite(certified) and not abs(loss - certified) <= tolerance:
            advice = "The gradients of this step are the certified ones: compare how the loss is reported."
            raise CertificateMismatch(step, "loss", "loss", f"{loss:.6g}", f"{certified:.6g}", tolerance, advice)

    def _compare(self, step: int, seen: Fingerprints) -> None:
        certificate = self._certificate
        if step == 0:
            at = _worst(seen.start, certificate.start, SAME * certificate.start_norms)
            if at is not None:
                seed = f"It was verified with --seed {certificate.seed}."
                advice = f"The variables begin otherwise: another seed, or restored ones. {seed}"
                raise self._mismatch(0, "start", at, seen.start, certificate.start, SAME * certificate.start_norms, advice)
        if certificate.inputs and not np.array_equal(seen.examples, certificate.examples[step]):
            raise CertificateMismatch(
                step,
                "examples",
                "global batch",
                _as_text(seen.examples),
                _as_text(certificate.examples[step]),
                0.0,
                "The global batch has other examples. Compare files, shuffling, seed, batch size and how hosts share the data.",
            )
        certified, tolerances = certificate.projections[step], certificate.tolerances(step, self._precision)
        if (at := _worst(seen.projections, certified, tolerances)) is not None:
            advice = f"{_ratio(seen.projections[at[0]], certified[at[0]])}{_EXPLAIN}"
            raise self._mismatch(step, "gradient", at, seen.projections, certified, tolerances, advice)

    def _mismatch(
        self, step: int, stage: str, at: tuple[int, int], seen: Floats, certified: Floats, tolerances: Floats, advice: str
    ) -> CertificateMismatch:
        name = self._certificate.tensors[at[0]].name
        value, expected = (f"{float(values[at]):.6g}" for values in (seen, certified))
        return CertificateMismatch(step, stage, name, value, expected, float(tolerances[at[0]]), advice)


def _worst(seen: Floats, certified: Floats, tolerances: Floats) -> tuple[int, int] | None:
    """Return tensor and projection that leave their tolerance most, or None. NaN is certified nowhere, and within nothing."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        off = np.abs(seen - certified)
        leaves = np.isfinite(certified) & ~(off <= tolerances[:, None])
        excess = np.where(leaves, np.where(np.isfinite(off), off / tolerances[:, None], np.inf), -1.0)
    if not leaves.any():
        return None
    tensor, number = np.unravel_index(int(np.argmax(excess)), excess.shape)
    return int(tensor), int(number)


def _ratio(seen: Floats, certified: Floats) -> str:
    """Say that a gradient is a multiple of the certified one, where it is."""
    ratio = float(seen @ certified / (certified @ certified or 1.0))
    is_multiple = abs(ratio - 1) > _CLOSE and np.linalg.norm(seen - ratio * certified) <= _CLOSE * np.linalg.norm(seen)
    return f"The gradient is {ratio:.4g}x the certified one. " if is_multiple else ""


def _as_text(examples: Integers) -> str:
    count, keys, _ = (int(number) for number in examples)
    return f"'{count} examples, {keys % 2**64:016x}'"
