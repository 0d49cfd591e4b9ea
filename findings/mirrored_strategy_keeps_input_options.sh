#!/usr/bin/env bash
# MirroredStrategy keeps the replication mode of one dataset for each later one: an epoch then has each example once for each replica.
#
# Guess: the InputOptions given to distribute_datasets_from_function concern that dataset alone, and PER_WORKER is the default.
# What happens: after one dataset with PER_REPLICA the same strategy calls the function of each later dataset once for each replica, too, with
# no options and with an explicit PER_WORKER. A function that does not shard then gives all data to each replica. So whether an epoch
# of training data has 4 or 2 steps depends on whether, say, a dataset for a metric was made before.
# Why: `_input_workers_with_options` in tensorflow/python/distribute/mirrored_strategy.py writes the mode into
# `self._input_workers_devices`, which it reads for all other options. Nothing sets it back.
# Workaround: in the function shard by `context.num_input_pipelines` and `context.input_pipeline_id`, or use a strategy of its own.
# Versions: TensorFlow 2.21.0
# Seen: calls of a function that makes the batches 0 1 2 3, and what each of two replicas gets, in this order with one strategy.
#     no options: 1 call, 0 2 and 1 3
#     PER_WORKER: 1 call, 0 2 and 1 3
#     PER_REPLICA: 2 calls, 0 1 2 3 and 0 1 2 3
#     no options: 2 calls, 0 1 2 3 and 0 1 2 3
#     PER_WORKER: 2 calls, 0 1 2 3 and 0 1 2 3

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/batches.py" <<'PYTHON'
import tensorflow as tf

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())
modes = tf.distribute.InputReplicationMode
per_worker = tf.distribute.InputOptions(experimental_replication_mode=modes.PER_WORKER, experimental_fetch_to_device=False)
per_replica = tf.distribute.InputOptions(
    experimental_replication_mode=modes.PER_REPLICA,
    experimental_place_dataset_on_device=True,
    experimental_fetch_to_device=False,
)
sequence = (
    ("no options", None),
    ("PER_WORKER", per_worker),
    ("PER_REPLICA", per_replica),
    ("no options", None),
    ("PER_WORKER", per_worker),
)
for name, options in sequence:
    contexts = []

    def batches(context):
        contexts.append(context)
        return tf.data.Dataset.range(4).batch(1)

    received = [[], []]
    for batch in strategy.distribute_datasets_from_function(batches, options):
        for replica, values in enumerate(strategy.experimental_local_results(batch)):
            received[replica].extend(str(value) for value in values.numpy())
    calls = "1 call" if len(contexts) == 1 else f"{len(contexts)} calls"
    print(f"{name}: {calls}, {' '.join(received[0])} and {' '.join(received[1])}")
PYTHON
expect_header "$(run_python batches.py)"
