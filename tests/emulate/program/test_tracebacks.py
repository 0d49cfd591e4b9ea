"""What a user reads of a traceback is their own part of it."""

from pathlib import Path

import numpy as np

import emulate.errors
from emulate.program import own_traceback, shorten_traceback, trim_traceback

OURS = str(Path(emulate.errors.__file__).parent)


def test_frames_of_gpudist_are_removed_wherever_they_stand():
    text = (
        "Traceback (most recent call last):\n"
        f'  File "{OURS}/program/start.py", line 3, in start\n    run()\n    ^^^^^\n'
        '  File "train.py", line 8, in <module>\n    fit()\n'
        f'  File "{OURS}/probe/runs.py", line 9, in run\n'
        '  File "train.py", line 2, in fit\n    raise ValueError\nValueError: no\n'
    )
    assert trim_traceback(text) == (
        "Traceback (most recent call last):\n"
        '  File "train.py", line 8, in <module>\n    fit()\n'
        '  File "train.py", line 2, in fit\n    raise ValueError\nValueError: no'
    )


def test_frames_of_an_example_that_is_installed_with_gpudist_are_the_programs() -> None:
    package = Path(emulate.errors.__file__).parent
    frames = [
        f'  File "{package}/{file}", line 3, in run\n    step()\n' for file in ("cli/demo.py", "examples/bugs/accumulation.py")
    ]
    text = f"Traceback (most recent call last):\n{''.join(frames)}ValueError: wrong"
    assert "examples/bugs/accumulation.py" in trim_traceback(text)
    assert "demo.py" not in trim_traceback(text)


def test_a_message_that_quotes_a_traceback_is_trimmed_too():
    text = (
        'TypeError: in user code:\n\n    File "train.py", line 1, in step  *\n        x\n'
        f'    File "{OURS}/a.py", line 2, in f  **\n        y\n\n    TypeError: no'
    )
    assert OURS not in trim_traceback(text)
    assert 'File "train.py", line 1, in step  *\n        x\n\n    TypeError: no' in trim_traceback(text)


def test_a_traceback_of_ours_alone_leaves_the_error():
    text = f'Traceback (most recent call last):\n  File "{OURS}/a.py", line 2, in f\n    y\nUsageError: what\n'
    assert trim_traceback(text) == "UsageError: what"


def test_text_without_a_traceback_stays_as_it_is():
    assert trim_traceback("ValueError: no\n  indented\n\nlast") == "ValueError: no\n  indented\n\nlast"


def test_an_exception_is_told_with_its_causes():
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error
    except ValueError as error:
        text = own_traceback(error)
    assert "KeyError: 'first'" in text
    assert "direct cause" in text
    assert text.endswith("ValueError: second")


def test_runs_of_blank_lines_are_one_where_a_message_quotes_frames_without_their_files():
    assert trim_traceback("Error: Detected at\n\n\n  \n  File\n\nend") == "Error: Detected at\n\n  File\n\nend"


def test_an_array_in_a_message_is_told_by_its_first_numbers():
    array = np.linspace(0, 1, 1200, dtype="float32").reshape(12, 100)
    with np.printoptions(threshold=10_000):
        text = f"ValueError: a value (PerReplica:{{\n  0: numpy={array!r}>\n}}) of shape [12, 100] to a Tensor."
    assert text.count("\n") > 100
    shown = shorten_traceback(text)
    assert shown.startswith("ValueError: a value (PerReplica:{\n  0: numpy=array([[0.")
    assert shown.count("\n") <= 3
    assert shown.endswith(" of shape [12, 100] to a Tensor.")


def test_a_long_message_loses_its_middle_and_no_frame_of_the_program():
    frames = "".join(f'  File "train.py", line {n}, in step\n    x = f(x)\n    ^^^^\n' for n in range(30))
    message = "\n".join(f"line {n}" for n in range(100))
    shown = shorten_traceback(f"Traceback (most recent call last):\n{frames}ValueError: {message}")
    assert shown.count("File ") == 30
    assert "line 0\n" in shown
    assert shown.endswith("line 98\nline 99")
    assert "\n... 76 more lines ...\n" in shown


def test_a_deep_recursion_and_a_long_line_lose_their_middle():
    frames = "".join(f'  File "train.py", line {n}, in step\n    x = f(x)\n' for n in range(900))
    shown = shorten_traceback(f"Traceback (most recent call last):\n{frames}RecursionError: {'x' * 5000} end")
    assert "  ... 860 more frames ..." in shown
    assert "line 899" in shown
    assert max(map(len, shown.split("\n"))) < 700
    assert shown.endswith(" end")


def test_what_is_short_stays_as_it_is():
    text = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    y\nValueError: [1, 2, 3] and (64, 10)\n\nlast'
    assert shorten_traceback(text) == text
