"""Edits on syntax trees: what is proposed for a line, and that all else of the file stays."""

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("libcst")

from emulate.errors import UsageError
from emulate.fix.edits import EDITS, propose, without_shuffle
from emulate.fix.source import CORE, PLAIN, Names, Site, Source
from emulate.verify.causes import all_causes

HEAD = "import tensorflow as tf\n\nstrategy = tf.distribute.MirroredStrategy()\n"
CONTEXT = "tf.distribute.get_replica_context()"
SUM = "tf.distribute.ReduceOp.SUM"


def edits(code, text, marked="# here", fixes=(), form=PLAIN):
    """Return the texts that are proposed for the line with the mark."""
    source = Source(text.encode(), Path("train.py"))
    line = next((number for number, line in enumerate(text.splitlines(), 1) if marked in line), 0)
    site = Site(source, Names.of(source), line, fixes)
    return [source.apply(one.changes).decode() for one in propose(code, site) if one.form == form]


def lines(code, body, **options):
    """Return the body of the first proposal, for a program that begins with `HEAD`."""
    first = edits(code, HEAD + textwrap.dedent(body), **options)[0]
    assert first.startswith(HEAD)
    return first.removeprefix(HEAD)


def test_a_mean_is_divided_by_the_replicas_of_the_programs_strategy():
    body = "def step(x):\n    loss = tf.reduce_mean(x)  # here\n"
    assert "loss = tf.reduce_mean(x) / strategy.num_replicas_in_sync  # here" in lines("loss-scaling", body)


def test_names_are_those_of_the_program():
    text = "import tensorflow as T\n\ndef step(x):\n    return T.math.reduce_mean(x)  # here\n"
    assert "T.math.reduce_mean(x) / T.distribute.get_strategy().num_replicas_in_sync" in edits("loss-scaling", text)[0]


def test_nothing_is_proposed_with_tensorflow_where_it_is_not_imported():
    assert edits("loss-scaling", "def step(x):\n    return x.mean()  # here\n") == []


def test_a_mean_over_an_axis_is_left():
    body = "def step(x):\n    per_row = tf.reduce_mean(x, axis=1)  # here\n"
    assert lines("loss-scaling", body).endswith("tf.reduce_mean(x, axis=1) / strategy.num_replicas_in_sync  # here\n")
    assert len(edits("loss-scaling", HEAD + body)) == 1


def test_a_loss_of_several_terms_is_divided_behind_the_last():
    body = "def step(x):\n    loss = tf.reduce_mean(x)  # here\n    loss += penalty()\n    return loss\n"
    *_, whole = edits("loss-scaling", HEAD + body)
    assert whole.endswith("    loss += penalty()\n    loss = loss / strategy.num_replicas_in_sync\n    return loss\n")


def test_a_loss_that_is_divided_twice_is_divided_once():
    body = "def step(x):\n    loss = mean(x) / strategy.num_replicas_in_sync  # here\n"
    edited = lines("loss-scaling", body, fixes=["If the gradients are too small"])
    assert edited == "def step(x):\n    loss = mean(x)  # here\n"


def test_a_count_is_summed_and_the_division_by_replicas_goes():
    body = """
    def step(x, mask):
        count = tf.reduce_sum(mask)  # here
        return tf.reduce_sum(x * mask) / count / strategy.num_replicas_in_sync
    """
    assert lines("local-normalization", body) == textwrap.dedent(f"""
    def step(x, mask):
        count = {CONTEXT}.all_reduce({SUM}, tf.reduce_sum(mask))  # here
        return tf.reduce_sum(x * mask) / count
    """)


def test_a_line_that_only_divides_by_the_replicas_goes_as_a_whole():
    body = """
    def step(x, mask):
        loss = tf.reduce_sum(x * mask) / tf.reduce_sum(mask)  # here
        loss = loss / strategy.num_replicas_in_sync
        return loss
    """
    assert lines("local-normalization", body) == textwrap.dedent(f"""
    def step(x, mask):
        loss = tf.reduce_sum(x * mask) / {CONTEXT}.all_reduce({SUM}, tf.reduce_sum(mask))  # here
        return loss
    """)


def test_the_history_of_a_fit_is_no_count():
    assert edits("uneven-batch", HEAD + "history = model.fit(x, y)  # here\n") == []


