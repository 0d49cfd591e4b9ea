"""`--html`: the verdict as one page with pictures, which needs nothing beside itself and trusts nothing of the program."""

import base64
import html.parser
import importlib.util
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from emulate.errors import UsageError
from emulate.report import check_libraries, check_writable, write_html
from emulate.report.html import pictures
from emulate.verify.verdict import Farthest, FaultReport, Location, Reference, Run, StepGraph, url_of

COURSE = (
    Farthest("initial-weight", 0, "dense/kernel", 0.0, 1e-7),
    Farthest("gradient", 0, "dense/kernel", 0.375, 1e-7),
    Farthest("gradient", 1, "dense/bias", 1e-8, 1e-7),
    Farthest("loss", 1, "loss", float("nan"), 1e-7, non_finite=True),
)
ROWS = ((4, 4, 4), (4, 3, 0))


class Page(html.parser.HTMLParser):
    """What a browser would make of it: text, images, tags that are left open."""

    def __init__(self, text):
        super().__init__()
        self.text, self.images, self.open, self.tags = "", [], [], set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag == "img":
            self.images.append(dict(attributes))
        elif tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "title"):
            self.text += data


def page(verdict, path):
    write_html(verdict, path)
    found = Page(path.read_text(encoding="utf-8"))
    assert found.open == []
    return found


def svg_of(image):
    head, _, data = image["src"].partition(",")
    assert head == "data:image/svg+xml;base64"
    return ET.fromstring(base64.b64decode(data))


def words_in(svg):
    return [element.text for element in svg.iter() if element.tag.endswith("text") and element.text]


def test_the_page_says_what_the_verdict_says(made, tmp_path):
    located = replace(made.loss_scaling, stage="loss", locations=(Location("src/train.py", 63, "loss = mean(losses)"),))
    verdict = made.verdict(
        made.equivalent("1x4", course=COURSE[:1]),
        made.divergent("2x2", causes=[located], course=COURSE, rows=ROWS, notes=("a note",), not_compared=("dense/bias: why",)),
        notes=("of all",),
    )
    found = page(verdict, tmp_path / "v.html")
    fix = [line.strip() for line in made.loss_scaling.fix.splitlines()]
    of_cause = (made.loss_scaling.summary, made.loss_scaling.evidence, *fix, "gpudist causes loss-scaling")
    of_cause += ("src/train.py:63", "(loss)", "loss = mean(losses)")
    of_runs = ("train.py", "1x4", "2x2", "divergent from step 0 on", "a note", "dense/bias: why", "of all", "tensorflow 2.21.0")
    for text in (*of_cause, *of_runs, "First to diverge: the gradient of dense/kernel at step 0, optimizer adam"):
        assert text in found.text, text


def test_the_page_says_whether_the_step_depends_on_the_number_of_replicas(made, tmp_path):
    step = StepGraph("The step does not depend on it.", same_on_replicas=True, depends_on_number=False)
    write_html(made.verdict(made.equivalent(step_graph=step)), tmp_path / "v.html")
    assert step.text in Page((tmp_path / "v.html").read_text()).text


def test_code_of_a_fix_is_monospace_and_a_shared_cause_is_told_once(made, tmp_path):
    fix = "Write `a < b`:\n    loss = tf.reduce_sum(x)\n    loss /= 4\nNot more."
    cause = replace(made.loss_scaling, fix=fix)
    allowed = replace(made.batchnorm, allowed=True)
    verdict = made.verdict(made.divergent("1x4", causes=[cause]), made.divergent("2x2", causes=[cause, allowed]))
    write_html(verdict, tmp_path / "v.html")
    text = (tmp_path / "v.html").read_text()
    assert text.count("<code>a &lt; b</code>") == text.count("<pre>loss = tf.reduce_sum(x)\nloss /= 4</pre>") == 1
    assert "As on 1x4, see above." in text
    assert f'<span class="tag">(allowed)</span> {allowed.summary}' in text
    assert allowed.fix not in text


def test_each_run_has_its_pictures_with_words_for_who_cannot_see_them(made, tmp_path):
    verdict = made.verdict(made.equivalent("1x4", course=COURSE[:2]), made.divergent("1x3", course=COURSE, rows=ROWS))
    images = page(verdict, tmp_path / "v.html").images
    assert [image["alt"].split(":")[0] for image in images] == ["1x4", "1x3", "1x3"]
    course, rows = (words_in(svg_of(image)) for image in images[1:])
    assert {"gradient", "loss", "initial-weight", "10 times the noise", "step"} <= set(course)
    assert [word for word in rows if word in ("4", "3", "0")].count("4") >= 4
    assert "replica" in rows


def test_the_page_asks_nobody_for_anything(made, tmp_path):
    verdict = made.verdict(made.divergent("2x2", course=COURSE, rows=ROWS))
    write_html(verdict, tmp_path / "v.html")
    text = (tmp_path / "v.html").read_text(encoding="utf-8")
    assert "script" not in Page(text).tags
    addresses = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')]*)""", text)
    links = [address for address in addresses if not address.startswith("data:image/svg+xml;")]
    assert links == [url_of("loss-scaling")]  # which the browser follows only when it is told to
    assert len(addresses) == 3
    assert "default-src 'none'" in text


