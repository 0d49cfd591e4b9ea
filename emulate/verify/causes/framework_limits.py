"""Recognize known errors of TensorFlow and Keras that stop a correct program."""

from __future__ import annotations

import re
from dataclasses import dataclass

from emulate.program import shorten_traceback
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.lines import raised


@dataclass(frozen=True)
class Limit:
    """Describe a known error of TensorFlow or Keras.

    Attributes:
        patterns: All of them occur in the traceback of a program that has it.
        heading: What fails, as the heading in the cause's file has it; the fix stands there.
    """

    patterns: tuple[str, ...]
    heading: str


_LETTERS = 240
_NOT_DETERMINISTIC = (
    r"(?i)determinism is not yet supported|deterministic GPU implementation of .* available"
    r"|not (yet )?have a deterministic (\w+ )?implementation|would have been executed is not deterministic"
    r"|deterministic mode is not supported"
)
_EMPTY_CONVOLUTION = (
    "A replica without examples runs a convolution, and TensorFlow's oneDNN kernels on CPU return a wrong shape for an empty "
    "batch"
)
LIMITS = (
    Limit(
        (r"merge_call`? called while defining a new graph", r"_backend_apply_gradients|base_optimizer|Cond\.call"),
        "Keras 3's gradient_accumulation_steps and ema_overwrite_frequency call merge_call inside a "
        "condition, which strategies refuse",
    ),
    Limit(
        (r"Inputs to operation AddN .*must have the same size and shape", r"\.fit\(|_symbolic_build"),
        "Keras 3's fit cannot build its metrics if the first batch, of training or of validation, is not "
        "a multiple of the number of replicas",
    ),
    Limit(
        (r"Value for attr 'T' of string is not in the list of allowed values", r"AddN", r"\.fit\(|_symbolic_build"),
        "Keras 3's fit cannot build its metrics if the model takes strings",
    ),
    Limit((r"(?i)conv", r"\[0(,\d+)+\] (!=|vs\.) [^\[]*\[0(,\d+)+\]"), _EMPTY_CONVOLUTION),
    Limit((r"Must provide as many biases as the last dimension .*\[\d+\] vs\. \[0(,\d+)+\]",), _EMPTY_CONVOLUTION),
    Limit((r"incompatible with the layer: expected axis .* received input with shape \(0, \d+",), _EMPTY_CONVOLUTION),
    Limit(
        (r"Attempt to convert a value \((PerReplica|DistributedVariable)|Invalid reduction dimension 0",),
        "Keras 3's fit and evaluate do not work under MultiWorkerMirroredStrategy (keras#20585)",
    ),
    Limit(
        (r"(float|int)\(\) argument must be a string,? .*not '(Mirrored|SyncOnRead|Distributed)Variable'",),
        "Python's float() and int() fail on a variable that a strategy keeps on several devices, such as "
        "Keras 3's learning rate",
    ),
    Limit(
        (r"Could not apply FILE based sharding: the dataset only has \d+ file",),
        "The strategy shards whole files, and there are fewer files than hosts",
    ),
    Limit(
        (r"Collective ops must be configured at program startup",),
        "MultiWorkerMirroredStrategy must be created before anything else that TensorFlow does in the process",
    ),
    Limit(
        (r"AssertionError", r"_distributed_tf_update_step"),
        "A variable that was created outside of the strategy's scope is trained inside of it",
    ),
    Limit(
        (r"Trying to access resource .* located in device .* from device",),
        "A step compiled by XLA (jit_compile=True) cannot reach variables of another device",
    ),
    Limit(
        (r"You must feed a value for placeholder tensor '(cond|while)",),
        "The strategy's collective all-reduce cannot run inside a condition or loop (optimizer variables "
        "created inside the tf.function, steps_per_execution)",
    ),
    Limit(
        (r"No OpKernel was registered to support Op 'Nccl",),
        "NCCL's all-reduce has no CPU kernel, so NcclAllReduce cannot be emulated",
    ),
    Limit(
        (
            r"IndexError: list index out of range",
            r"_get_static_batch_dim|batch_sizes_for_worker|rebatch|get_distributed_dataset",
        ),
        "A dataset whose elements are scalars cannot be distributed, because the strategy splits every "
        "element along its first axis",
    ),
    Limit((_NOT_DETERMINISTIC,), "On GPUs gpudist uses deterministic kernels, and TensorFlow has none for this operation"),
    Limit(
        (r"(?i)(when|if) determinism is enabled",),
        "On GPUs gpudist uses deterministic operations, and TensorFlow then refuses a random operation without a seed",
    ),
    Limit(
        (r"Cannot create a tensor proto whose content is larger than 2GB|larger than 2GB",),
        "A graph cannot hold a constant of 2 GB or more. An array that a tf.function or dataset.map uses from "
        "outside becomes one",
    ),
    Limit((r"has no attribute 'reset_states'",), "Keras 3 has no Metric.reset_states: this program was written for Keras 2"),
    Limit(
        (r"Binding inputs to tf.function failed .*'PerReplica' object has no attribute 'dtype'",),
        "In eager code strategy.run refuses a tf.function with an input_signature",
    ),
    Limit(
        (r"AttributeError: 'PerReplica' object has no attribute 'dtype'",),
        "The program computes, outside of strategy.run, with a value that each replica has its own copy of "
        "(an element of a distributed dataset, a result of strategy.run)",
    ),
    Limit((r"destinations can ?not be empty",), "The strategy cannot reduce a value that lies on no device"),
)


def _error(failure: str, limit: Limit) -> str:
    """Return the error that shows the fault, in one line: it ends where its brackets are closed."""
    lines = shorten_traceback(failure).splitlines()
    shows = [at for at, line in enumerate(lines) if any(re.search(pattern, line) for pattern in limit.patterns)]
    first = next((at for at in shows if "Error" in lines[at]), shows[-1] if shows else len(lines) - 1)
    text = ""
    for line in lines[first:]:
        text = f"{text} {line.strip()}".strip()
        if sum(map(text.count, "([{")) <= sum(map(text.count, ")]}")):
            break
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS // 2]} ... {text[-_LETTERS // 2 :]}"


def _search(case: Case) -> Sign | None:
    failure = case.outcome.failure
    if not failure:
        return None
    for limit in LIMITS:
        if all(re.search(pattern, failure) for pattern in limit.patterns):
            where = "also fails" if case.outcome.reference_failure else "does not fail"
            return Sign(f"{limit.heading}.", f"{_error(failure, limit)}\nOn one device the program {where}.", limit.heading)
    return None


FRAMEWORK_LIMIT = Cause(code="framework-limit", search=_search, runs_that_ended=True, completed=False, blame=(raised(),))
