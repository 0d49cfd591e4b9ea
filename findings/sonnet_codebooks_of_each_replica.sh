#!/usr/bin/env bash
# Sonnet's VectorQuantizerEMA under its own Replicator learns a codebook on each replica: one vector has other codes on other replicas.
#
# Guess: snt.distribute.Replicator is Sonnet's way to train on many GPUs, so the codebook of a VQ-VAE, which no optimizer sees, is joined
# over the replicas, or the layer refuses.
# What happens: each replica moves its codebook by the averages of its own share of the batch, and the codebooks drift apart. The
# encoder and the decoder get the mean of gradients that belong to different codes. A checkpoint has the codebook of the first
# replica, which saw its share of the data only. snt.BatchNorm's moving averages do the same.
# Why: `VectorQuantizerEMA.__call__` in sonnet/src/nets/vqvae.py has no all_reduce. `replica_local_creator` in
# sonnet/src/distribute/replicator.py makes each variable ON_READ and ONLY_FIRST_REPLICA: local, and saved from the first replica.
# Workaround: snt.nets.VectorQuantizer, whose codebook has gradients; or a subclass that gives the all-reduced sums of the codes to
# ema_cluster_size and ema_dw.
# Versions: TensorFlow 2.21.0, dm-sonnet 2.0.2
# Seen: codebooks of 8 codes after 20 steps with equal batches, and the codes of one vector. All start with one codebook.
#     one device: 1 codebook, codes of one vector equal
#     four replicas: 4 codebooks, codes of one vector different; checkpoint: codebook of replica 0

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
environment tensorflow==2.21.0 dm-sonnet==2.0.2
cat > "$work/codes.py" <<'PYTHON'
import sys

import numpy as np
import sonnet as snt
import tensorflow as tf

replicas, checkpoint = int(sys.argv[1]), sys.argv[2]
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
reduce = tf.distribute.ReductionToOneDevice()
replicator = snt.distribute.Replicator([f"CPU:{number}" for number in range(replicas)], cross_device_ops=reduce)
tf.random.set_seed(0)
draw = np.random.default_rng(0)
shares = np.split(draw.normal(size=(64, 2)).astype("float32"), replicas)
vectors = draw.normal(size=(32, 2)).astype("float32")
with replicator.scope():
    quantizer = snt.nets.VectorQuantizerEMA(embedding_dim=2, num_embeddings=8, commitment_cost=0.25, decay=0.5)
batch = replicator.experimental_distribute_values_from_function(lambda context: tf.constant(shares[context.replica_id_in_sync_group]))


@tf.function
def step(batch):
    replicator.run(quantizer, (batch, True))


@tf.function
def codes():
    return replicator.run(lambda: quantizer(vectors, False)["encoding_indices"])


def copies(values):
    return [value.numpy() for value in replicator.experimental_local_results(values)]


books = copies(quantizer.embeddings)
assert all(np.array_equal(book, books[0]) for book in books)
for _ in range(20):
    step(batch)
books, given = copies(quantizer.embeddings), copies(codes())
path = tf.train.Checkpoint(codes=quantizer.embeddings).save(checkpoint)
saved = tf.train.load_checkpoint(path).get_tensor("codes/.ATTRIBUTES/VARIABLE_VALUE")
number = len({book.tobytes() for book in books})
codes_are = "equal" if all(np.array_equal(indices, given[0]) for indices in given) else "different"
of_first = "; checkpoint: codebook of replica 0" if number > 1 and np.array_equal(saved, books[0]) else ""
print(f"{number} codebook{'s' * (number > 1)}, codes of one vector {codes_are}{of_first}")
PYTHON
one=$(run_python codes.py 1 "$work/one/checkpoint")
four=$(run_python codes.py 4 "$work/four/checkpoint")
expect_header "one device: $one"$'\n'"four replicas: $four"
