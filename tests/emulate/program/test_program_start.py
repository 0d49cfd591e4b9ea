"""A program starts and ends as Python itself would have it."""

import re
import subprocess
import sys
import textwrap

import pytest

from emulate.program import Program

START = """
import sys
from emulate.program import Program, own_traceback
program = Program.find(sys.argv[1], sys.argv[2:])
try:
    print("returned", program.start())
except SystemExit as leave:
    print("left", repr(leave.code))
except BaseException as error:
    print(own_traceback(error))
"""


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


def run(command, folder):
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def start(folder, *command):
    # Python 3.13 shows the lines of a -c too.
    return re.sub(r'  File "<string>", line 6, in <module>\n( {4,}.*\n)*', "", run(["-c", START, *command], folder))


TELLS = """
    import sys, os, inspect, pickle
    class Thing: pass
    def tells(): pass
    print(__name__, __package__, None if __spec__ is None else __spec__.name, __file__)
    print(sys.argv, sys.path[0], os.getcwd())
    print(sys.modules["__main__"].tells is tells, inspect.getsource(tells).strip())
    print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, inspect.getmodule(tells).__name__, __annotations__)
"""


def test_a_script_sees_what_python_would_show_it(tmp_path):
    write(tmp_path / "sub" / "train.py", TELLS)
    theirs = run(["sub/train.py", "-x", "1"], tmp_path)
    assert start(tmp_path, "sub/train.py", "-x", "1") == theirs + "returned None\n"


def test_a_module_sees_what_python_would_show_it(tmp_path):
    write(tmp_path / "package" / "__init__.py", "")
    write(tmp_path / "package" / "other.py", "value = 1")
    write(tmp_path / "package" / "train.py", "    from .other import value" + TELLS)
    theirs = run(["-m", "package.train", "-x", "1"], tmp_path)
    assert "__main__ package package.train" in theirs
    assert start(tmp_path, "-m package.train", "-x", "1") == theirs + "returned None\n"


def test_a_package_runs_its_main(tmp_path):
    write(tmp_path / "package" / "__init__.py", "")
    write(tmp_path / "package" / "__main__.py", "print(__package__, __spec__.name)")
    assert start(tmp_path, "-m package") == "package package.__main__\nreturned None\n"


def test_a_script_imports_its_neighbours_and_not_ours(tmp_path):
    write(tmp_path / "sub" / "helper.py", "print('helped')")
    write(tmp_path / "sub" / "train.py", "import helper")
    assert "helped" in start(tmp_path, "sub/train.py")


def test_a_function_returns_its_value_and_sees_arguments(tmp_path):
    write(tmp_path / "train.py", "import sys\ndef main(): return __name__, sys.argv[1:]")
    assert start(tmp_path, "train.py:main", "a") == "returned ('train', ['a'])\n"


def test_a_file_named_like_a_loaded_module_does_not_replace_it(tmp_path):
    write(
        tmp_path / "sub" / "types.py",
        "def main():\n    import types, enum\n    return types.__name__, hasattr(types, 'ModuleType')",
    )
    assert start(tmp_path, "sub/types.py:main") == "returned ('types', True)\n"


def test_a_function_inside_a_package_keeps_its_relative_imports(tmp_path):
    write(tmp_path / "package" / "__init__.py", "")
    write(tmp_path / "package" / "other.py", "value = 7")
    write(tmp_path / "package" / "train.py", "from .other import value\ndef main(): return value")
    assert start(tmp_path, "package/train.py:main") == "returned 7\n"
    assert start(tmp_path, "package.train:main") == "returned 7\n"


def test_a_function_that_is_not_there_after_all_is_named(tmp_path):
    write(tmp_path / "train.py", "from os.path import *\nmade = 3")
    assert "whose 'absent' is not there." in start(tmp_path, "train.py:absent")
    assert "whose 'made' is a int." in start(tmp_path, "train.py:made")


@pytest.mark.parametrize(
    ("leave", "printed"),
    [("", "returned None"), ("0", "returned None"), ("None", "returned None"), ("3", "left 3"), ("'no'", "left 'no'")],
)
def test_leaving_with_a_code_or_a_text_is_a_failure(tmp_path, leave, printed):
    write(tmp_path / "train.py", f"import sys\nsys.exit({leave})")
    assert start(tmp_path, "train.py") == printed + "\n"


def test_exit_handlers_threads_and_executors_end_as_in_python(tmp_path):
    write(
        tmp_path / "train.py",
        """
        import atexit, threading, time
        from concurrent.futures import ThreadPoolExecutor
        atexit.register(print, "handler")
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.3), print("executor")))
        print("main")
        """,
    )
    assert start(tmp_path, "train.py") == run(["train.py"], tmp_path) + "returned None\n"


def test_handlers_of_the_parent_do_not_run_in_a_host(tmp_path):
    write(tmp_path / "train.py", "")
    parent = "import atexit\natexit.register(print, 'of the parent')\n"
    assert run(["-c", parent + START, "train.py"], tmp_path) == "returned None\n"


def test_a_program_runs_from_its_working_copy(tmp_path):
    write(tmp_path / "real" / "train.py", "print(__file__)")
    write(tmp_path / "copy" / "train.py", "import helper\nprint(__file__)")
    write(tmp_path / "copy" / "helper.py", "")
    code = (
        "from pathlib import Path\nfrom emulate.program import Program\nimport sys\n"
        "Program.find(sys.argv[1]).start(lambda path: Path(str(path).replace('/real', '/copy')))"
    )
    assert run(["-c", code, str(tmp_path / "real" / "train.py")], tmp_path) == f"{tmp_path}/copy/train.py\n"


def test_a_callable_runs_where_its_module_cannot_be_imported(tmp_path):
    value = 5

    def train():
        return value, helper()

    program = Program.find(train)
    (tmp_path / "pickled").write_bytes(program.pickled)
    code = "import pickle\nprint(pickle.load(open('pickled', 'rb'))())"
    assert run(["-c", code], tmp_path) == "(5, 'helped')\n"


def helper():
    return "helped"


def test_a_traceback_shows_the_frames_of_the_user_alone(tmp_path):
    write(tmp_path / "helper.py", "def boom():\n    raise ValueError('no')")
    write(
        tmp_path / "train.py",
        "import helper\ntry:\n    helper.boom()\nexcept ValueError as e:\n    raise RuntimeError('worse') from e",
    )
    theirs = run(["train.py"], tmp_path)
    assert start(tmp_path, "train.py") == theirs
    assert "emulate" not in theirs


def test_a_module_that_fails_shows_no_import_machinery(tmp_path):
    write(tmp_path / "train.py", "1 / 0\ndef main(): ...")
    shown = start(tmp_path, "train.py:main")
    assert "emulate" not in shown
    assert "importlib" not in shown
    assert shown.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/train.py", line 1, in <module>')
