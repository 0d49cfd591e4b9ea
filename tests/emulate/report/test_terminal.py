"""The verdict on a terminal: read in ten seconds, complete below, the same words when piped."""

import io
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulate.report import render, show
from emulate.told import told
from emulate.verify.verdict import Difference, Finding, Location, Reference, Run, Samples, StepGraph, StepsRun, Verdict


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_each_topology_has_one_line_with_what_decides(made):
    text = render(made.verdict(made.equivalent("1x4"), made.equivalent("2x2")))
    assert [line.split() for line in text.splitlines()[3:6]] == [
        ["topology", "verdict", "replicas", "steps", "samples", "error", "noise", "seconds"],
        ["✔", "1x4", "equivalent", "4", "20", "960", "1.2e-07", "9e-08", "8.1"],
        ["✔", "2x2", "equivalent", "4", "20", "960", "1.2e-07", "9e-08", "8.1"],
    ]
    assert len(text.splitlines()) == 6


def test_the_head_names_program_seed_device_and_versions(made):
    head = render(made.verdict(made.equivalent()))
    assert head.startswith("train.py\nseed 0, on CPU, gpudist 0.1.0, tensorflow 2.21.0, keras 3.15.1\n")


def test_a_failure_that_does_not_say_what_to_install_is_followed_by_that(made):
    failure = "Traceback\nModuleNotFoundError: No module named 'tf_keras'"
    run = made.equivalent("1x4", verdict="failed", failure=failure)
    for verdict in (made.verdict(run), made.verdict(made.equivalent(), reference=Reference("failed", failure=failure))):
        assert 'fix  TF_USE_LEGACY_KERAS=1 and tf_keras need Keras 2: pip install "gpudist[keras2]"' in render(verdict)


def test_a_divergence_shows_where_how_much_why_and_how_to_mend_it(made):
    text = render(made.verdict(made.divergent("1x4")))
    assert "✘  1x4       divergent" in text
    assert "1x4  divergent from step 0 on" in text
    found = " ".join(text.split())
    assert "the gradient of dense/kernel at step 0, optimizer adam: 0.5 where the reference has 0.125" in found
    assert "(error 0.38, 3.8e+06 times the noise of 1e-07)" in found
    assert "1. loss-scaling The local gradients are summed over 4 replicas" in found
    assert "evidence The summed gradients are 4.0000 times" in found
    assert "fix Divide by the size of the global batch:" in found
    assert text.endswith("Next  gpudist causes loss-scaling  wrong and right code, evidence, fix")


def test_the_lines_to_blame_stand_below_the_summary_as_compilers_show_them(made):
    lines = [Location("train.py", 63, "loss = tf.reduce_mean(losses)"), *(Location("train.py", n, "x " * 60) for n in range(4))]
    text = render(made.verdict(made.divergent(causes=[replace(made.loss_scaling, stage="loss", locations=tuple(lines))])))
    assert "     --> train.py:63  (loss)\n        | loss = tf.reduce_mean(losses)\n     --> train.py:0\n" in text
    assert "... 2 more lines (--json)" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_what_holds_for_one_topology_of_several_is_said_to(made):
    on_two = replace(made.loss_scaling, summary="2 times too large.", evidence="2.0000")
    text = render(made.verdict(made.divergent("1x2", causes=[on_two]), made.divergent("1x4")))
    assert "     On 1x2: 2 times too large.\n     On 1x4: " in text
    assert "     evidence (1x2)  2.0000\n" in text


def test_code_in_a_fix_is_not_wrapped(made):
    text = render(made.verdict(made.divergent()), width=60)
    assert "    loss = tf.nn.compute_average_loss(per_example, global_batch_size=48)\n" in text


def test_topologies_with_the_same_findings_are_told_of_once(made):
    other = Difference("dense/kernel", "gradient", 2, 0.5, 1e-7)
    text = render(made.verdict(made.divergent("1x2"), made.divergent("1x4"), made.divergent("4x1", first=other)))
    assert text.count("1. loss-scaling") == 1
    assert "1x2, 1x4, 4x1  divergent\n" in text
    assert "first (1x2, 1x4)  the gradient of dense/kernel at step 0" in text
    assert "first (4x1)  the gradient of dense/kernel at step 2" in text


