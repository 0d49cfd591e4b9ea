"""A host that records leaves with the others, and says so where they do not come."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HOST = """
import sys, time
from pathlib import Path
from emulate.launch import record
from emulate.topology import Topology

record._PATIENCE = 2.0
host = record.RealHost(Topology(2, 1), int(sys.argv[1]), Path(sys.argv[2]))
time.sleep(float(sys.argv[3]))
host.send({"event": "reached", "step": 5})
sys.exit(9)
"""


def start(folder: Path, host: int, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOST, str(host), str(folder), str(seconds)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_hosts_wait_for_each_other_at_the_last_step(tmp_path: Path) -> None:
    with start(tmp_path, 0, 0) as first, start(tmp_path, 1, 1) as second:
        assert [host.communicate(timeout=60)[1] for host in (first, second)] == ["", ""]
    assert (first.returncode, second.returncode) == (0, 0)


def test_a_host_that_waits_in_vain_says_why_and_fails(tmp_path: Path) -> None:
    with start(tmp_path, 0, 0) as host:
        said = host.communicate(timeout=60)[1]
    assert host.returncode == 1
    assert f"not every host made its last step within 2 s, or {tmp_path} is not shared" in said


def test_a_recording_that_fails_is_said_and_ends_the_host(tmp_path: Path) -> None:
    text = HOST.replace('{"event": "reached", "step": 5}', '{"event": "fault", "text": "No space left"}')
    command = [sys.executable, "-c", text, "0", str(tmp_path), "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (70, "gpudist could not record: No space left\n")
