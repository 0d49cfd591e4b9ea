"""What a host's stack says of the program."""

from __future__ import annotations

from emulate.cluster.threads import main_thread

_OURS = main_thread.__code__.co_filename


def test_only_the_programs_own_frames_are_shown_outermost_first() -> None:
    dump = (
        "Current thread 0x00007f (most recent call first):\n"
        '  File "/somewhere/model.py", line 7 in step\n'
        '  File "/somewhere/train.py", line 3 in <module>\n'
        f'  File "{_OURS}", line 1 in start\n'
        '  File "<string>", line 1 in <module>\n'
    )
    assert main_thread(dump) == (
        '  File "/somewhere/train.py", line 3, in <module>\n  File "/somewhere/model.py", line 7, in step'
    )


def test_a_host_whose_program_has_ended_is_said_not_to_be_in_it() -> None:
    dump = 'Current thread 0x00007f (most recent call first):\n  File "<string>", line 1 in <module>\n'
    assert main_thread(dump) == "  not in the program: it has ended there, or has not begun"
    assert main_thread("no stack was written\n") == "no stack was written"
