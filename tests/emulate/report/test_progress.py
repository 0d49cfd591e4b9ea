"""Progress: lines for a log, a live display for a terminal, nothing for a library."""

import io
import threading

from emulate.progress import Silent
from emulate.report import PlainProgress, progress_on


class Screen(io.StringIO):
    def isatty(self):
        return True


def go(progress):
    progress.expect(2)
    progress.run_started("reference", 20)
    progress.run_started("1x4", None)
    for step in range(1, 21):
        progress.step("reference", step)
        progress.step("1x4", step)
    progress.run_ended("reference", "done")
    progress.run_ended("1x4", "hung")


def test_a_log_gets_a_line_when_a_run_begins_and_ends():
    stream = io.StringIO()
    with progress_on(stream) as progress:
        assert isinstance(progress, PlainProgress)
        go(progress)
    lines = stream.getvalue().splitlines()
    started = ["run 1 of at most 2: reference", "run 2 of at most 2: 1x4"]
    assert lines[:2] == started
    assert lines[2].startswith("reference: done, 20 steps, ")
    assert lines[3].startswith("1x4: hung, 20 steps, ")
    assert "\x1b" not in stream.getvalue()


def test_a_bound_is_said_from_where_it_is_known_to_where_causes_are_looked_for():
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.run_started("1x4", 20)
    progress.expect(2)
    for label in ("noise 1", "noise 1", "noise 2"):  # one that could not be evaluated is made by the program
        progress.run_started(label, 20)
    progress.expect(0)
    progress.run_started("1x4 without clipping", 20)
    said = ["run 1: 1x4", *["run 2 of at most 3: noise 1"] * 2, "run 3 of at most 3: noise 2"]
    assert stream.getvalue().splitlines() == [*said, "run 4, looking for causes: 1x4 without clipping"]


def test_a_terminal_shows_every_run_with_its_step():
    screen = Screen()
    with progress_on(screen) as progress:
        progress.run_started("reference", 20)
        progress.step("reference", 7)
        progress._display.refresh()
        go(progress)
    assert "step 7 of 20" in screen.getvalue()


def test_an_interruption_gives_the_terminal_back():
    screen = Screen()
    try:
        with progress_on(screen) as progress:
            progress.run_started("reference", 20)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")


def test_runs_may_report_from_several_threads():
    stream = io.StringIO()
    progress = PlainProgress(stream)

    def work(label):
        progress.run_started(label, 3)
        for step in range(3):
            progress.step(label, step)
        progress.run_ended(label, "done")

    threads = [threading.Thread(target=work, args=(f"run {n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stream.getvalue().splitlines()) == 16


def test_silence_prints_nothing(capsys):
    go(Silent())
    assert capsys.readouterr() == ("", "")