def test_a_cause_that_topologies_share_is_told_in_full_once(made):
    both = made.divergent("2x2", causes=[made.loss_scaling, made.batchnorm])
    text = render(made.verdict(made.divergent("1x4"), both))
    assert text.count("evidence  " + made.loss_scaling.evidence[:20]) == text.count("Divide by the size") == 1
    assert "  1. loss-scaling  as on 1x4, see above\n" in text
    assert text.count("Use BatchNormalization(synchronized=True).") == 1


def test_a_fix_of_its_own_is_told_though_the_cause_was(made):
    other = replace(made.loss_scaling, fix="Divide once.")
    text = render(made.verdict(made.divergent("1x4"), made.divergent("2x2", causes=[other, made.batchnorm])))
    assert "Divide by the size" in text
    assert "fix       Divide once." in text


def test_code_in_backticks_is_not_broken_at_its_spaces(made):
    code = "`tf.nn.compute_average_loss(per_example, global_batch_size=48)`"
    for begin in ("", "Or", "Write this", "Instead of it write this here"):
        text = render(made.verdict(made.divergent(causes=[replace(made.loss_scaling, fix=f"{begin} {code} now.")])), width=80)
        assert code in text
        assert all(len(line) <= 80 for line in text.splitlines())


def how_far(made, *runs, **steps_run):
    text = render(made.verdict(*(replace(run, steps_run=StepsRun(last=19, stopped=True, **steps_run)) for run in runs)), 120)
    return next(line for line in text.splitlines() if line.startswith(runs[0].topology))


@pytest.mark.parametrize(
    ("steps_run", "said"),
    [
        ({}, ""),
        ({"epoch_batches": 20, "epoch_complete": True}, ""),
        ({"epoch_batches": 313, "epoch_complete": False}, "; an epoch has 313 batches"),
        (
            {"epoch_batches": 29, "last_batch_examples": 17, "epoch_complete": False},
            "; the last batch of an epoch (17 examples on 4 replicas) was not run",
        ),
    ],
)
def test_the_headline_says_which_steps_were_run(made, steps_run, said):
    assert how_far(made, made.equivalent(), **steps_run) == f"1x4  equivalent in the first 20 steps{said}"


def test_the_headline_says_from_where_on_nothing_is_finite(made):
    lost = replace(made.equivalent(), non_finite_after=3)
    assert "1x4  equivalent; after step 3 weights are not finite, on one device too" in render(made.verdict(lost), 120)
    line = how_far(made, lost)
    assert line == "1x4  equivalent in the first 20 steps; after step 3 weights are not finite, on one device too"


def test_the_headline_of_several_topologies_names_all_numbers_of_replicas(made):
    told = {"epoch_batches": 29, "last_batch_examples": 1, "epoch_complete": False}
    line = how_far(made, made.equivalent("1x2", replicas=2), made.equivalent("1x4"), **told)
    assert line.endswith("the last batch of an epoch (1 example on 2, 4 replicas) was not run")
    by_design = made.divergent(causes=[made.batchnorm], verdict="by-design")
    assert how_far(made, by_design) == "1x4  by-design: only batchnorm-local-statistics, in the first 20 steps"


def test_causes_come_in_the_order_in_which_to_mend_them(made):
    text = render(made.verdict(made.divergent(causes=(made.loss_scaling, made.batchnorm))))
    assert text.index("1. loss-scaling") < text.index("2. batchnorm-local-statistics (by design)")
    assert "--allow batchnorm-local-statistics" in text


def test_what_differs_by_design_alone_is_a_warning_that_says_how_to_make_it_fail(made):
    runs = [made.divergent(topology, causes=[made.batchnorm], verdict="by-design") for topology in ("1x2", "1x4")]
    text = render(made.verdict(made.equivalent("1x1"), *runs))
    assert "!  1x4       by-design " in text
    assert "1x2, 1x4  by-design: only batchnorm-local-statistics" in text
    assert "warning The program differs from one device only by design of TensorFlow and Keras: batchnorm-" in " ".join(
        text.split()
    )
    assert "--strict  if it must fail (exit code 1)" in text
    assert "--strict" not in render(made.verdict(*runs, strict=True))


def test_an_allowed_cause_is_reported_and_offers_nothing(made):
    allowed = Finding("loss-report", "The loss is a quarter.", "0.25", "Multiply.", allowed=True)
    text = render(made.verdict(made.equivalent(causes=(allowed,))))
    assert "1x4  equivalent\n  1. loss-report (allowed)  The loss is a quarter." in text
    assert "Multiply" not in text
    long = render(made.verdict(made.equivalent(causes=(replace(allowed, summary="The loss is a quarter. " * 9),))), 80)
    (line,) = [line for line in long.splitlines() if "loss-report" in line]
    assert line.endswith(" ...")
    assert len(line) <= 80
    assert "Next" not in text


