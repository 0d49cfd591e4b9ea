"""How the process ends: interrupted, by a fault of its own, into a closed pipe."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = """
import sys, time
import emulate.verify
def verify(program, **options):
    print("working", file=sys.stderr, flush=True)
    {body}
emulate.verify.verify = verify
from emulate.cli import main
sys.exit(main(["verify", "train.py"]))
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "train.py").touch()

    def start(body, **environment):
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER.format(body=body)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path), **environment},
        )

    return start


def test_an_interruption_ends_with_130_and_no_traceback(start):
    process = start("time.sleep(60)")
    assert process.stderr.readline() == "working\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "gpudist: interrupted\n")


def test_a_fault_of_our_own_ends_with_70_and_keeps_its_traceback_in_a_file(start):
    process = start("raise RuntimeError('unexpected')")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 70
    assert "gpudist: This is a fault of gpudist, not of your program: RuntimeError: unexpected" in errors
    assert "Traceback" not in errors
    kept = re.search(r"which is in (\S+) \(GPUDIST_DEBUG=1 prints it here\)", errors)
    assert "RuntimeError: unexpected" in Path(kept[1]).read_text()


def test_a_fault_of_our_own_is_shown_where_asked(start):
    process = start("raise RuntimeError('unexpected')", GPUDIST_DEBUG="1")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 70
    assert "Traceback (most recent call last):" in errors


def test_what_this_machine_lacks_ends_with_5(start):
    process = start("from emulate.errors import Unavailable; raise Unavailable('It needs X. Received: Y. Do Z.')")
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (5, "working\ngpudist: It needs X. Received: Y. Do Z.\n")


@pytest.mark.parametrize("args", [["verify", "missing.py"], ["verify", "--nonsense"], ["nonsense"]])
def test_a_wrong_use_ends_with_2(args, tmp_path):
    done = subprocess.run([sys.executable, "-m", "emulate", *args], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["causes", "faults"])
def test_a_closed_pipe_is_no_fault(tmp_path, command):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "emulate", command],
            cwd=tmp_path,
            stdout=pipe,
            stderr=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == b""
