"""Edits that give the replicas together what one device has: the whole batch, each example once, the same constants."""

import textwrap

import pytest

pytest.importorskip("libcst")

from tests.emulate.fix.test_edits import CONTEXT, HEAD, edits, lines


def gathered(value):
    return f"{CONTEXT}.all_gather({value}, axis=0)"


def test_reductions_over_the_batch_see_all_replicas_and_those_of_an_example_do_not():
    body = "def step(x):\n    return tf.reduce_max(tf.reduce_sum(x, axis=1)) - tf.reduce_mean(x)  # here\n"
    edited = lines("in-batch-negatives", body)
    assert f"tf.reduce_max({gathered('tf.reduce_sum(x, axis=1)')}) - tf.reduce_mean({gathered('x')})" in edited


def test_of_nested_reductions_the_inner_one_is_gathered():
    body = "def step(x):\n    return tf.reduce_sum(x / tf.reduce_sum(x))  # here\n"
    assert f"tf.reduce_sum(x / tf.reduce_sum({gathered('x')}))" in lines("in-batch-negatives", body)


def test_pairs_of_examples_are_gathered_on_the_side_that_is_transposed():
    body = """
    def step(own, y):
        similar = own @ tf.transpose(own)  # here
        other = tf.matmul(own, own, transpose_b=True)
        return similar, other, y[:, None] == y[None, :]
    """
    edited = lines("in-batch-negatives", body)
    assert f"own @ tf.transpose({gathered('own')})" in edited
    assert f"tf.matmul(own, {gathered('own')}, transpose_b=True)" in edited
    assert f"y[:, None] == {gathered('y')}[None, :]" in edited


@pytest.mark.parametrize(
    ("code", "line", "right"),
    [
        ("depends-on-replicas", "rate = 0.1 * strategy.num_replicas_in_sync", "rate = 0.1"),
        ("depends-on-replicas", "rate = strategy.num_replicas_in_sync * 0.1", "rate = 1 * 0.1"),
        ("depends-on-replicas", "smoothing = 0.1 / strategy.num_replicas_in_sync", "smoothing = 0.1"),
        ("update-scaling", "optimizer = SGD(0.2 * num_workers)", "optimizer = SGD(0.2)"),
        ("initial-weights", "start = Glorot(seed=strategy.num_replicas_in_sync)", "start = Glorot(seed=1)"),
        ("samples-repeated", "data = data.shuffle(9, seed=host)", "data = data.shuffle(9, seed=0)"),
    ],
)
def test_a_number_or_an_index_of_replicas_or_hosts_is_that_of_one_device(code, line, right):
    body = f"num_workers = len(config['cluster']['worker'])\nhost = context.input_pipeline_id\n{line}  # here\n"
    assert lines(code, body).endswith(f"\n{right}  # here\n")


def test_a_number_of_replicas_in_another_line_of_the_function_is_found():
    body = "def step(x):\n    rate = 0.1 / strategy.num_replicas_in_sync\n    return x * rate  # here\n"
    assert "    rate = 0.1\n" in lines("depends-on-replicas", body)


def test_a_value_that_only_has_a_number_of_replicas_in_it_is_left():
    body = "batch = 8 * strategy.num_replicas_in_sync\nrate = batch * 0.1  # here\n"
    assert not any("rate = 1 * 0.1" in text for text in edits("depends-on-replicas", HEAD + body))


def test_a_shard_that_the_program_takes_goes_with_its_line_if_that_does_nothing_else():
    assert (
        lines("samples-missing", "data = load()\ndata = data.shard(4, 0)  # here\nuse(data)\n") == "data = load()\nuse(data)\n"
    )
    assert lines("samples-missing", "data = load().shard(4, 0).batch(8)  # here\n") == "data = load().batch(8)  # here\n"


def test_a_dataset_that_nobody_shards_is_sharded_by_data():
    body = "options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF  # here\n"
    assert "tf.data.experimental.AutoShardPolicy.DATA  # here" in lines("samples-repeated", body)


def test_a_pipeline_of_each_host_takes_its_share_of_the_batches():
    body = """
    def pipeline(context):
        return load().batch(8)  # here
    data = strategy.distribute_datasets_from_function(pipeline)
    """
    share = ".shard(context.num_input_pipelines, context.input_pipeline_id)"
    assert f"return load().batch(8){share}  # here" in lines("samples-repeated", body)


def test_results_of_the_first_replica_become_those_of_all():
    body = "loss = strategy.experimental_local_results(losses)[0]  # here\n"
    assert edits("loss-report", HEAD + body)[:2] == [
        f'{HEAD}loss = strategy.reduce("{how}", losses, axis=None)  # here\n' for how in ("SUM", "MEAN")
    ]


@pytest.mark.parametrize("code", ["accumulation", "variable-aggregation"])
def test_a_variable_combines_otherwise_what_replicas_assign(code):
    body = "v = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)\nv.assign(x)  # here\n"
    assert [text.partition("VariableAggregation.")[2].partition(")")[0] for text in edits(code, HEAD + body)] == [
        "MEAN",
        "ONLY_FIRST_REPLICA",
    ]


def test_a_sparse_gradient_keeps_its_rows():
    body = textwrap.dedent("""
    gradient = tape.gradient(loss, table)
    values = context.all_reduce("SUM", gradient.values)  # here
    optimizer.apply([(tf.IndexedSlices(values, gradient.indices), table)])
    """)
    whole = "\ngradient = tape.gradient(loss, table)\noptimizer.apply([(gradient, table)])\n"
    assert lines("sparse-gradient", body) == whole


def test_gradients_become_dense():
    edited = lines("sparse-gradient", "gradients = tape.gradient(loss, variables)  # here\n")
    assert "gradients = [tf.convert_to_tensor(each) for each in tape.gradient(loss, variables)]  # here" in edited


@pytest.mark.parametrize("made", ["MirroredStrategy(names)", "OneDeviceStrategy('/cpu:0')"])
def test_a_strategy_of_some_devices_becomes_one_of_all(made):
    text = f"import tensorflow as tf\n\nstrategy = tf.distribute.{made}  # here\n"
    assert [edited.splitlines()[-1] for edited in edits("replicas-missing", text)] == [
        f"strategy = tf.distribute.{name}()  # here" for name in ("MirroredStrategy", "MultiWorkerMirroredStrategy")
    ]


def test_what_the_line_assigns_is_summed_where_no_sum_is_named():
    edited = lines("local-normalization", "def step(y):\n    count = tf.math.bincount(y)  # here\n")
    assert f"count = {CONTEXT}.all_reduce(tf.distribute.ReduceOp.SUM, tf.math.bincount(y))" in edited