def test_missing_samples_are_counted(made):
    text = render(
        made.verdict(made.divergent(samples=Samples(960, 492, 480, 12)), made.divergent("2x2", samples=Samples(9, 12, 0, 3)))
    )
    assert " 480 of 960 +12 " in text
    assert " 12 +3 " in text
    assert "492 seen, 960 in the reference: 480 missing, 12 repeated" in text


def test_a_value_that_is_not_finite_is_said_to_be(made):
    nan = Difference("loss", "loss", 4, float("nan"), 1e-7, value=float("nan"), reference_value=0.5, non_finite=True)
    text = render(made.verdict(made.divergent(first=nan)))
    assert "loss loss at step 4: nan where the reference has 0.5 (not finite)" in text
    assert " not finite  1e-07" in text


def test_what_is_not_reported_in_every_step_is_told_by_its_number(made):
    first = Difference("evaluate/reduce", "loss", 7, 0.25, 1e-7, value=0.75, reference_value=0.5, report=1)
    text = render(made.verdict(made.divergent(first=first)))
    assert "loss evaluate/reduce at report 1 (after step 7): 0.75 where" in text


def test_a_failed_program_shows_its_own_traceback(made):
    failure = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: no'
    text = render(made.verdict(made.equivalent(verdict="failed", steps=1, failure=failure)))
    assert "1x4  failed: the program raised after 1 step\n" in text
    assert '    File "train.py", line 3, in <module>\n  ValueError: no' in text


def test_a_process_that_left_is_said_to_have_ended(made):
    text = render(
        made.verdict(made.equivalent(verdict="failed", steps=2, failure="The process of host 0 ended with exit code 3."))
    )
    assert "1x4  failed: the program ended after 2 steps\n" in text


def test_a_program_that_fails_without_distribution_too_is_said_to(made):
    failed = made.equivalent(verdict="failed", failure="ValueError: no")
    text = render(made.verdict(failed, reference=Reference("failed", failure="ValueError: no")))
    assert "On one device (1x1, the reference) the program fails too." in text
    assert text.count("ValueError: no") == 1


def test_a_failing_reference_alone_shows_its_traceback(made):
    unverified = made.equivalent(verdict="unverified", reason="no reference", worst=None)
    text = render(made.verdict(unverified, reference=Reference("failed", failure="ValueError: no")))
    assert "ValueError: no" in text
    assert "1x4  unverified: nothing could be compared (no reference)" in text


def test_a_run_of_which_a_part_was_compared_is_not_said_not_to_be(made):
    text = render(made.verdict(made.equivalent(verdict="unverified", not_compared=("data: the rows were not seen",))))
    assert "1x4  unverified: not everything that must agree could be compared\n" in text
    assert "data: the rows were not seen" in text


def test_a_reference_that_differs_from_its_repeat_is_named(made):
    text = render(made.verdict(made.equivalent(), reference=Reference("ok", 20, repeatable=False)))
    assert "Two runs of the reference" in text


def test_a_hang_shows_each_host_with_its_step_collective_and_stack(made):
    stacks = {
        0: "Thread 0x1 (most recent call first):\n" + "\n".join(f'  File "train.py", line {n}' for n in range(30)),
        1: "idle",
    }
    hung = made.equivalent(
        "2x1",
        verdict="hung",
        reason="hang",
        stacks=stacks,
        details={"hosts": {"0": {"step": 3, "collective": "all_reduce 12"}}},
    )
    text = render(made.verdict(hung))
    assert "2x1  hung: no host could continue, after 20 steps" in text
    assert "host 0  last step 3, last collective all_reduce 12" in text
    assert "... 11 more lines (all of them with --json)" in text
    assert "host 1\n    idle" in text


def test_a_timeout_is_told_from_a_hang(made):
    assert "hung: it ran out of time, after 20 steps" in render(made.verdict(made.equivalent(verdict="hung", reason="timeout")))


def test_what_this_machine_lacks_is_said(made):
    text = render(made.verdict(made.equivalent("8x8", verdict="unavailable", reason="it needs 9 GB, 3 GB are free")))
    assert "8x8  unavailable: this machine cannot provide it (it needs 9 GB, 3 GB are free)" in text


