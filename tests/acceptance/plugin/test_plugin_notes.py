"""What the user should know of the machine is said once, at the end, however many tests and workers there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.emulate.cluster.test_cluster_isolation import REFUSED

TESTS = """
import pytest

@pytest.mark.topology("2x1")
@pytest.mark.parametrize("number", range(3))
def test_hosts(devices, number):
    assert devices

@pytest.mark.topology("2x1")
def test_beside(cluster):
    assert cluster.run(lambda: 1) == [1, 1]
"""


def test_where_hosts_share_the_network_the_summary_says_once_what_protects_them(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    arguments = json.dumps(
        ["-q", "-p", "no:cacheprovider", "-p", "xdist", "-n", "2", "--basetemp", str(tmp_path / "temporary"), str(tmp_path)]
    )
    command = f"import pytest, sys; sys.exit(pytest.main({arguments}))"
    root = str(Path(__file__).parents[3])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, command],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": root, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
    assert done.stdout.count("gpudist: The hosts share this machine's network: the system refuses them one of their own (") == 1
    assert done.stdout.count("have no authentication") == 1
