"""The comparison: correct programs are equivalent, small bugs are seen, rounding is measured."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulate.trace import StoredArray, Trace
from emulate.verify import recorded
from emulate.verify.arithmetic import Explanation, Fit, explain
from emulate.verify.compare import Comparison, compare
from emulate.verify.compared_runs import Rounding, computed_in, unit_of
from emulate.verify.gradients import aligned
from emulate.verify.judge import judge
from emulate.verify.noise import FACTOR, UNITS, Key, floors
from emulate.verify.recorded import CONFIRMING_RUNS, RunPair
from tests.emulate.verify.cases import FakeLab, Folder, Rerun, case_of, loop
from tests.emulate.verify.made_traces import Made
from tests.emulate.verify.simulation import Adam, Array, Problem, Sgd, train


def runs(folder: Path, problem: Problem, wrong: Problem, replicas: int, confirm: bool = True) -> Comparison:
    def made(name: str, topology: str = "1x1") -> Made:
        return Made(folder / name, topology)

    def noise(number: int, perturbation: float = 0.0) -> Trace:
        return train(problem, made(f"noise-{number}"), 1, noise=number, perturbation=perturbation).trace()

    reference = train(problem, made("reference"), 1).trace()
    topology = train(wrong, made("topology", f"1x{replicas}"), replicas).trace()
    floor = [noise(k) for k in (1, 2, 3)]
    first = compare(reference, topology, floor)
    if not (first.needs_confirmation and confirm):
        return first
    return compare(reference, topology, floor, confirmation=[noise(k, 1e-4) for k in (11, 12, 13)])


@pytest.mark.parametrize("optimizer", [Sgd, Adam])
@pytest.mark.parametrize("replicas", [2, 3, 8])
@pytest.mark.parametrize("seed", range(2))
def test_a_correct_program_is_equivalent(tmp_path: Path, optimizer: type, replicas: int, seed: int) -> None:
    problem = Problem(seed=seed, optimizer=optimizer, steps=20)
    found = runs(tmp_path, problem, problem, replicas)
    assert found.is_equivalent
    assert found.first is None
    assert found.kinds() >= {"gradient", "weight", "loss", "initial-weight"}


class Watched(Problem):
    """Keeps the two sums that are nearest above the kink, so that one unit can be made to fall on every machine."""

    nearest = (np.inf, np.inf)

    def activate(self, z: Array) -> Array:
        first, second = sorted([*self.nearest, *np.sort(z[z > 0])[:2]])[:2]
        self.nearest = (first, second)
        return super().activate(z)


def test_a_unit_on_the_other_side_of_its_kink_is_no_divergence(tmp_path: Path) -> None:
    problem = Watched(sizes=(64, 128, 128, 10), optimizer=Adam, steps=25)
    train(problem, Made(tmp_path / "watched"), 1).trace()
    fallen = Problem(sizes=problem.sizes, optimizer=Adam, steps=25, kink=float(np.mean(problem.nearest)))
    alone = runs(tmp_path / "alone", problem, fallen, 4, confirm=False)
    assert alone.needs_confirmation
    assert alone.exceeding
    confirmed = runs(tmp_path / "confirmed", problem, fallen, 4)
    assert not confirmed.exceeding
    assert "switch single units of a ReLU" in confirmed.notes[0]


def test_a_model_that_leaves_a_large_part_of_a_difference_does_not_spare_the_runs_for_kinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Watched(sizes=(64, 128, 128, 10), optimizer=Adam, steps=25)
    reference = train(problem, Made(tmp_path / "reference"), 1).trace()
    fallen = Problem(sizes=problem.sizes, optimizer=Adam, steps=25, kink=float(np.mean(problem.nearest)))
    topology = train(fallen, Made(tmp_path / "topology", "1x4"), 4).trace()
    noise = [train(problem, Made(tmp_path / f"noise-{k}"), 1, noise=k).trace() for k in (1, 2, 3)]

    def asks(part: float) -> bool:
        def fitted(comparison: Comparison) -> Explanation:
            assert comparison.first is not None
            step = comparison.first.step
            most = max(point.ratio for point in comparison.exceeding if point.step == step)
            return Explanation((Fit("adam", step, after=part * most),), ())

        monkeypatch.setattr(recorded, "explain", fitted)
        asked: list[str] = []
        lab = FakeLab(noise, confirm=lambda: asked.append("for kinks") or ())  # type: ignore[func-returns-value]
        lab.compare(RunPair(reference, topology), kinks=True)
        return bool(asked)

    assert asks(0.5)
    assert not asks(0.01)


@pytest.mark.parametrize("optimizer", [Sgd, Adam])
def test_a_regularization_of_one_in_ten_thousand_counted_four_times_is_seen(tmp_path: Path, optimizer: type) -> None:
    right = Problem(l2=1e-4, optimizer=optimizer)
    wrong = Problem(l2=1e-4, optimizer=optimizer, reg_times=lambda replicas: 1.0)
    found = runs(tmp_path, right, wrong, 4)
    assert found.first is not None
    assert (found.first.kind, found.first.step) == ("gradient", 0)
    assert not found.needs_confirmation


@pytest.mark.parametrize("optimizer", [Sgd, Adam])
def test_a_clip_that_is_half_a_percent_off_is_seen_in_the_weights(tmp_path: Path, optimizer: type) -> None:
    found = runs(tmp_path, Problem(clip=1.0, optimizer=optimizer), Problem(clip=0.995, optimizer=optimizer), 4)
    assert found.first is not None
    assert (found.first.kind, found.first.step) == ("weight", 0)
    assert not found.needs_confirmation


def test_adam_hides_a_loss_that_is_four_times_too_large_and_the_gradients_do_not(tmp_path: Path) -> None:
    found = runs(tmp_path, Problem(optimizer=Adam), Problem(optimizer=Adam, scale=lambda rows, batch, n: 1 / rows), 4)
    assert found.first is not None
    assert found.first.kind == "gradient"
    value, reference = found.first.value, found.first.reference_value
    assert value is not None
    assert reference is not None
    assert value / reference == pytest.approx(4, rel=1e-4)


def test_float64_is_compared_at_its_own_precision(tmp_path: Path) -> None:
    right = Problem(dtype="f8", l2=1e-12)
    assert runs(tmp_path / "right", right, right, 4).is_equivalent
    wrong = Problem(dtype="f8", l2=1e-12, reg_times=lambda replicas: 1.0)
    assert not runs(tmp_path / "wrong", right, wrong, 4).is_equivalent


def one_step(folder: Path, gradient: list[float], weight: list[float], share: int | None = None, keep: int = 1) -> Trace:
    made = Made(folder, share=share)
    made.initial({"w": np.zeros(len(weight), "f4")})
    for replica in range(keep):
        rows = [f"{replica}"]
        made.step(0, {"w": np.array(gradient, "f4")}, {"w": np.array(weight, "f4")}, replica=replica, rows=rows, objective=1.0)
    return made.trace()


def test_nan_where_the_reference_has_a_number_is_a_divergence_without_a_number(tmp_path: Path) -> None:
    found = compare(one_step(tmp_path / "a", [1, 2], [1, 1]), one_step(tmp_path / "b", [1, np.nan], [1, 1]))
    assert found.first is not None
    assert found.first.non_finite
    assert found.first.reference_value == 2
    assert not found.needs_confirmation


def test_nan_in_both_runs_is_a_note(tmp_path: Path) -> None:
    found = compare(one_step(tmp_path / "a", [1, np.nan], [1, 1]), one_step(tmp_path / "b", [1, np.nan], [1, 1]))
    assert found.is_equivalent
    assert found.notes[-1] == "w is not finite from step 0 on, on one device too"


def test_tensors_of_one_run_alone_are_listed_as_not_compared(tmp_path: Path) -> None:
    made = Made(tmp_path / "b")
    made.step(0, {"v": np.ones(2, "f4")}, {"v": np.ones(2, "f4")}, rows=["0"])
    found = compare(one_step(tmp_path / "a", [1], [1]), made.trace())
    assert found.not_compared == ("gradient of v (not in both runs)", "gradient of w (not in both runs)")
    assert not found.points


def test_an_optimizer_of_one_run_alone_is_listed_as_not_compared(tmp_path: Path) -> None:
    made = Made(tmp_path / "b")
    made.step(0, {"w": np.ones(1, "f4")}, {"w": np.ones(1, "f4")}, rows=["0"], optimizer="adam")
    found = compare(one_step(tmp_path / "a", [1], [1]), made.trace())
    assert found.not_compared == (
        "optimizer adam (it steps only in the topology)",
        "optimizer sgd (it steps only in the reference)",
    )


def test_a_last_step_that_lacks_replicas_is_not_compared(tmp_path: Path) -> None:
    made = Made(tmp_path / "b", "1x2")
    for replica in (0, 1):
        made.step(0, {"w": np.full(1, 0.5, "f4")}, {"w": np.ones(1, "f4")}, replica=replica, rows=[str(replica)])
    made.step(1, {"w": np.full(1, 9.0, "f4")}, {"w": np.ones(1, "f4")}, replica=0, rows=["0"])
    reference = Made(tmp_path / "a")
    for k in (0, 1):
        reference.step(k, {"w": np.ones(1, "f4")}, {"w": np.ones(1, "f4")}, rows=["0", "1"])
    found = compare(reference.trace(), made.trace())
    assert found.is_equivalent
    assert found.not_compared == ("step 1 of sgd (only one run went so far)",)


def test_arrays_sampled_with_different_strides_are_compared_where_both_have_elements(tmp_path: Path) -> None:
    values = list(range(24))
    whole = one_step(tmp_path / "a", values, values, share=12)
    part = one_step(tmp_path / "b", values, values, share=8)
    stored = [trace.steps("sgd")[0][0].gradients["w"] for trace in (whole, part)]
    assert [array.stride for array in stored] == [2, 3]
    assert [array.tolist() for array in aligned(stored)] == [[0, 6, 12, 18]] * 2
    assert compare(whole, part).is_equivalent


tables = st.lists(
    st.tuples(st.integers(0, 6), st.floats(-8, 8, width=32)), min_size=1, max_size=5, unique_by=lambda row: row[0]
)


def sparse(folder: Path, name: str, rows: list[tuple[int, float]]) -> StoredArray:
    """A sparse gradient of a table of 7 rows of 2, as a trace has it."""
    numbers, values = np.array([number for number, _ in rows]), np.array([[value, -value] for _, value in rows], "f4")
    path = folder / name
    path.write_bytes(numbers.tobytes() + values.tobytes())
    known = StoredArray(path, 0, str(numbers.dtype), numbers.shape)
    return StoredArray(path, numbers.nbytes, "<f4", (7, 2), rows=known)


@given(one=tables, other=tables)
def test_sparse_gradients_are_compared_on_the_rows_that_any_has_as_if_they_were_dense(one: Any, other: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stored = [sparse(Path(folder), name, sorted(rows)) for name, rows in (("a", one), ("b", other))]
        kept = sorted({number for number, _ in [*one, *other]})
        for array, found in zip(stored, aligned(stored), strict=True):
            np.testing.assert_array_equal(found.reshape(-1, 2), array.read()[kept])


sizes = st.floats(1e-6, 1e6)


@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=8))
def test_the_noise_floor_never_sinks_and_is_never_below_its_two_bounds(steps: list[tuple[float, float]]) -> None:
    key, eps = Key("gradient", "sgd", "w"), 2.0**-23
    spread, scale = ({key: {k: pair[i] for k, pair in enumerate(steps)}} for i in (0, 1))
    floor = floors(spread, scale, {key: eps})[key]
    for k, (one, size) in enumerate(steps):
        assert floor[k] >= one
        assert floor[k] >= UNITS * eps * size
        assert k == 0 or floor[k] >= floor[k - 1] * (1 - 1e-12)


def test_what_losses_are_seen_to_spread_bounds_what_gradients_lend_them() -> None:
    gradient, loss, metric = Key("gradient", "sgd", "w"), Key("loss", "", "loss"), Key("metric", "", "accuracy")
    scales, eps = {key: {0: 1.0} for key in (gradient, loss, metric)}, dict.fromkeys((gradient, loss, metric), 2.0**-23)
    deep = floors({gradient: {0: 0.4}, loss: {0: 0.01}, metric: {0: 0.0}}, scales, eps)
    assert [deep[key][0] for key in (gradient, loss, metric)] == pytest.approx([0.4, 0.03, 0.03])
    calm = floors({gradient: {0: 1e-4}, loss: {0: 0.01}, metric: {0: 0.0}}, scales, eps)
    assert [calm[key][0] for key in (gradient, loss, metric)] == pytest.approx([1e-4, 0.01, 1e-4])
    unreported = {key: value for key, value in scales.items() if key != loss}
    assert floors({gradient: {0: 0.4}, metric: {0: 0.0}}, unreported, eps)[metric][0] == pytest.approx(0.4)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=6), st.lists(st.integers(-3, 3), min_size=6, max_size=6))
def test_the_error_is_symmetric(values: list[float], changes: list[int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        other = [value + change for value, change in zip(values, changes, strict=False)]
        a = one_step(Path(folder) / "a", values, values)
        b = one_step(Path(folder) / "b", other, other)
        there, back = compare(a, b), compare(b, a)
        assert [p.measure.error for p in there.points] == [p.measure.error for p in back.points]
        assert (
            there.is_equivalent == back.is_equivalent == (all(change == 0 for change in changes[: len(values)]) or _tiny(there))
        )


def _tiny(found: Comparison) -> bool:
    return all(point.measure.error <= FACTOR * point.noise for point in found.points)


def unit_of_gradient(folder: Path, values: np.ndarray) -> float:
    """What a program whose gradient this is computes in."""
    trace = one_step(folder, values.tolist(), values.tolist())
    return unit_of(trace.steps("sgd")[0][0].gradients["w"], computed_in(trace))


def test_gradients_that_were_rounded_to_16_bits_are_compared_at_that_precision(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=100).astype("f4")
    assert unit_of_gradient(tmp_path / "a", values) == 2.0**-23
    assert unit_of_gradient(tmp_path / "b", values.astype("f2").astype("f4") * np.float32(2**20)) == 2.0**-10
    bfloat16 = (values.view("u4") & np.uint32(0xFFFF0000)).view("f4")
    assert unit_of_gradient(tmp_path / "c", bfloat16) == 2.0**-7
    assert unit_of_gradient(tmp_path / "d", np.float32([0.5, 0.25, 0])) == 2.0**-23


@pytest.mark.parametrize("what", ["counts", "signs", "lost"])
def test_gradients_that_are_short_by_nature_are_compared_at_the_precision_of_their_dtype(tmp_path: Path, what: str) -> None:
    random = np.random.default_rng(1)
    values = {
        "counts": random.integers(-40, 40, 200) / 64,
        "signs": random.choice([-1, 1], 200) / 48 * 3,
        "lost": np.full(200, np.nan),
    }[what]
    assert unit_of_gradient(tmp_path, values.astype("f4")) == 2.0**-23


def test_a_step_that_is_lost_does_not_blur_the_steps_before_it(tmp_path: Path) -> None:
    def two_steps(folder: Path, values: list[float]) -> Trace:
        made = Made(folder)
        made.step(0, {"w": np.array(values, "f4")}, {"w": np.ones(1, "f4")}, rows=["0"])
        made.step(1, {"w": np.full(len(values), np.nan, "f4")}, {"w": np.full(1, np.nan, "f4")}, rows=["1"])
        return made.trace()

    values = np.random.default_rng(0).normal(size=100)
    found = compare(two_steps(tmp_path / "a", values.tolist()), two_steps(tmp_path / "b", (values * 1.01).tolist()))
    assert (found.first and found.first.kind, found.first and found.first.step) == ("gradient", 0)


def test_a_program_in_16_bits_is_disturbed_by_units_of_16_bits(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=100).astype("f2").astype("f4").tolist()
    assert Rounding.of(one_step(tmp_path / "short", values, values)) == Rounding(2.0**13, 2.0**13)
    assert Rounding.of(one_step(tmp_path / "long", [value / 3 for value in values], values)) == Rounding()


def test_a_program_whose_layers_compute_in_16_bits_is_disturbed_by_their_units_where_gradients_do_not_show_it(
    tmp_path: Path,
) -> None:
    def clipped(folder: Path, named: list[str], **more: list[str]) -> Trace:
        made = Made(folder)
        made.event({"event": "program", "bfloat16": named, **more})
        gradients = {"w": np.full(60, 1 / 3, "f4"), "of_32_bits": np.full(80, 1 / 3, "f4")}
        made.step(0, gradients, {name: np.zeros_like(value) for name, value in gradients.items()}, rows=["0"])
        return made.trace()

    assert Rounding.of(clipped(tmp_path / "few", ["w"])) == Rounding(1.0, 2.0**16)
    assert Rounding.of(clipped(tmp_path / "most", ["of_32_bits"])) == Rounding(2.0**16, 2.0**16)
    assert Rounding.of(clipped(tmp_path / "cast", [], casts=["float16"])) == Rounding(2.0**13, 2.0**13)


def test_weights_made_of_gradients_that_cancel_are_judged_by_runs_that_were_rounded_so(tmp_path: Path) -> None:
    reference, ours = one_step(tmp_path / "a", [1, 0], [1, 0]), one_step(tmp_path / "b", [1, 1e-9], [1, 1e-4])
    alone = compare(reference, ours)
    assert (alone.cancels, alone.needs_confirmation) == (True, False)
    assert [point.measure.key.kind for point in alone.exceeding] == ["weight"]
    confirmed = compare(reference, ours, confirmation=[one_step(tmp_path / "c", [1, 2e-9], [1, 2e-4])])
    assert not confirmed.exceeding
    assert "gradients that cancel over the batch" in confirmed.notes[-1]
    case = case_of(reference, ours, confirm=lambda: [one_step(tmp_path / "d", [1, 2e-9], [1, 2e-4])])
    assert case.compare().is_equivalent


def test_gradients_that_cancel_are_looked_at_once_more_where_a_suspect_is_switched_off(tmp_path: Path) -> None:
    reference, ours = one_step(tmp_path / "a", [1, 0], [1, 0]), one_step(tmp_path / "b", [1, 1e-9], [1, 1e-4])
    assert not Rerun(reference, ours).compare().is_equivalent
    assert Rerun(reference, ours, (), lambda: [one_step(tmp_path / "c", [1, 2e-9], [1, 2e-4])]).compare().is_equivalent


def test_weights_that_differ_by_more_than_that_are_a_difference(tmp_path: Path) -> None:
    reference, ours = one_step(tmp_path / "a", [1, 0], [1, 0]), one_step(tmp_path / "b", [1, 1e-9], [1, 1e-4])
    confirmed = compare(reference, ours, confirmation=[one_step(tmp_path / "c", [1, 2e-9], [1, 5e-6])])
    assert [point.measure.key.kind for point in confirmed.exceeding] == ["weight"]


def test_weights_that_differ_after_a_gradient_does_need_no_such_runs(tmp_path: Path) -> None:
    found = compare(one_step(tmp_path / "a", [1, 0], [1, 0]), one_step(tmp_path / "b", [1, 0.5], [1, 1e-4]))
    assert not found.cancels


def two_steps(folder: Path, size: float, first: float, second: float, factor: float = 1) -> Trace:
    """Two steps of a tensor of a gradient of 1 and of one of another size, off by these parts of it, and both by a factor."""
    made = Made(folder)
    for k, off in enumerate((first, second)):
        gradients = {"large": np.full(40, factor, "f4"), "other": np.full(40, factor * size * (1 + off), "f4")}
        made.step(k, gradients, {name: np.zeros_like(value) for name, value in gradients.items()}, rows=[str(k)])
    return made.trace()


@pytest.mark.parametrize(
    ("size", "seen", "exceeds"),
    [(1e-6, 2e-4, False), (1e-6, 1e-7, True), (1e-2, 2e-4, True)],
    ids=["cancels", "cancels, and rounding is small", "does not cancel"],
)
def test_what_rounding_makes_of_a_first_gradient_that_cancels_within_rows_is_seen_in_the_second(
    tmp_path: Path, size: float, seen: float, exceeds: bool
) -> None:
    reference, ours = two_steps(tmp_path / "a", size, 0, 0), two_steps(tmp_path / "b", size, 3e-5, 0)
    noise = [two_steps(tmp_path / f"noise-{k}", size, 0, seen * k) for k in (1, 2)]
    alone = compare(reference, ours, noise)
    assert alone.needs_confirmation
    confirmed = compare(reference, ours, noise, confirmation=noise)
    assert [point.measure.key.tensor for point in confirmed.exceeding] == (["other"] if exceeds else [])


@pytest.mark.parametrize(("off", "scales"), [(3e-4, [4.0]), (3e-2, [])], ids=["by rounding", "by more"])
def test_a_factor_is_seen_beside_a_first_gradient_that_cancels_within_rows(
    tmp_path: Path, off: float, scales: list[float]
) -> None:
    reference, ours = two_steps(tmp_path / "a", 1e-6, 0, 0), two_steps(tmp_path / "b", 1e-6, off, 0, factor=4)
    noise = [two_steps(tmp_path / f"noise-{k}", 1e-6, 0, 2e-4 * k) for k in (1, 2)]
    fits = explain(compare(reference, ours, noise)).fits
    assert [fit.scale for fit in fits if fit.step == 0] == pytest.approx(scales)


class Counting(FakeLab):
    """Keeps how many runs with a larger perturbation were asked for, each time."""

    def __init__(self, *noise: Any, **options: Any) -> None:
        super().__init__(*noise, **options)
        self.confirmed: list[int] = []

    def confirm(self, pair: RunPair, number: int = CONFIRMING_RUNS) -> Sequence[Trace]:
        self.confirmed.append(number)
        return super().confirm(pair, number)


def test_a_factor_that_comes_after_a_unit_on_the_other_side_of_its_kink_is_found_with_one_larger_perturbation(
    tmp_path: Path,
) -> None:
    """At the judged run's weights each step is judged by itself: a kink before a mistake says nothing of the mistake."""
    draws = np.random.default_rng(0)
    gradients = draws.normal(size=(8, 200)).astype("f4")
    weights = gradients - np.cumsum(gradients, 0)  # the same in all runs: the reference applies the topology's gradients

    def made(name: str, *, fallen: bool, factor: float = 1.0, follows: bool = False) -> Trace:
        run = Made(tmp_path / name, "1x1" if follows else "1x2")
        run.event({"event": "program", "follows": follows})
        replicas = 1 if follows else 2
        for k, gradient in enumerate(gradients):
            own = gradient * (1 + 1e-7 * draws.choice([-1, 0, 1], gradient.shape)) * (factor if k >= 5 else 1)
            own[:3] *= 1.003 if fallen and k == 2 else 1
            for replica in range(replicas):
                run.step(k, {"w": (own / replicas).astype("f4")}, {"w": weights[k]}, replica=replica)
        return run.trace()

    confirming = made("confirming", fallen=True, follows=True)
    lab = Counting([made("noise", fallen=False, follows=True)], confirm=lambda: [confirming, confirming])
    reference, topology = made("reference", fallen=False, follows=True), made("topology", fallen=True, factor=4.0)
    found = lab.compare(RunPair(reference, topology), kinks=True)
    assert found.first is not None
    assert (found.first.step, lab.confirmed) == (5, [1])
    assert [(fit.step, round(fit.scale, 3)) for fit in explain(found).fits] == [(5, 4.0), (6, 4.0), (7, 4.0)]