def test_notes_and_what_was_not_compared_are_listed_once(made):
    runs = [made.equivalent(t, notes=("no evaluation was seen",), not_compared=("bn/mean",)) for t in ("1x2", "1x4")]
    runs.append(made.equivalent("2x2", notes=("no evaluation was seen", "TF_CONFIG was replaced")))
    text = render(made.verdict(*runs, notes=("about all of it",)))
    assert text.count("- no evaluation was seen") == 1
    assert "- 2x2: TF_CONFIG was replaced" in text
    assert "- 1x2, 1x4: bn/mean" in text
    assert "note  about all of it" in text


@pytest.mark.parametrize("width", [80, 120])
def test_only_long_words_are_wider_than_the_terminal(made, width):
    long = "model/" + "/".join(f"block_{n}" for n in range(20)) + "/kernel"
    first = Difference(long, "gradient", 0, 0.375, 1e-7, value=0.5, reference_value=0.125)
    shapes = ("1x2", "1x3", "1x4", "1x8", "2x1", "2x2", "2x4", "3x1+2ps")
    text = render(made.verdict(*(made.divergent(shape, first=first) for shape in shapes)), width)
    wide = [line for line in text.splitlines() if len(line) > width]
    assert all(long in line or "tf.nn.compute_average_loss" in line for line in wide)
    assert text.count(long) == 1


def test_what_a_program_printed_cannot_paint_on_the_terminal(made):
    failed = made.equivalent(verdict="failed", failure="\x1b[31mred\x1b[0m \x1b]0;title\x07ValueError\x08: no\x00")
    assert "  red ValueError: no" in render(made.verdict(failed))


def test_a_pipe_gets_no_colour_and_a_terminal_does(made):
    verdict = made.verdict(made.equivalent(), made.divergent("2x2"))
    pipe, screen = io.StringIO(), Screen()
    show(verdict, pipe)
    show(verdict, screen)
    assert "\x1b" not in pipe.getvalue()
    assert pipe.getvalue() == render(verdict) + "\n"
    assert "\x1b[" in screen.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_stream_that_knows_ascii_alone_gets_the_verdict_all_the_same(made, is_terminal, monkeypatch):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    show(made.verdict(made.equivalent(), made.divergent()), stream)
    text = re.sub(r"\x1b\[[0-9;]*m", "", raw.getvalue().decode("ascii"))
    assert re.search("[+]  1x4 +equivalent", text)
    assert re.search("x  1x4 +divergent", text)


numbers = st.none() | st.floats()
differences = st.builds(
    Difference, st.text(max_size=30), st.sampled_from(["gradient", "loss", "data"]), st.integers(0, 99),
    error=st.floats(), noise=st.floats(), value=numbers, reference_value=numbers, non_finite=st.booleans(),
)  # fmt: skip
texts = st.text(max_size=99)
findings = st.builds(Finding, st.sampled_from(["loss-scaling", "nan"]), texts, texts, texts)
verdicts_of_runs = st.sampled_from(["equivalent", "by-design", "divergent", "failed", "hung", "unverified", "unavailable"])
runs = st.builds(
    Run, st.sampled_from(["1x4", "2x2"]), verdicts_of_runs, reason=st.none() | st.text(max_size=20),
    worst=st.none() | differences, first_divergence=st.none() | differences, causes=st.tuples() | st.tuples(findings),
    notes=st.tuples() | st.tuples(texts.map(told("any"))), failure=st.none() | st.text(), seconds=st.floats(0, 1e6),
)  # fmt: skip


@given(st.lists(runs, max_size=3), st.integers(20, 200))
def test_every_verdict_can_be_shown(all_runs, width):
    text = render(Verdict("train.py", 0, "cpu", {}, Reference("ok"), tuple(all_runs)), width)
    assert "\x1b" not in text
    assert text.count("\n  1. ") <= len(all_runs)


def test_a_verdict_that_agrees_says_in_one_sentence_whether_it_depends_on_the_number_of_replicas(made):
    step = StepGraph("The step does not depend on the number of replicas.", same_on_replicas=True, depends_on_number=False)
    said = "  step         The step does not depend on the number of replicas."
    assert said in render(made.verdict(made.equivalent(step_graph=step)), 120)
    assert said not in render(made.verdict(made.divergent(step_graph=step)), 120)
