"""Fingerprints tell tensors and batches apart, in NumPy as in a step. Files are read whole, or refused in one sentence."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpudist_core as gd
from gpudist_core.certificates import START, Certificate, CertificateMismatch, Input, Tensor, examples_of, project
from gpudist_core.certificates.checks import Fingerprints, StepChecker
from gpudist_core.checkpoints.hosts import TextExchange
from tests.core.conftest import OnHosts

RANDOM = np.random.default_rng(0)
GRADIENT = RANDOM.normal(size=(30, 20))
BATCH = RANDOM.normal(size=(6, 5)).astype("float32"), np.arange(6)


def certificate(**changes: Any) -> Certificate:
    projections = np.array([[project(GRADIENT, "kernel", step)] for step in range(2)])
    norm = np.linalg.norm(GRADIENT)
    found = Certificate(
        program="train.py",
        topology="1x2",
        replicas=2,
        seed=0,
        versions={"gpudist": "1"},
        optimizer="adam",
        reduced=False,
        tensors=(Tensor("kernel", (30, 20), "float32"),),
        inputs=(Input(0, (5,), "float32"), Input(1, (), "int64")),
        left_out=(),
        projections=projections,
        norms=np.full((2, 1), norm),
        noise=np.full((2, 1), 1e-6 * norm),
        start=projections[0],
        start_norms=np.full(1, norm),
        examples=np.array([examples_of(BATCH)] * 2),
        losses=np.array([[2.0, 1e-6], [np.nan, np.nan]]),
    )
    return replace(found, **changes)


def test_projections_have_the_size_of_the_tensor_and_other_signs_for_each_name_and_step() -> None:
    found = np.array([project(GRADIENT, name, step) for name in ("a", "b") for step in range(50)])
    assert len(np.unique(found.round(9))) == found.size
    assert np.sqrt((found**2).mean()) == pytest.approx(np.linalg.norm(GRADIENT), rel=0.15)
    parts = project(GRADIENT[:, :] * 0.25, "a", 0) + project(GRADIENT * 0.75, "a", 0)
    assert parts == pytest.approx(found[0])


def test_a_batch_is_known_in_any_order_and_in_parts_but_not_with_swapped_labels() -> None:
    images, labels = BATCH
    order = [3, 1, 0, 2, 5, 4]
    known = examples_of(BATCH)
    assert (examples_of([images[order], labels[order]]) == known).all()
    assert (examples_of([images[:2], labels[:2]]) + examples_of([images[2:], labels[2:]]) == known).all()
    assert (examples_of([images, labels[order]]) != known).any()
    assert (examples_of([images[:5], labels[:5]]) != known).any()
    nothing = examples_of([images[:0], labels[:0]])
    assert nothing.tolist() == [0, 0, 0]


def test_a_step_computes_the_same_fingerprints(on_hosts: OnHosts) -> None:
    def off() -> tuple[float, list[int]]:
        import tensorflow as tf

        from gpudist_core.certificates import certificate

        random = np.random.default_rng(1)
        dense = [random.normal(size=shape).astype("float32") for shape in ((3, 3, 4, 5), (7,), (), (64, 10))]
        rows, values = np.array([3, 4, 3, 40]), random.normal(size=(4, 2, 3)).astype("float32")
        table = np.zeros((50, 2, 3), "float32")
        np.add.at(table, rows, values)
        names = ["a", "b", "c", "d", "e"]

        @tf.function
        def of_step(step: Any) -> Any:
            sparse = tf.IndexedSlices(tf.constant(values), tf.constant(rows), tf.constant([50, 2, 3]))
            return certificate.projected([*map(tf.constant, dense), sparse], names, step)

        expected = np.array([project(one, name, 3) for one, name in zip([*dense, table], names, strict=True)])
        batch = tf.function(lambda: certificate.examples_in([tf.constant(one) for one in BATCH]))()
        return float(np.abs(of_step(tf.constant(3, tf.int64)).numpy() - expected).max()), batch.numpy().tolist()

    ((error, batch),) = on_hosts("1x1", off)
    assert error < 1e-4
    assert batch == examples_of(BATCH).tolist()


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = certificate()
    written.write(tmp_path / "train.npz")
    read = Certificate.read(tmp_path / "train.npz")
    assert list(tmp_path.iterdir()) == [tmp_path / "train.npz"]
    assert (read.tensors, read.inputs, read.versions) == (written.tensors, written.inputs, written.versions)
    np.testing.assert_array_equal(read.losses, written.losses)


@pytest.mark.parametrize("kind", ["missing", "cut", "text", "pickled", "foreign", "other format", "other shapes"])
def test_a_damaged_or_foreign_file_is_refused_in_one_sentence(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "train.npz"
    certificate().write(path)
    with np.load(path) as file:
        members = dict(file)
    about = {"format": "gpudist.certificate/9"}
    if kind == "missing":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:700])
    elif kind == "text":
        path.write_text("no certificate")
    elif kind == "pickled":
        path.write_bytes(pickle.dumps({"a": 1}))
    elif kind == "foreign":
        np.savez(path, weights=np.zeros(3))
    elif kind == "other format":
        np.savez(path, **{**members, "about": np.array(json.dumps(about).encode())})
    else:
        np.savez(path, **{**members, "norms": np.zeros((2, 7))})
    with pytest.raises(gd.UsageError, match=r"as it was written\. Received: certificate=") as refused:
        gd.check(path)
    assert "gpudist verify PROGRAM --certificate FILE" in str(refused.value)
    assert isinstance(refused.value, ValueError)


def test_the_tolerance_grows_with_the_precision_up_to_half_of_the_gradient() -> None:
    tolerances = [
        certificate().tolerances(0, name)[0] / np.linalg.norm(GRADIENT) for name in ("float32", "tfloat32", "bfloat16")
    ]
    assert tolerances == pytest.approx([1e-5, 0.08192, 0.5])
    with pytest.raises(
        gd.UsageError, match=r"precision must be one of auto, float32, tfloat32, bfloat16\. Received: precision='x'"
    ):
        gd.check(None, precision="x")


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ({}, None),
        ({"scale": 1 + 1e-7}, None),
        ({"scale": 1.01}, "gradient"),
        ({"scale": np.nan}, "gradient"),
        ({"start": 1.01}, "start"),
        ({"missing": 1}, "examples"),
    ],
)
def test_replicas_are_compared_as_soon_as_the_last_one_reports(change: dict[str, Any], stage: str | None) -> None:
    ended = []
    compare = StepChecker(certificate(), "float32", 2, TextExchange(None, "", 0, 1, 1.0), lambda: ended.append(True))

    def report(step: int, replica: int) -> None:
        scale = change.get("scale", 1.0) if step else 1.0
        rows = slice(0, 4) if replica == 0 else slice(4, 6 - change.get("missing", 0) * step)
        examples = examples_of([one[rows] for one in BATCH])
        projections = project(GRADIENT, "kernel", step)[None] * 0.5 * scale
        start = project(GRADIENT, "kernel", 0)[None] * change.get("start", 1.0)
        compare.take(step, replica, Fingerprints(projections, start, examples))

    report(0, 0)
    if stage == "start":
        with pytest.raises(CertificateMismatch, match=r"Step 0 .*verified with --seed 0"):
            report(0, 1)
        return
    report(0, 1)
    report(1, 1)
    assert not ended
    if stage is None:
        report(1, 0)
        assert ended
        return
    with pytest.raises(CertificateMismatch) as left:
        report(1, 0)
    assert (left.value.step, left.value.stage) == (1, stage)


def test_a_loss_is_compared_where_it_is_certified() -> None:
    compare = StepChecker(certificate(), "float32", 2, TextExchange(None, "", 0, 1, 1.0), lambda: None)
    compare.compare_loss(0, 2.000001)
    compare.compare_loss(1, 17.0)
    with pytest.raises(CertificateMismatch, match="Received: stage='loss', tensor='loss', value=1, certified=2"):
        compare.compare_loss(0, 1.0)


def test_a_run_that_the_certificate_does_not_cover_is_refused(on_hosts: OnHosts, tmp_path: Path) -> None:
    certificate().write(tmp_path / "train.npz")

    def texts() -> list[str]:
        import keras

        def text_of(other: str) -> str:
            gradient, variable = np.ones((30, 20), "float32"), keras.Variable(np.ones((30, 20), "float32"))
            check = gd.check(tmp_path / "train.npz")
            optimizer = check.optimizer(keras.optimizers.SGD())
            optimizer.build([variable])
            try:
                if other == "second":
                    check.optimizer(keras.optimizers.SGD())
                optimizer.apply([gradient], [variable])
            except (ValueError, gd.CertificateMismatch) as error:
                return str(error)
            finally:
                check._watch._end()
            return "applied"

        plain = keras.optimizers.SGD()
        assert gd.check(None).optimizer(plain) is plain
        assert "apply" not in vars(plain)
        return [text_of(other) for other in ("", "second")]

    (found,) = on_hosts("1x1", texts)
    assert "The certificate holds for 2 replicas. Received: replicas=1. It was made on 1x2." in found[0]
    assert "A certificate has one optimizer. Received: certified='adam', second=" in found[1]


def test_a_check_ends_with_a_word_and_leaves_nothing_patched(on_hosts: OnHosts, tmp_path: Path) -> None:
    """Whether the steps agree or not, are too few, or were made before: with a variable of one number, kept flat by traces."""
    values = np.array([[project(np.array([0.7]), "scale", step)] for step in range(2)])
    start, nothing = project(np.array([0.7]), "scale", START), np.zeros((0, 3), np.int64)
    arrays = {"projections": values, "norms": np.full((2, 1), 0.7), "start": start[None], "start_norms": np.array([0.7])}
    scalar = certificate(replicas=1, tensors=(Tensor("scale", (1,), "float32"),), inputs=(), examples=nothing, **arrays)
    replace(scalar, noise=np.full((2, 1), 1e-6)).write(tmp_path / "train.npz")

    def outcomes() -> list[tuple[str, list[str], bool]]:
        import atexit
        import contextlib
        import io
        import warnings
        from types import SimpleNamespace
        from unittest import mock

        import keras

        from gpudist_core.upstream import optimizers

        def outcome(*gradients: float, before: int = 0) -> tuple[str, list[str], bool]:
            variable, optimizer = keras.Variable(0.7), keras.optimizers.SGD(0.0)
            optimizer.build([variable])
            for _ in range(before):
                optimizer.apply([np.float32(1)], [variable])
            unchecked, check, raised = optimizer.apply, gd.check(tmp_path / "train.npz"), ""
            output = io.StringIO()
            said, at_end = contextlib.redirect_stderr(output), mock.patch.object(atexit, "register")
            with warnings.catch_warnings(record=True) as warned, at_end as at_exit, said:
                warnings.simplefilter("always")
                check.set_model(SimpleNamespace(optimizer=optimizer))
                check.on_train_begin()
                try:
                    for gradient in gradients:  # a step that was traced before the check is applied without it
                        (unchecked if before else optimizer.apply)([np.float32(gradient)], [variable])
                        check.on_train_batch_end(0, {"loss": 2.0})
                except (ValueError, gd.CertificateMismatch) as error:
                    raised = str(error)
                is_patched = "apply" in vars(optimizer) or optimizers.of_run._blocks > 0
                if is_patched:
                    for call in at_exit.call_args_list:
                        call.args[0](*call.args[1:])
                    check._watch._end()
                else:
                    check.optimizer(keras.optimizers.SGD())  # that of a later phase
            return output.getvalue() + raised, [str(one.message) for one in warned], is_patched

        made = [((0.7, 0.7, 3.0), 0), ((0.7, 3.0), 0), ((0.7,), 0), ((0.7,), 1), ((0.7,), 2)]
        return [outcome(*gradients, before=before) for gradients, before in made]

    ((right, wrong, few, traced, later),) = on_hosts("1x1", outcomes)
    assert right == ("gpudist_core: the gradients of 2 certified steps agree\n", [], False)
    assert "Step 1 differs from the certificate. Received: stage='gradient', tensor='scale'" in wrong[0]
    assert wrong[1:] == ([], False)
    ((text, (warned,), is_patched), all_of) = few, "All certified steps must be compared. Received: compared="
    assert (text, warned, is_patched) == (
        "",
        f"{all_of}1, certified=2. The run ended too early, or went on from a later step.",
        True,
    )
    assert "A checked model must not have trained before. Received: certificate='train.py', steps=2. Pass the" in traced[0]
    assert traced[1:] == ([], False)
    assert later == ("", [f"{all_of}0, certified=2. The run goes on from a later step: nothing is compared."], False)