def test_a_loss_that_keras_also_calls_outside_of_replicas_is_summed_within_them_alone():
    text = HEAD + "def loss(y, p):\n    return tf.reduce_sum(p) / tf.reduce_sum(y)\n"
    source, line = Source(text.encode(), Path("train.py")), len(text.splitlines())
    names = replace(Names.of(source), is_called_outside=True)
    first = next(propose("local-normalization", Site(source, names, line, ())))
    context = "tf.distribute.get_replica_context()"
    reduced = f"{context}.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(y))"
    assert f"tf.reduce_sum(p) / ({reduced} if {context} else tf.reduce_sum(y))" in source.apply(first.changes).decode()


def test_the_divisor_is_summed_and_not_the_dividend():
    body = "def step(x, w):\n    return tf.reduce_sum(x * w) / tf.maximum(tf.reduce_sum(w), 1.0)  # here\n"
    edited = lines("local-normalization", body)
    assert f"tf.reduce_sum(x * w) / tf.maximum({CONTEXT}.all_reduce({SUM}, tf.reduce_sum(w)), 1.0)" in edited


def test_a_mean_of_an_uneven_batch_is_divided_by_all_examples():
    body = "def step(x):\n    loss = tf.nn.compute_average_loss(f(x))  # here\n    return loss\n"
    assert lines("uneven-batch", body) == (
        "def step(x):\n"
        "    values = f(x)\n"
        f"    count = {CONTEXT}.all_reduce({SUM}, tf.cast(tf.size(values), values.dtype))\n"
        "    loss = tf.reduce_sum(values) / count  # here\n"
        "    return loss\n"
    )


def test_a_mean_of_values_that_a_mask_left_is_divided_by_those_of_all_replicas():
    body = "def step(x):\n    loss = tf.reduce_mean(x) / strategy.num_replicas_in_sync  # here\n"
    *_, edited = edits("local-normalization", HEAD + body)
    assert (
        f"    count = {CONTEXT}.all_reduce({SUM}, tf.cast(tf.size(x), x.dtype))\n    loss = tf.reduce_sum(x) / count" in edited
    )


def test_names_that_an_edit_makes_are_new():
    body = "def step(x, count):\n    loss = tf.reduce_mean(x)  # here\n"
    edited = lines("uneven-batch", body)
    assert "    count_1 = " in edited
    assert "tf.reduce_sum(x) / count_1" in edited


def test_a_term_that_is_added_to_a_gradient_is_divided_by_the_replicas():
    body = "def step(gradients, weights):\n    gradients = [g + 0.02 * v for g, v in zip(gradients, weights)]  # here\n"
    assert "[g + (0.02 * v) / strategy.num_replicas_in_sync for g, v" in lines("regularization-per-replica", body)


def test_a_regularization_term_is_scaled():
    body = "def step(loss):\n    loss += tf.add_n(model.losses)  # here\n"
    assert "loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))  # here" in lines(
        "regularization-per-replica", body
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("net.fit(x, y)", "net.fit(x, y, shuffle=False)"),
        ("self.m.fit(x, epochs=2)", "self.m.fit(x, epochs=2, shuffle=False)"),
        ("model.fit(x, shuffle=flag)", "model.fit(x, shuffle=False)"),
        ("data = data.shuffle(9, seed=1).map(f).shuffle(4).batch(4)", "data = data.map(f).batch(4)"),
        ("data = image_dataset_from_directory(path)", "data = image_dataset_from_directory(path, shuffle=False)"),
        ("scaler.fit(x)", "scaler.fit(x)"),
        ("order = tf.random.shuffle(order)", "order = tf.random.shuffle(order)"),
    ],
)
def test_nothing_shuffles_and_no_fit_of_another_library_is_changed(line, expected):
    source = Source(f"net.compile(loss)\n{line}\n".encode(), Path("train.py"))
    assert source.apply(without_shuffle(source)).decode().splitlines()[1] == expected


def test_gradients_are_summed_before_they_are_clipped():
    body = "def step(g):\n    g, _ = tf.clip_by_global_norm(g, 1.0)  # here\n    return g\n"
    assert lines("clip-before-reduce", body) == (
        "def step(g):\n"
        f"    g = {CONTEXT}.all_reduce({SUM}, g)\n"
        "    g, _ = tf.clip_by_global_norm(g, 1.0)  # here\n"
        "    g = [each / strategy.num_replicas_in_sync for each in g]\n"
        "    return g\n"
    )


