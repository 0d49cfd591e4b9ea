"""A vanilla MPNN of TensorFlow GNN, trained by its runner: its task, its KerasTrainer and its model.

An argument `ordered` keeps the order of the batches, which the runner's parallel maps leave to chance.
"""

import os
import sys
import tempfile

import numpy as np
import tensorflow as tf
import tensorflow_gnn as tfgnn
from tensorflow_gnn import runner
from tensorflow_gnn.models import vanilla_mpnn

SCHEMA = """
context { features { key: "label" value { dtype: DT_INT32 } } }
node_sets { key: "node" value { features { key: "features" value { dtype: DT_FLOAT shape { dim { size: 4 } } } } } }
edge_sets { key: "edge" value { source: "node" target: "node" } }
"""
GRAPHS, BATCH, CLASSES = 320, 16, 3
spec = tfgnn.create_graph_spec_from_schema_pb(tfgnn.parse_schema(SCHEMA))
draw = np.random.default_rng(2)


def example():
    nodes, edges = draw.integers(3, 9), draw.integers(4, 16)
    features = draw.normal(size=(nodes, 4)).astype("float32")
    graph = tfgnn.GraphTensor.from_pieces(
        context=tfgnn.Context.from_fields(features={"label": [int(features[0, :CLASSES].argmax())]}),
        node_sets={"node": tfgnn.NodeSet.from_fields(sizes=[nodes], features={"features": features})},
        edge_sets={
            "edge": tfgnn.EdgeSet.from_fields(
                sizes=[edges],
                adjacency=tfgnn.Adjacency.from_indices(
                    ("node", draw.integers(0, nodes, edges, dtype="int32")),
                    ("node", draw.integers(0, nodes, edges, dtype="int32")),
                ),
            )
        },
    )
    return tfgnn.write_example(graph).SerializeToString()


class Provider(runner.DatasetProvider):
    def get_dataset(self, context):
        return tf.data.Dataset.from_tensor_slices(examples).shard(context.num_input_pipelines, context.input_pipeline_id)


def model_fn(graph_spec):
    graph = inputs = tf.keras.layers.Input(type_spec=graph_spec)
    graph = tfgnn.keras.layers.MapFeatures(node_sets_fn=lambda node_set, node_set_name: node_set["features"])(graph)
    update = vanilla_mpnn.VanillaMPNNGraphUpdate(
        units=16, message_dim=16, receiver_tag=tfgnn.SOURCE, l2_regularization=5e-4, dropout_rate=0.0
    )
    return tf.keras.Model(inputs, update(graph))


if "ordered" in sys.argv:
    tf.config.experimental.enable_op_determinism()
strategy = tf.distribute.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else tf.distribute.MirroredStrategy()
tf.keras.utils.set_random_seed(1)
examples = [example() for _ in range(GRAPHS)]
runner.run(
    train_ds_provider=Provider(),
    model_fn=model_fn,
    optimizer_fn=lambda: tf.keras.optimizers.Adam(0.01),
    trainer=runner.KerasTrainer(strategy, model_dir=tempfile.mkdtemp(), steps_per_epoch=GRAPHS // BATCH, verbose=2),
    task=runner.RootNodeMulticlassClassification("node", num_classes=CLASSES, label_fn=runner.ContextLabelFn("label")),
    gtspec=spec,
    global_batch_size=BATCH,
    epochs=1,
)
