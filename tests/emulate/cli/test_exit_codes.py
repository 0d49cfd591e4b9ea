"""How the process ends: interrupted, by a fault of its own, into a closed pipe."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[3])
DRIVER = """
import sys, time
import emulate.verify
def verify(program, **options):
    print("working", file=sys.stderr, flush=True)
    {body}
emulate.verify.verify = verify
from emulate.cli import main
sys.argv = ["gpudist", "verify", "train.py"]
sys.exit(main())
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


def test_ctrl_c_that_is_held_down_ends_the_command_once_and_no_part_of_its_clean_up(start):
    process = start(
        "import atexit; atexit.register(lambda: (time.sleep(0.5), print('cleaned up'))); "
        "print('to be cleaned up', file=sys.stderr, flush=True); time.sleep(60)"
    )
    assert [process.stderr.readline() for _ in range(2)] == ["working\n", "to be cleaned up\n"]
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (130, "cleaned up\n", "gpudist: interrupted\n")


def test_a_fault_of_our_own_ends_with_70_and_keeps_its_traceback_in_a_file(start):
    process = start("raise RuntimeError('unexpected')")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 70
    assert "gpudist: This is an error of gpudist, not of your program: RuntimeError: unexpected" in errors
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


def shell(command, folder, **environment):
    """What a shell makes of a command line, in which gpudist is `$GPUDIST`."""
    environment = {**os.environ, "GPUDIST": f"{sys.executable} -m emulate", **environment}
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("command", "code"), [("causes", 0), ("--version", 0), ("--help", 0), ("verify missing.py", 2), ("causes 2>&-", 0)]
)
def test_a_closed_stream_is_like_one_that_leads_nowhere(tmp_path, command, code):
    returned, errors = shell(f"$GPUDIST {command} >&-", tmp_path)
    assert returned == code
    assert "error of gpudist" not in errors
    assert "Traceback" not in errors


def test_a_program_runs_with_all_streams_closed(tmp_path):
    (tmp_path / "train.py").write_text("print('said')\nopen('ran', 'w').write('yes')\n")
    assert shell("$GPUDIST run train.py --topology 1x1 <&- >&- 2>&-", tmp_path) == (0, "")
    assert (tmp_path / "ran").read_text() == "yes"


@pytest.mark.parametrize("command", ["causes", "--help"])
def test_a_full_disk_under_the_output_ends_with_5_and_says_so(tmp_path, command):
    code, errors = shell(f"$GPUDIST {command} > /dev/full", tmp_path)
    assert code == 5
    assert errors == (
        "gpudist: gpudist needs space for its output. Received: standard output, or a file (No space left on device). "
        "Free some, or use another disk.\n"
    )
    assert shell(f"$GPUDIST {command} > /dev/full 2>&1", tmp_path) == (5, "")


DEVICES = """
import sys
import emulate.cluster, emulate.devices
emulate.devices.describe_machine = lambda: {"cpus": 2}
emulate.cluster.describe_isolation = dict
from emulate.cli import main
sys.exit(main(["devices", *sys.argv[1:]]))
"""


@pytest.fixture
def devices(tmp_path_factory):
    """`gpudist devices` without looking at the machine, which takes most of its time and no part in its report."""
    script = tmp_path_factory.mktemp("devices") / "devices.py"
    script.write_text(DEVICES)
    return f"{sys.executable} {script}"


@pytest.mark.parametrize("file", ["-", "/dev/stdout"])
def test_a_report_on_standard_output_leaves_what_a_file_behind_it_has(tmp_path, devices, file):
    (tmp_path / "log").write_text("before\n")
    assert shell(f"{devices} --json {file} >> log 2>/dev/null", tmp_path, PYTHONPATH=ROOT) == (0, "")
    log = (tmp_path / "log").read_text()
    assert log.startswith("before\n")
    assert json.loads(log[log.index("{\n") :])["schema"] == "gpudist.devices/1"
    assert os.listdir(tmp_path) == ["log"]


def test_a_full_disk_under_a_report_ends_with_5_and_names_the_file(tmp_path, devices):
    code, errors = shell(f"{devices} --json /dev/full > /dev/null", tmp_path, PYTHONPATH=ROOT)
    assert code == 5
    assert errors == (
        "gpudist: A report must find room in its file. Received: file='/dev/full' (No space left on device). "
        "Make room there, or name another.\n"
    )


_LOOP = """
import keras, numpy as np, tensorflow as tf
with tf.distribute.MirroredStrategy().scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((32, 64)), np.ones((32, 1)), batch_size=8, verbose=0)
"""


def test_a_limit_on_files_that_a_recording_meets_ends_with_5(tmp_path):
    (tmp_path / "train.py").write_text(_LOOP)
    code, errors = shell("ulimit -f 20; $GPUDIST verify train.py --topology 1x2 > /dev/null", tmp_path)
    assert code == 5
    said = "gpudist: What the runs record must find room. Received: OSError: [Errno 27] File too large, on host 0 of "
    assert said in errors
    assert "or raise the limit on files (ulimit -f)." in errors


@pytest.mark.parametrize("command", ["run ../train.py", "verify train.py", "verify -m train", "verify train.py --json v.json"])
def test_a_working_directory_that_was_deleted_is_a_wrong_use(tmp_path, command):
    (tmp_path / "train.py").touch()
    code, errors = shell(f"mkdir gone; cd gone; rmdir ../gone; $GPUDIST {command}", tmp_path, PYTHONPATH=ROOT)
    assert code == 2
    assert errors == (
        "gpudist: The working directory must be there. Received: one that was deleted or cannot be seen "
        "(No such file or directory). Change to a folder that exists.\n"
    )


def test_an_interpreter_that_cannot_be_executed_is_what_the_machine_lacks(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "python").touch(mode=0o600)
    code = "import sys; from emulate.cli import main; sys.executable = sys.argv[1]; sys.exit(main(['run', 'train.py']))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "python")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 5
    assert done.stderr == (
        "gpudist: Hosts are forked from a Python process of their own, which must be able to start. Received: "
        f"sys.executable='{tmp_path}/python' (Permission denied). Use an interpreter that this user may execute.\n"
    )


def test_an_interrupt_while_it_still_imports_is_no_traceback() -> None:
    code = (
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from emulate.cli import main\n"
        "sys.exit(main(['devices']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("command", ["verify", "run"])
def test_a_keras_that_does_not_run_on_tensorflow_is_a_usage_error_in_one_sentence(tmp_path, command):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    said = "gpudist: Keras must run on TensorFlow. Received: backend={}, set by {}. Set KERAS_BACKEND=tensorflow.\n"
    by_variable = shell(f"$GPUDIST {command} train.py", tmp_path, KERAS_BACKEND="jax", TF_USE_LEGACY_KERAS="0")
    assert by_variable == (2, said.format("'jax'", "KERAS_BACKEND"))
    by_file = shell(f"$GPUDIST {command} train.py", tmp_path, KERAS_BACKEND="", KERAS_HOME=str(tmp_path))
    assert by_file == (2, said.format("'torch'", tmp_path / "keras.json"))