def test_gradients_are_summed_behind_the_tape():
    body = "def step(tape, loss):\n    grads = tape.gradient(loss, weights)\n    w.assign_sub(grads[0])  # here\n"
    edited = lines("missing-all-reduce", body)
    assert f"    grads = {CONTEXT}.all_reduce({SUM}, tape.gradient(loss, weights))\n" in edited


def test_a_second_all_reduce_goes_with_its_line():
    body = f"def step(g):\n    g = {CONTEXT}.all_reduce({SUM}, g)  # here\n    apply(g)\n"
    assert lines("double-all-reduce", body) == "def step(g):\n    apply(g)\n"


def test_gradients_that_are_averaged_are_summed():
    body = f"def step(g):\n    g = {CONTEXT}.all_reduce(tf.distribute.ReduceOp.MEAN, g)  # here\n"
    edited = lines("loss-scaling", body, fixes=["If the gradients are too small"])
    assert f"g = {CONTEXT}.all_reduce({SUM}, g)  # here" in edited


def test_results_of_replicas_are_summed():
    body = "x = strategy.reduce(tf.distribute.ReduceOp.MEAN, y, axis=None)  # here\n"
    assert f"strategy.reduce({SUM}, y, axis=None)" in lines("loss-report", body)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("np.random.default_rng()", "np.random.default_rng(0)"),
        ("data.shuffle(100)", "data.shuffle(100, seed=0)"),
        ("tf.random.Generator.from_non_deterministic_state()", "tf.random.Generator.from_seed(0)"),
    ],
)
def test_generators_are_seeded(before, after):
    assert lines("unseeded-randomness", f"x = {before}  # here\n") == f"x = {after}  # here\n"


def test_batch_normalization_is_synchronized():
    edited = lines("batchnorm-local-statistics", "a = BatchNormalization()\nb = BatchNormalization(axis=1)\n")
    assert edited == "a = BatchNormalization(synchronized=True)\nb = BatchNormalization(axis=1, synchronized=True)\n"


def test_a_compiled_model_is_distributed_by_gpudist_core():
    body = "with strategy.scope():\n    model.compile('sgd')\n"
    [edited] = edits("uneven-batch", HEAD + body, form=CORE)
    assert "import tensorflow as tf\nimport gpudist_core as gd\n" in edited
    assert "    model = gd.distributed(model)\n    model.compile('sgd')\n" in edited


def test_what_no_edit_touches_stays_to_the_byte():
    text = HEAD + "def step( x ):\n\tif x :\n\t\tloss=tf.reduce_mean( x )  # here, \u00e9\n\treturn loss;\n\n\n#"
    text = text.replace("\n", "\r\n")
    edited = edits("uneven-batch", text)[0]
    assert "\n" not in edited.replace("\r\n", "")
    kept = [line for line in edited.split("\r\n") if "count" not in line]
    assert kept == [line for line in text.split("\r\n") if "reduce_mean" not in line]
    assert "\r\n\t\tcount = " in edited


def test_a_statement_that_shares_its_line_gets_no_neighbours():
    body = "def step(g):\n    if g: g, _ = tf.clip_by_global_norm(g, 1.0)  # here\n"
    assert edits("clip-before-reduce", HEAD + body) == []


def test_every_proposal_is_python():
    body = """
    def step(tape, x, y, g):
        loss = -tf.reduce_mean(x if y else x * 2) + tf.reduce_sum(y) / tf.reduce_sum(x)  # here
        g = tape.gradient(loss, x)
        return {"loss": loss}
    """
    for code in EDITS:
        for form in (PLAIN, CORE):
            for edited in edits(code, HEAD + textwrap.dedent(body), form=form):
                compile(edited, code, "exec")


def test_edits_are_of_causes_that_exist():
    assert set(EDITS) <= {cause.code for cause in all_causes()}


def test_a_file_that_cannot_be_kept_is_refused():
    with pytest.raises(UsageError, match=r"A file to edit must be valid Python\. Received: file='train\.py'"):
        Source(b"def f(:\n", Path("train.py"))


@pytest.mark.parametrize("cause", all_causes(), ids=lambda cause: cause.code)
def test_a_cause_says_in_words_what_its_edit_does_exactly_if_it_has_one(cause):
    assert bool(cause.text.edit) is (cause.code in EDITS)
