"""Known faults of TensorFlow and Keras that stop a program which is right."""

from __future__ import annotations

import re
from dataclasses import dataclass

from emulate.program import shorten_traceback
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign


@dataclass(frozen=True)
class Limit:
    """A known fault: all patterns are found in the traceback of the program that meets it."""

    patterns: tuple[str, ...]
    summary: str
    fix: str


_LETTERS = 240
_NOT_DETERMINISTIC = (
    r"(?i)determinism is not yet supported|deterministic GPU implementation of .* available"
    r"|not (yet )?have a deterministic (\w+ )?implementation|would have been executed is not deterministic"
    r"|deterministic mode is not supported"
)
_ONE_LINE = (
    "Add one line to a program that uses fit:\n"
    "    with strategy.scope():\n"
    "        model = gpudist_core.distributed(model)  # before compile; fit stays as it is\n"
)
LIMITS = (
    Limit(
        (r"merge_call`? called while defining a new graph", r"_backend_apply_gradients|base_optimizer|Cond\.call"),
        "Keras 3's gradient_accumulation_steps and ema_overwrite_frequency call merge_call inside a condition, which "
        "strategies refuse.",
        f"{_ONE_LINE}It runs both options.\n"
        "Or accumulate in variables of your own (aggregation SUM, synchronization ON_READ) with two tf.functions, one that "
        "accumulates and one that applies; leave ema_overwrite_frequency unset and call optimizer.finalize_variable_values at "
        "the end. In an own loop: gpudist_core.TrainStep(..., accumulate=BATCHES).",
    ),
    Limit(
        (r"Inputs to operation AddN .*must have the same size and shape", r"\.fit\(|_symbolic_build"),
        "Keras 3's fit cannot build its metrics when the first batch, of training or of validation, does not divide by the "
        "number of replicas.",
        f"{_ONE_LINE}It takes any number of examples.\n"
        "Or make the first batch of both divide: dataset.batch(GLOBAL_BATCH_SIZE, drop_remainder=True) with a batch size that "
        "is a multiple of the number of replicas, and for validation at least so many examples.",
    ),
    Limit(
        (r"Value for attr 'T' of string is not in the list of allowed values", r"AddN", r"\.fit\(|_symbolic_build"),
        "Keras 3's fit cannot build its metrics where the model takes strings: it adds up the replicas' first batches.",
        f"{_ONE_LINE}It takes strings as they are.\n"
        "Or look strings up in the dataset, with the layer outside of the model:\n"
        "    dataset.map(lambda x, y: ({**x, 'name': string_lookup(x['name'])}, y))",
    ),
    Limit(
        (r"(?i)conv", r"\[0(,\d+)+\] (!=|vs\.) [^\[]*\[0(,\d+)+\]"),
        "A replica without rows runs a convolution, and TensorFlow's oneDNN kernels on CPU return a wrong shape for an "
        "empty batch.",
        f"{_ONE_LINE}An own loop takes gpudist_core.TrainStep.\n"
        "Or give every replica an example of the last batch: drop_remainder=True, or a number of examples that leaves more.",
    ),
    Limit(
        (r"Attempt to convert a value \((PerReplica|DistributedVariable)|Invalid reduction dimension 0",),
        "Keras 3's fit and evaluate do not work under MultiWorkerMirroredStrategy (keras-team/keras#20585).",
        f"{_ONE_LINE}It runs fit, evaluate and predict on several hosts, with the result of one device.\n"
        "Or write the training loop with strategy.run (MultiWorkerMirroredStrategy works there), or use tf_keras with "
        "TF_USE_LEGACY_KERAS=1.",
    ),
    Limit(
        (r"(float|int)\(\) argument must be a string,? .*not '(Mirrored|SyncOnRead|Distributed)Variable'",),
        "Python's float() and int() make no number of a variable that a strategy keeps on several devices, as Keras 3's "
        "learning rate, or a count of steps.",
        "Read it as an array: float(optimizer.learning_rate.numpy()), int(counter.numpy()), or "
        "float(keras.ops.convert_to_numpy(variable)).",
    ),
    Limit(
        (r"Could not apply FILE based sharding: the dataset only has \d+ file",),
        "The strategy shares out whole files, and there are fewer files than hosts.",
        "Share out rows:\n"
        "    options = tf.data.Options()\n"
        "    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA\n"
        "    dataset = dataset.with_options(options)\n"
        "Or write at least as many files as there are hosts, with equally many examples. Or let gpudist_core share out the "
        "examples: gpudist_core.Pipeline.from_tfrecord(files, ...).distribute(strategy).",
    ),
    Limit(
        (r"Collective ops must be configured at program startup",),
        "MultiWorkerMirroredStrategy has to come before anything else that TensorFlow does in the process.",
        "Make the strategy first, right after the imports: before tensors, datasets, layers and models.",
    ),
    Limit(
        (r"AssertionError", r"_distributed_tf_update_step"),
        "A variable that was made outside of the strategy's scope is trained inside of it: the strategy updates its own alone.",
        "Make the model, its layers and the optimizer under `with strategy.scope():`.",
    ),
    Limit(
        (r"Trying to access resource .* located in device .* from device",),
        "A step compiled by XLA (jit_compile=True) cannot reach variables of another device, so it cannot run under "
        "this strategy.",
        "compile(..., jit_compile=False), or jit_compile only functions that touch no variables. In an own loop: "
        "gpudist_core.TrainStep(..., jit_compile=True) compiles what XLA can compile.",
    ),
    Limit(
        (r"You must feed a value for placeholder tensor '(cond|while)",),
        "The strategy's collective all-reduce cannot run inside a condition or loop (an optimizer that makes its "
        "variables inside the "
        "tf.function, steps_per_execution).",
        "Make the optimizer's variables before the first step: optimizer.build(model.trainable_variables) in scope; or "
        "MirroredStrategy(cross_device_ops=tf.distribute.ReductionToOneDevice()). For steps_per_execution in fit: "
        "model = gpudist_core.distributed(model), in strategy.scope(), before compile.",
    ),
    Limit(
        (r"No OpKernel was registered to support Op 'Nccl",),
        "NCCL's all-reduce has no CPU kernel, so NcclAllReduce cannot be emulated.",
        "Leave cross_device_ops to the strategy (it takes NCCL on GPUs by itself), or choose HierarchicalCopyAllReduce.",
    ),
    Limit(
        (
            r"IndexError: list index out of range",
            r"_get_static_batch_dim|batch_sizes_for_worker|rebatch|get_distributed_dataset",
        ),
        "A dataset whose elements are scalars cannot be distributed: the strategy splits every element by its first dimension.",
        "Batch first: dataset.batch(GLOBAL_BATCH_SIZE). A static tensor does not belong into a dataset: keep it in a "
        "tf.Variable made in scope, or gpudist_core.replicate(tensor, strategy).",
    ),
    Limit(
        (_NOT_DETERMINISTIC,),
        "On GPUs runs are compared with deterministic kernels, and TensorFlow has none for this operation.",
        "Verify it with TF_DETERMINISTIC_OPS=0 in the environment: the noise floor is then as wide as the kernel's own spread. "
        "Or verify on --device cpu.",
    ),
    Limit(
        (r"(?i)(when|if) determinism is enabled",),
        "On GPUs runs are compared with deterministic operations, and TensorFlow then refuses one whose result no seed fixes.",
        "Give it a seed: tf.random.set_global_generator(tf.random.Generator.from_seed(...)), seed= of random operations. "
        "Or verify it with TF_DETERMINISTIC_OPS=0 in the environment, or on --device cpu.",
    ),
    Limit(
        (r"Cannot create a tensor proto whose content is larger than 2GB|larger than 2GB",),
        "A graph cannot hold a constant of 2 GB or more: an array that a tf.function or dataset.map closes over becomes one.",
        "Hand it in as an argument or keep it in a tf.Variable made in scope; for data, read it inside of the pipeline.",
    ),
    Limit(
        (r"has no attribute 'reset_states'",),
        "Keras 3 has no Metric.reset_states: this program was written for Keras 2.",
        "metric.reset_state(); or tf_keras with TF_USE_LEGACY_KERAS=1.",
    ),
    Limit(
        (r"Binding inputs to tf.function failed .*'PerReplica' object has no attribute 'dtype'",),
        "strategy.run refuses a tf.function with an input_signature in eager code: the signature is checked against the "
        "values of all replicas together.",
        "Leave out input_signature, or call strategy.run from inside a tf.function.",
    ),
    Limit(
        (r"AttributeError: 'PerReplica' object has no attribute 'dtype'",),
        "The program computes, outside of strategy.run, with a value that each replica has its own of (a row of a distributed "
        "dataset, what strategy.run returned).",
        "Move it into the function that strategy.run calls, or into the dataset's map; strategy.reduce and "
        "strategy.experimental_local_results make tensors of what strategy.run returned.",
    ),
    Limit(
        (r"destinations can ?not be empty",),
        "The strategy's reduction finds no destination for a value without a device.",
        "Reduce and gather tensors that were computed inside strategy.run, in replica context; of an input tf.identity(x).",
    ),
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
            return Sign(limit.summary, f"{_error(failure, limit)}\nOn one device the program {where}.", limit.fix)
    return None


FRAMEWORK_LIMIT = Cause(
    code="framework-limit",
    title="a known fault of TensorFlow or Keras",
    meaning="The program is right, but TensorFlow or Keras cannot run it on several devices.",
    evidence="The program's traceback has the signature of a known fault.",
    fix="The finding names the way round this fault.",
    search=_search,
    runs_that_ended=True,
    completed=False,
)
