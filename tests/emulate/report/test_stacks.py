"""The stack of a host that hangs shows the program, and of the libraries how many frames."""

import sysconfig
import threading
from pathlib import Path

import emulate
from emulate.report.runs import short_stack

OURS = next(iter(emulate.__path__))
SITE = sysconfig.get_path("purelib")
STDLIB = str(Path(threading.__file__).parent)


def test_frames_of_libraries_are_counted():
    text = (
        '  File "train.py", line 61, in <module>\n    step()\n'
        f'  File "{SITE}/tensorflow/python/util.py", line 1, in f\n    return g()\n'
        f'  File "{SITE}/tensorflow/python/eager.py", line 2, in g\n'
        f'  File "{STDLIB}/threading.py", line 3, in wait\n    x\n'
        '  File "train.py", line 9, in callback\n    sleep()'
    )
    assert short_stack(text) == (
        '  File "train.py", line 61, in <module>\n    step()\n'
        "  ... 3 frames of tensorflow, threading\n"
        '  File "train.py", line 9, in callback\n    sleep()'
    )


def test_threads_of_gpudist_are_left_out():
    text = (
        f'Thread 0x1 (most recent call first):\n  File "{OURS}/probe/x.py", line 1 in poll\n\n'
        'Current thread 0x2 (most recent call first):\n  File "train.py", line 4 in main\n'
    )
    assert short_stack(text) == 'Current thread 0x2 (most recent call first):\n  File "train.py", line 4 in main'


def test_a_host_outside_the_program_is_said_to_be():
    text = f'Current thread 0x2 (most recent call first):\n  File "{OURS}/cluster/host.py", line 4 in wait\n'
    assert short_stack(text) == "(outside the program: it has ended, or has not begun)"


def test_what_is_no_stack_stays_as_it_is():
    assert short_stack("idle") == "idle"
    assert short_stack("") == ""
