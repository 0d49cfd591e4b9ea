"""What this machine has is said without importing TensorFlow here, and what it refuses is said with the reason."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from emulate.devices import machine
from emulate.topology import MAX_HOSTS


def test_the_machine_is_described_without_importing_tensorflow_here() -> None:
    script = (
        "import json, sys; from emulate.devices import describe_machine; about = describe_machine();"
        "print(json.dumps([about, 'tensorflow' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    about, imported = json.loads(done.stdout)
    assert not imported
    assert about["tensorflow"]
    assert about["cpus"] >= 1
    assert 0 < about["memory_bytes"]["available"] <= about["memory_bytes"]["total"]
    assert 1 <= about["emulation"]["hosts"] <= MAX_HOSTS
    for name in ("own_network", "copy_on_write"):
        assert about[name]["available"] is (about[name]["why"] is None)


def test_a_check_that_fails_says_why() -> None:
    def refuse() -> None:
        raise OSError("the system refuses it")

    assert machine._availability(refuse) == {"available": False, "why": "the system refuses it"}
    assert machine._availability(lambda: None) == {"available": True, "why": None}


def test_tensorflow_that_cannot_be_imported_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_ASK_TENSORFLOW", "raise ImportError('no tensorflow here')")
    answer = machine._ask_tensorflow()
    assert answer == {"tensorflow": None, "gpus": [], "tensorflow_error": "ImportError: no tensorflow here"}


def test_other_systems_than_linux_are_said_to_lack_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "needs Linux namespaces" in machine._availability(lambda: None)["why"]
