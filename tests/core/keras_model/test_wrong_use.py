"""What fit and its like cannot do they refuse in words: the rule, what was received, what to do."""

from __future__ import annotations

from tests.core.conftest import OnHosts
from tests.core.keras_model import wrong_use

ELSEWHERE = (
    "UsageError: A model must be used with the strategy that it was made in. Received: strategy='{}', model_strategy={}. "
    "Leave the other strategy's scope, or make the model there."
)
NO_TARGETS = (
    "UsageError: A model compiled with a loss needs targets. Received: y=None. Use fit(x, y), or a pipeline or dataset with "
    "examples (x, y)."
)
COMPARING = (
    "UsageError: An example's loss must not depend on the other examples of its replica. Received: loss='circle'. In a "
    "custom loss compare them with those of all replicas: apply keras.losses.circle to "
    "tf.distribute.get_replica_context().all_gather(..., axis=0) of y and y_pred, and keep the values of the replica's own "
    "examples. The context is None while Keras builds the model."
)
CALLED_OUTSIDE = (
    "UsageError: The model must be made in the scope of the step's strategy. Received: variable='kernel', "
    "strategy='MirroredStrategy'. Make it under `with strategy.scope():`."
)
IN_A_BRANCH = (
    "UsageError: Gradients must be applied outside of branches, loops and functions of a step, where collectives do not "
    "work. Received: apply='in a tf.cond, tf.while_loop or tf.function'. To update with several batches, use "
    "gradient_accumulation_steps of the optimizer, which gd.distributed supports, and apply each batch's gradients. Or use "
    "gd.TrainStep(accumulate=...)."
)
SUMMED_TWICE = (
    "UsageError: The gradients in a custom step are those of all replicas, and must not be summed again. Received: "
    "reduce_op='SUM', replicas=2. Leave the all_reduce out, and a division of its result by the number of replicas. Use an "
    "optimizer of Keras 3: one of tf_keras sums by itself."
)
EXPECTED = {
    "no model": "UsageError: model must be a Keras model. Received: model='Dense'. Use gd.TrainStep for other callables.",
    "unknown draws": "UsageError: draws must be 'replica' or 'row'. Received: draws='column'.",
    "XLA": "Unavailable: XLA must compile a step for one device only. Received: jit_compile=True, replicas=2. Leave "
    "jit_compile out, or use one device.",
    "optimizer outside": "UsageError: The optimizer must be made in the scope of the step's strategy. Received: "
    "variable='iteration', strategy='MirroredStrategy'. Make it under `with strategy.scope():`.",
    "metric outside": "UsageError: A metric must be made in the scope of the model's strategy. Received: "
    "metric='sparse_categorical_accuracy', strategy='MirroredStrategy'. Make it under `with strategy.scope():`.",
    "fit after a call outside": CALLED_OUTSIDE,
    "fit after a call outside, of an optimizer that keeps moments": CALLED_OUTSIDE,
    "a batch after a call outside": CALLED_OUTSIDE,
    "evaluate after a call outside": "nothing",
    "evaluate after a call outside, with an optimizer that keeps moments": CALLED_OUTSIDE,
    "predict after a call outside": "nothing",
    "fit in another scope": ELSEWHERE.format("OneDeviceStrategy", "'MirroredStrategy'"),
    "evaluate in another scope": ELSEWHERE.format("OneDeviceStrategy", "'MirroredStrategy'"),
    "predict in another scope": ELSEWHERE.format("OneDeviceStrategy", "'MirroredStrategy'"),
    "fit in a scope of a model of none": ELSEWHERE.format("MirroredStrategy", None),
    "compile in a scope of a model of none": ELSEWHERE.format("MirroredStrategy", None),
    "a loss over all rows": "UsageError: A loss must have a value for each example, so that it does not depend on the other "
    "examples of its replica. Received: loss='dice'. Leave the first axis out of its axes: keras.losses.Dice(axis=(1, 2, 3)) "
    "for images.",
    "a loss over all rows by name": "UsageError: A loss must have a value for each example, so that it does not depend on "
    "the other examples of its replica. Received: loss='tversky'. Leave the first axis out of its axes: "
    "keras.losses.Dice(axis=(1, 2, 3)) for images.",
    "a loss along the rows": "UsageError: A loss must have a value for each example, so that it does not depend on the other "
    "examples of its replica. Received: loss='cosine_similarity'. Leave the first axis out of its axes.",
    "a loss that compares rows": COMPARING,
    "a loss that compares rows, by name": COMPARING,
    "a step that returns a number": "UsageError: A step must return a dict of logs. Received: returned=<tf.Tensor "
    "'Const_1:0' shape=() dtype=float32>. Return {'loss': loss}, or nothing.",
    "a step that logs rows": "UsageError: A log of a step must be a mean over the examples, with the same shape on all "
    "replicas. Received: log='by_row', shapes=[(3,), (2,)]. Return the mean over the examples. Use predict for outputs by "
    "example.",
    "an update in a branch": IN_A_BRANCH,
    "two updates with a loss scale that may be added up": "UsageError: An optimizer with a loss scale and "
    "gradient_accumulation_steps must be applied once in a step: the first may be skipped. Received: applied=2, "
    "gradient_accumulation_steps=3. Apply it once, leave gradient_accumulation_steps out, or compile with run_eagerly=True.",
    "gradients that are summed again": SUMMED_TWICE,
    "an optimizer of tf_keras": SUMMED_TWICE,
    "a loss that is one number, with weights": "UsageError: A loss must return one value for each example if examples have "
    "weights or a mask. Received: shape=(), sample_weight_shape=(6,). Remove the mean from the loss.",
    "fewer rows than replicas": "UsageError: A global batch must have at least one example for each replica (the last batch "
    "of an epoch may have fewer). Received: global_batch_size=1, replicas=2. Use a larger global batch or fewer devices.",
    "an epoch of no batches": "UsageError: steps_per_epoch must be a positive integer. Received: steps_per_epoch=-1. None "
    "means all.",
    "a pipeline and targets": "UsageError: A pipeline must provide the targets, weights and batches itself. Received: "
    "y='ndarray', batch_size=4. Leave them out of fit, and put them into the pipeline.",
    "a pipeline and a size of its batches": "UsageError: A pipeline must provide the targets, weights and batches itself. "
    "Received: validation_batch_size=3. Leave them out of fit, and put them into the pipeline.",
    "a pipeline that is distributed": "UsageError: fit needs the pipeline itself, which it distributes. Received: "
    "x='Distributed'. Leave distribute(...) out.",
    "no data": "UsageError: fit, evaluate and predict need data. Received: x=None. Pass arrays, a tf.data.Dataset or a "
    "gd.Pipeline.",
    "no targets": NO_TARGETS,
    "an evaluation without targets": NO_TARGETS,
    "a split of a pipeline": "ValueError: Argument `validation_split` is only supported for tensors or NumPy arrays."
    "Found incompatible type in the input: [<class 'gpudist_core.pipelines.pipeline.Pipeline'>]",
    "weights of classes that are not numbered": "UsageError: A class must be a number. Received: dtype='string'. Number the "
    "classes in a map: keras.layers.StringLookup.",
    "weights of classes and rows": "UsageError: Weights need examples of the form (x, y). Received: "
    "row=(TensorSpec(shape=(64,), dtype=tf.float32, name=None), TensorSpec(shape=(), dtype=tf.int64, name=None), "
    "TensorSpec(shape=(), dtype=tf.float32, name=None)). Return (x, y) from the last map, without a weight.",
    "parts of different lengths": "UsageError: All parts of a batch must have the same number of examples. Received: "
    "rows=[7, 12]. Fix the data.",
}


def test_every_refusal_says_the_rule_what_was_received_and_what_to_do(on_hosts: OnHosts) -> None:
    (said,) = on_hosts("1x2", wrong_use.said)
    assert said == EXPECTED


def test_an_accumulation_in_a_branch_is_refused_on_one_device_too(on_hosts: OnHosts) -> None:
    assert on_hosts("1x1", wrong_use.accumulating_in_a_branch) == [IN_A_BRANCH]
