#!/usr/bin/env bash
# tf.data service with dynamic sharding pairs inputs with the labels of other examples, if they come from a zip.
#
# Guess: ShardingPolicy.DYNAMIC gives each element of the dataset to one worker. Elements of Dataset.zip(inputs, labels) are pairs, so
# pairs stay together, or the service refuses the dataset.
# What happens: with two workers some inputs get the labels of other examples. There is no warning, and a pair may be lost at the end.
# With one worker, or without sharding, all pairs are right, so a test with one worker passes.
# Why: the dispatcher shards the sources of a dataset, not its elements: each source of a zip has splits of its own, `split_provider_index`
# in tensorflow/core/data/service/dispatcher.proto. A worker asks for the next input and for the next label in two calls; another
# worker's calls come between.
# Workaround: one source for both, `Dataset.from_tensor_slices((inputs, labels))` or one file of pairs, or ShardingPolicy.OFF.
# Versions: TensorFlow 2.21.0
# Seen: of 2,000 pairs of equal numbers.
#     1 worker, OFF: pairs all right
#     1 worker, DYNAMIC: pairs all right
#     2 workers, OFF: pairs all right
#     2 workers, DYNAMIC: pairs mixed
#     2 workers, DYNAMIC, one source: pairs all right

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 keras==3.15.1
cat > "$work/pairs.py" <<'PYTHON'
import tensorflow as tf

service = tf.data.experimental.service
dispatcher = service.DispatchServer()
numbers = tf.data.Dataset.range(2000)
zipped = tf.data.Dataset.zip(numbers, numbers)
workers = []


def add_worker():
    address = dispatcher.target.split("://")[1]
    workers.append(service.WorkerServer(service.WorkerConfig(dispatcher_address=address, heartbeat_interval_ms=100)))


def pairs(data, policy):
    served = data.apply(service.distribute(policy, dispatcher.target))
    return "all right" if all(first == second for first, second in served.as_numpy_iterator()) else "mixed"


for number in (1, 2):
    add_worker()
    for policy in (service.ShardingPolicy.OFF, service.ShardingPolicy.DYNAMIC):
        print(f"{number} worker{'s' * (number > 1)}, {policy.name}: pairs {pairs(zipped, policy)}")
one_source = pairs(numbers.map(lambda number: (number, number)), service.ShardingPolicy.DYNAMIC)
print(f"2 workers, DYNAMIC, one source: pairs {one_source}")
PYTHON
expect_header "$(run_python pairs.py)"