def test_what_a_program_says_is_text_and_paints_nothing(made, tmp_path):
    evil = '<script>alert(1)</script>\x1b[31m & "it\'s"'
    verdict = made.verdict(
        made.equivalent("1x4", verdict="failed", failure=evil, notes=(evil,)),
        reference=Reference("failed", failure=evil),
        program=evil,
    )
    found = page(verdict, tmp_path / "v.html")
    assert "script" not in found.tags
    assert found.text.count('<script>alert(1)</script> & "it\'s"') >= 3
    assert "\x1b" not in found.text


def test_hangs_faults_and_what_could_not_run_are_told(made, tmp_path):
    fault = FaultReport("kill:host=1,step=5", fired=True, host=1, step=5, recovered=True, restarts=1, result="identical")
    waits = {"stacks": {0: 'File "train.py", line 3'}, "details": {"hosts": {0: {"step": 3}}}}
    hung = made.equivalent("2x1", verdict="hung", reason="hang", **waits)
    unavailable = Run("9x9", "unavailable", reason="too many")
    verdict = made.verdict(hung, made.equivalent("1x2", faults=(fault,)), unavailable)
    found = page(verdict, tmp_path / "v.html")
    for text in ("hung: no host could continue", "host 0", "last step 3", "train.py", "recovered after 1 restart", "too many"):
        assert text in found.text, text


def test_the_same_verdict_makes_the_same_bytes(made, tmp_path):
    verdict = made.verdict(made.divergent("2x2", course=COURSE, rows=ROWS))
    for name in ("a", "b"):
        write_html(verdict, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


numbers = st.one_of(st.floats(0, 1e30), st.just(float("inf")), st.just(float("nan")), st.just(0.0))
points = st.builds(
    Farthest, st.sampled_from(["gradient", "weight", "new-kind"]), st.integers(0, 50), st.text(), numbers, numbers
)


@settings(max_examples=4)
@example([Farthest("gradient", 0, "w", 1e300, 1e-300), Farthest("gradient", 1, "w", 1e30, 1e-270)])
@example([Farthest("gradient", 0, "w", 1e30, 1e-278)])
@given(st.lists(points, min_size=1, max_size=12))
def test_every_course_has_a_picture(course):
    ET.fromstring(pictures.course(Run("1x4", "divergent", course=tuple(course)), 10.0))


@settings(max_examples=4)
@given(
    st.integers(1, 9).flatmap(lambda n: st.lists(st.lists(st.integers(0, 99), min_size=n, max_size=n), min_size=1, max_size=70))
)
def test_every_ledger_has_a_picture(rows):
    ET.fromstring(pictures.rows(Run("1x4", "divergent", rows=tuple(map(tuple, rows)))))


def test_without_its_libraries_it_is_refused_before_the_work(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else real(name, *rest))
    with pytest.raises(UsageError) as refused:
        check_libraries()
    assert str(refused.value) == (
        "--html needs jinja2 and matplotlib. Received: matplotlib not installed. "
        'Install them: pip install "gpudist[html]". Or leave --html out: --json needs nothing.'
    )


def test_an_earlier_page_may_be_replaced(made, tmp_path):
    write_html(made.verdict(made.equivalent()), tmp_path / "v.html")
    check_writable(tmp_path / "v.html", "--html")


def test_rows_are_told_by_host(tmp_path):
    run = Run("2x2+1ps", "equivalent", rows=((4, 4, 4, 4), (4, 4, 4, 0)))
    words = words_in(ET.fromstring(pictures.rows(run)))
    assert {"host 0: replicas 0 to 1", "host 1: replicas 2 to 3"} <= set(words)
    assert "host 1: replica 1" in words_in(ET.fromstring(pictures.rows(replace(run, topology="2x1", rows=((4, 4),)))))
    of_one_device_each = words_in(ET.fromstring(pictures.rows(replace(run, rows=((4, 4),)))))
    assert "replica" in of_one_device_each


def test_where_small_errors_are_drawn_is_said(made, tmp_path):
    text = page(made.verdict(made.equivalent("1x4", course=COURSE[:2])), tmp_path / "v.html").text
    assert "what is below 0.01 of it is drawn at 0.01, " in " ".join(text.split())


def test_a_failure_that_does_not_say_what_to_install_is_followed_by_that(made, tmp_path):
    failed = made.equivalent("1x4", verdict="failed", failure="Traceback\nModuleNotFoundError: No module named 'tf_keras'")
    assert 'pip install "gpudist[keras2]"' in page(made.verdict(failed), tmp_path / "v.html").text


def test_a_folder_is_refused_by_the_name_of_the_option(tmp_path):
    with pytest.raises(
        UsageError, match=r"--html must name a file\. Received: --html '.*', which is a folder\. Name a file in it\."
    ):
        check_writable(tmp_path, "--html")


def test_a_verdict_without_anything_compared_is_a_page_too(made, tmp_path):
    assert page(made.verdict(replace(made.equivalent(), verdict="unverified", worst=None)), tmp_path / "v").images == []
