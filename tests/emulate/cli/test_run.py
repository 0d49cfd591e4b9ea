"""`gpudist run`: the program's output passes through, its end is ours, nothing outlives it."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from emulate.cli.app import app
from emulate.cluster import Preload

PROGRAM = """
import json, os, signal, sys, time
host = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
def save(*_):
    print("heard", flush=True)
    if sys.argv[1] == "save":
        time.sleep(1 + host)
        open(f"saved-{host}", "w").close()
        sys.exit(75)
if sys.argv[1] in ("save", "stay"):
    signal.signal(signal.SIGTERM, save)
print("started", host, os.getpid(), sys.argv[1:], flush=True)
how = sys.argv[1] if host == 1 else ""
if how == "raise":
    raise ValueError("no")
if how == "exit":
    sys.exit(7)
if how == "kill":
    os.kill(os.getpid(), 9)
if sys.argv[1] in ("save", "stay", "sleep"):
    time.sleep(100)
if sys.argv[1] == "fresh":
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    print("legacy", "tensorflow" in sys.modules)
open(f"written-{host}", "w").close()
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))

    def run(*args, topology="2x1", program="train.py", options=()):
        command = [sys.executable, "-m", "emulate", "run", program, "--topology", topology, *options, "--", *args]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return run


@pytest.fixture
def ended(run, tmp_path, monkeypatch, preload, capfd):
    """The exit code and the errors of `gpudist run` in this process, with the parent that all tests share."""
    monkeypatch.chdir(tmp_path)

    def parent(*, imports, **options):
        return contextlib.nullcontext(preload) if imports else Preload(imports=imports, **options)

    monkeypatch.setattr("emulate.cluster.Preload", parent)

    def ended(*args, topology="2x1", program="train.py"):
        with pytest.raises(SystemExit) as left:
            app(args=["run", program, "--topology", topology, "--", *args], prog_name="gpudist")
        return left.value.code, capfd.readouterr().err

    return ended


def test_output_passes_through_with_its_host_and_files_stay(run, tmp_path):
    process = run("well", "x")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    for host in ("0", "1"):
        assert any(line.startswith(f"[host {host}] started {host} ") for line in output.splitlines())
        assert (tmp_path / f"written-{host}").exists()
    assert output.count("['well', 'x']") == 2


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [("raise", 3, "ValueError: no"), ("exit", 7, ""), ("kill", 137, "was ended by signal 9.")],
)
def test_the_exit_code_is_the_programs(ended, how, code, said):
    returned, errors = ended(how)
    assert returned == code
    assert said in errors
    assert "emulate" not in errors


def test_a_program_that_sets_what_tensorflow_reads_gets_a_fresh_process(run):
    process = run("fresh", topology="1x1")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert output.splitlines()[-1] == "legacy False"


def test_a_function_that_is_not_there_after_all_is_a_wrong_use(ended, tmp_path):
    (tmp_path / "star.py").write_text("from os.path import *")
    code, errors = ended("x", topology="1x1", program="star.py:mian")
    assert code == 2
    assert "Received: program='star.py:mian', whose 'mian' is not there." in errors


def test_a_program_that_takes_another_keras_backend_is_a_usage_error(ended, tmp_path):
    (tmp_path / "other.py").write_text("import os\nos.environ['KERAS_BACKEND'] = 'jax'\nimport keras\n")
    code, errors = ended(topology="1x1", program="other.py")
    assert code == 2
    assert errors.endswith("Received: backend='jax', set by the program, in KERAS_BACKEND. Set KERAS_BACKEND=tensorflow.\n")


def test_a_file_of_a_package_is_told_how_to_be_started(ended, tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text("from .rows import rows\n")
    code, errors = ended(topology="1x1", program="pkg/train.py")
    assert code == 3
    assert "ImportError: attempted relative import with no known parent package" in errors
    assert "gpudist: A file that imports from its own package is started as a module of it: -m pkg.train\n" in errors


def _pids_of(process):
    pids = []
    while len(pids) < 2:
        line = process.stdout.readline().split()
        pids += [int(line[line.index("started") + 2])] if "started" in line else []
    return pids


def test_an_interruption_ends_every_host(run):
    process = run("sleep")
    pids = _pids_of(process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.endswith("gpudist: interrupted\n")
    assert not any(_is_alive(pid) for pid in pids)


def test_sigterm_lets_every_host_save_and_the_exit_code_is_the_programs(run, tmp_path):
    process = run("save")
    pids = _pids_of(process)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "gpudist: SIGTERM: the program has 30 s to save and exit (--grace)." in errors
    assert [(tmp_path / f"saved-{host}").exists() for host in (0, 1)] == [True, True]
    assert not any(_is_alive(pid) for pid in pids)


@pytest.mark.parametrize(("grace", "again", "code"), [("1", False, 143), ("100", True, -signal.SIGTERM)])
def test_a_program_that_stays_ends_after_the_grace_or_a_second_sigterm(run, grace, again, code):
    process = run("stay", options=["--grace", grace])
    pids = _pids_of(process)
    process.terminate()
    while "heard" not in process.stdout.readline():
        pass
    if again:
        time.sleep(1)  # sooner it is the same notice
        process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == code
    until = time.monotonic() + 10
    while any(_is_alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(_is_alive(pid) for pid in pids)


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
