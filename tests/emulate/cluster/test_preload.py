"""The pre-loaded parent while it imports: what its supervisor sends meanwhile does not disturb it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WORD_AFTER_WORD = """
import contextlib, socket, sys, threading, time
from pathlib import Path
from emulate.cluster.channel import Channel
from emulate.cluster.preload import _ending_with

ours, theirs = socket.socketpair()
for end in (ours, theirs):
    end.setblocking(False)

def send():
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):
            ours.send(b"a word")
        with contextlib.suppress(BlockingIOError):
            theirs.recv(1 << 16)

sender = threading.Thread(target=send)
with _ending_with(Channel(theirs), Path(sys.argv[1])):
    sender.start()
    while sender.is_alive():
        pass
"""


def test_what_a_supervisor_sends_during_the_imports_does_not_disturb_them(tmp_path: Path) -> None:
    # Each word is a signal, and the next one comes while the last is looked at.
    command = [sys.executable, "-c", WORD_AFTER_WORD, str(tmp_path / "scratch")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


WITHOUT_KERAS_2 = """
import sys
sys.modules["tf_keras"] = None
from emulate.cluster.preload import _import_all
_import_all(())
print("keras" in sys.modules)
"""


def test_keras_2_that_is_asked_for_and_not_installed_is_the_programs_affair() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_KERAS_2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "TF_USE_LEGACY_KERAS": "1"},
    )
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr
