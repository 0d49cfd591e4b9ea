"""What fit and its like cannot do they refuse in words: the rule, what was received, what to do."""

from __future__ import annotations

from tests.core.conftest import OnHosts
from tests.core.keras_model import wrong_use

ELSEWHERE = (
    "WrongUse: A model must be used with the strategy that it was made in. Received: strategy='{}', model_strategy={}. "
    "Leave the other strategy's scope, or make the model there."
)
NO_TARGETS = (
    "WrongUse: A model that was compiled with a loss needs targets. Received: y=None. Give (x, y): fit(x, y), or a pipeline or "
    "dataset whose rows are (x, y)."
)
COMPARING = (
    "WrongUse: A row's loss must not depend on which other rows a replica has. Received: loss='circle'. In a loss of your own "
    "compare them with those of all replicas: keras.losses.circle of what tf.distribute.get_replica_context().all_gather(..., "
    "axis=0) gives of y and y_pred, and of its values those of the replica's own rows. The context is None while Keras builds "
    "the model."
)
CALLED_OUTSIDE = (
    "WrongUse: The model must be made in the scope of the step's strategy. Received: variable='kernel', "
    "strategy='MirroredStrategy'. Make it under `with strategy.scope():`."
)
IN_A_BRANCH = (
    "WrongUse: Gradients must be applied outside of branches, loops and functions of a step, where replicas cannot meet. "
    "Received: apply='in a tf.cond, tf.while_loop or tf.function'. To update with several batches, give the optimizer "
    "gradient_accumulation_steps, which gd.distributed and Keras know, and apply each batch's gradients, or use "
    "gd.TrainStep(accumulate=...)."
)
EXPECTED = {
    "no model": "WrongUse: A Keras model is needed. Received: model='Dense'. Use gd.TrainStep for another callable.",
    "unknown draws": "WrongUse: draws must be 'replica' or 'row'. Received: draws='column'. Choose one of them.",
    "XLA": "Unavailable: XLA compiles a step for one device. Received: jit_compile=True, replicas=2. "
    "Leave jit_compile out, or use one device.",
    "optimizer outside": "WrongUse: The optimizer must be made in the scope of the step's strategy. Received: "
    "variable='iteration', strategy='MirroredStrategy'. Make it under `with strategy.scope():`.",
    "metric outside": "WrongUse: A metric must be made in the scope of the model's strategy. Received: "
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
    "a loss over all rows": "WrongUse: A loss has a value for each row, so that it does not depend on which rows a "
    "replica has. Received: loss='dice'. Leave the rows out of its axes: keras.losses.Dice(axis=(1, 2, 3)) for images.",
    "a loss over all rows by name": "WrongUse: A loss has a value for each row, so that it does not depend on which rows a "
    "replica has. Received: loss='tversky'. Leave the rows out of its axes: keras.losses.Dice(axis=(1, 2, 3)) for images.",
    "a loss along the rows": "WrongUse: A loss has a value for each row, so that it does not depend on which rows a replica "
    "has. Received: loss='cosine_similarity'. Leave the rows out of its axes.",
    "a loss that compares rows": COMPARING,
    "a loss that compares rows, by name": COMPARING,
    "a step that returns a number": "WrongUse: A step must return a dict of logs. Received: "
    "returned=<tf.Tensor 'Const_1:0' shape=() dtype=float32>. Return {'loss': loss}, or nothing.",
    "a step that logs rows": "WrongUse: What a step logs is a mean over the rows, of one shape on all replicas. Received: "
    "log='by_row', shapes=[(3,), (2,)]. Return the mean of its rows; outputs by row are what predict returns.",
    "an update in a branch": IN_A_BRANCH,
    "two updates with a loss scale that may be added up": "WrongUse: An optimizer with a loss scale that adds gradients up is "
    "applied once in a step, as the first may be skipped. Received: applied=2, gradient_accumulation_steps=3. Apply it once, "
    "leave gradient_accumulation_steps out, or compile with run_eagerly=True.",
    "weights of what a variable keeps": "WrongUse: What a step of one's own assigns to a variable that is trained must be made "
    "of its gradients by operations without a state, so that it can be made of those of all replicas. Received: "
    "operation='ReadVariableOp'. Make it of their sum: tf.distribute.get_replica_context().all_reduce('SUM', gradients).",
    "a loss that is one number, with weights": "WrongUse: A loss must return one value for each row where rows have weights "
    "or a mask. Received: shape=(), sample_weight_shape=(6,). Leave out its mean.",
    "fewer rows than replicas": "WrongUse: A global batch has at least one row for each replica (the last of an epoch may "
    "have fewer). Received: global_batch_size=1, replicas=2. Make the global batch larger, or use fewer devices.",
    "an epoch of no batches": "WrongUse: The batches of an epoch must be a positive whole number. Received: "
    "steps_per_epoch=-1. None means all.",
    "a pipeline and targets": "WrongUse: A pipeline has targets, weights and batches of its own. Received: y='ndarray', "
    "batch_size=4. Put them into the pipeline.",
    "a pipeline and a size of its batches": "WrongUse: A pipeline has targets, weights and batches of its own. Received: "
    "validation_batch_size=3. Put them into the pipeline.",
    "a pipeline that is distributed": "WrongUse: A model is given a pipeline, which it distributes itself. Received: "
    "x='Distributed'. Leave out its distribute(...).",
    "no data": "WrongUse: fit, evaluate and predict need data. Received: x=None. "
    "Give arrays, a tf.data.Dataset or a gd.Pipeline.",
    "no targets": NO_TARGETS,
    "an evaluation without targets": NO_TARGETS,
    "a split of a pipeline": "ValueError: Argument `validation_split` is only supported for tensors or NumPy arrays."
    "Found incompatible type in the input: [<class 'gpudist_core.pipelines.pipeline.Pipeline'>]",
    "weights of classes that are not numbered": "WrongUse: A class is a number. Received: dtype='string'. Number the "
    "classes in a map: keras.layers.StringLookup.",
    "weights of classes and rows": "WrongUse: Weights are added to rows of (x, y). Received: "
    "row=(TensorSpec(shape=(64,), dtype=tf.float32, name=None), TensorSpec(shape=(), dtype=tf.int64, name=None), "
    "TensorSpec(shape=(), dtype=tf.float32, name=None)). Return (x, y) from the last map, and no weight.",
    "parts of different lengths": "WrongUse: All parts of a batch must have equally many rows. Received: rows=[7, 12]. "
    "Mend the data.",
}


def test_every_refusal_says_the_rule_what_was_received_and_what_to_do(on_hosts: OnHosts) -> None:
    (said,) = on_hosts("1x2", wrong_use.said)
    assert said == EXPECTED


def test_an_accumulation_in_a_branch_is_refused_on_one_device_too(on_hosts: OnHosts) -> None:
    assert on_hosts("1x1", wrong_use.accumulating_in_a_branch) == [IN_A_BRANCH]