@pytest.mark.parametrize("is_shown", [True, False], ids=["as runs of one device show", "alone"])
@pytest.mark.parametrize("what", ["gradient", "accuracy", "percent"])
def test_what_one_of_a_few_examples_makes_on_the_other_side_of_a_threshold_is_a_kink_where_other_runs_show_it(
    folder: Folder, what: str, is_shown: bool
) -> None:
    """Of 8 examples one is an eighth of an accuracy, and about a third of the length of a gradient."""
    gradients = np.random.default_rng(0).normal(size=(20, 8, 128)).astype("f4") / 8
    percent = 100.0 if what == "percent" else 1.0

    def run(replicas: int, fallen: bool) -> Trace:
        def parts(k: int) -> Array:
            kept = gradients[k].copy()
            kept[3] *= not (fallen and k == 7 and what == "gradient")
            return kept.reshape(replicas, -1, 128).sum(axis=1)

        def step(made: Made, k: int) -> None:
            after = np.ones(128, "f4") - sum(parts(j).sum(axis=0) for j in range(k + 1))
            for r, gradient in enumerate(parts(k)):
                rows = [f"{k}-{i}" for i in range(8)][8 // replicas * r : 8 // replicas * (r + 1)]
                made.step(k, {"w": gradient}, {"w": after}, replica=r, rows=rows, objective=1 / replicas)
            jumps = fallen and k == 7 and what != "gradient"
            made.report("metric", "hits", k, percent * (0.25 + (k % 4 + jumps) / 8))

        return loop(folder.made(f"1x{replicas}"), step, steps=20)

    case = case_of(run(1, False), run(4, True), [run(1, False)], confirm=lambda: [run(1, is_shown)])
    assert judge(case).verdict == ("equivalent" if is_shown else "divergent")
