"""BERT pretraining of the TensorFlow Model Garden: its MaskedLMTask, data loader, trainer and experiment runner (orbit)."""

import os
import tempfile

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # what tf-models-official asks for

import numpy as np
import tensorflow as tf
import tf_keras
from official.core import config_definitions, task_factory, train_lib
from official.modeling import optimization
from official.nlp.configs import bert, encoders
from official.nlp.data import pretrain_dataloader
from official.nlp.tasks import masked_lm

BATCH, LENGTH, VOCABULARY, MASKED, STEPS = 16, 16, 50, 4, 20
folder = tempfile.mkdtemp()
strategy = tf.distribute.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else tf.distribute.MirroredStrategy()
tf_keras.utils.set_random_seed(1)
draw = np.random.default_rng(2)


def example():
    weights = np.arange(MASKED) < draw.integers(1, MASKED + 1)
    ids = {
        "input_word_ids": draw.integers(1, VOCABULARY, LENGTH),
        "input_mask": np.ones(LENGTH, int),
        "input_type_ids": np.zeros(LENGTH, int),
        "masked_lm_positions": draw.permutation(LENGTH)[:MASKED],
        "masked_lm_ids": draw.integers(1, VOCABULARY, MASKED),
    }
    features = {name: tf.train.Feature(int64_list=tf.train.Int64List(value=value)) for name, value in ids.items()}
    features["masked_lm_weights"] = tf.train.Feature(float_list=tf.train.FloatList(value=weights.astype(float)))
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


with tf.io.TFRecordWriter(f"{folder}/train.tfrecord") as file:
    for _ in range(STEPS * BATCH):
        file.write(example())

encoder = encoders.BertEncoderConfig(
    vocab_size=VOCABULARY, hidden_size=16, num_layers=1, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=LENGTH, dropout_rate=0.0, attention_dropout_rate=0.0,
)  # fmt: skip
data = pretrain_dataloader.BertPretrainDataConfig(
    input_path=f"{folder}/train.tfrecord", global_batch_size=BATCH, is_training=True, seq_length=LENGTH,
    max_predictions_per_seq=MASKED, use_next_sentence_label=False, use_v2_feature_names=True,
    seed=3, shuffle_buffer_size=1, deterministic=True,
)  # fmt: skip
task_config = masked_lm.MaskedLMConfig(
    model=bert.PretrainerConfig(encoder=encoders.EncoderConfig(type="bert", bert=encoder), cls_heads=[]),
    train_data=data,
)
optimizer = optimization.OptimizationConfig(
    {"optimizer": {"type": "sgd"}, "learning_rate": {"type": "constant", "constant": {"learning_rate": 0.1}}}
)
trainer = config_definitions.TrainerConfig(
    optimizer_config=optimizer, train_steps=STEPS, steps_per_loop=5, summary_interval=STEPS, checkpoint_interval=STEPS
)
params = config_definitions.ExperimentConfig(task=task_config, trainer=trainer)
with strategy.scope():
    task = task_factory.get_task(params.task, logging_dir=folder)
train_lib.run_experiment(strategy, task, mode="train", params=params, model_dir=folder)
