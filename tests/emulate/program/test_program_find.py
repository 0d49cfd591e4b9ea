"""A program is found and checked without running or importing any of it."""

import os
import sys
import threading
from functools import partial

import pytest

from emulate.errors import UsageError
from emulate.program import Program


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('it was run')\n")
    (tmp_path / "loops.py").write_text(
        "from os.path import join as joined\n"
        "import click\n"
        "def main(epochs=1, *args, **kwargs): raise SystemExit('it was run')\n"
        "def needs(data, *, steps): ...\n"
        "async def later(): ...\n"
        "class Trainer: ...\n"
        "@click.command()\n"
        "def decorated(epochs): ...\n"
        "if True:\n"
        "    def guarded(): ...\n"
        "try:\n"
        "    import fast\n"
        "except ImportError:\n"
        "    def fallback(): ...\n"
        "made = partial(needs, 1, steps=2)\n"
    )
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('it was imported')\n")
    (package / "fit.py").write_text("from . import other\ndef main(): ...\n")
    (package / "sub").mkdir()
    (package / "sub" / "__init__.py").write_text("")
    (package / "sub" / "__main__.py").write_text("")
    return tmp_path


def wrong(target, *args):
    with pytest.raises(UsageError) as caught:
        Program.find(target, *args)
    return str(caught.value)


def test_a_script_is_found_with_its_folder_and_arguments(folder):
    program = Program.find("train.py", ["--epochs", "2"])
    assert (program.kind, program.name, program.args) == ("script", "train.py", ("--epochs", "2"))
    assert program.file == folder / "train.py"
    assert program.import_root == folder
    assert program.folders == (folder,)


def test_a_script_elsewhere_has_two_folders(folder, tmp_path_factory, monkeypatch):
    other = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(other)
    assert Program.find(str(folder / "train.py")).folders == (other, folder)


def test_hosts_find_matplotlib_imported_where_the_program_names_it(folder):
    (folder / "draws.py").write_text("import matplotlib.pyplot as plt\n")
    found = [Program.find(target).imports for target in ("draws.py", "train.py", lambda: __import__("matplotlib"))]
    assert found == [("matplotlib.pyplot",), (), ("matplotlib.pyplot",)]


def test_a_path_object_is_a_script(folder):
    assert Program.find(folder / "train.py").kind == "script"


def test_a_program_is_found_once(folder):
    program = Program.find("train.py")
    assert Program.find(program) is program


@pytest.mark.parametrize(("name", "file"), [("-m package.fit", "fit.py"), ("-m package.sub", "sub/__main__.py")])
def test_a_module_is_found_without_importing_its_package(folder, name, file):
    program = Program.find(name)
    assert program.file == folder / "package" / file
    assert (program.kind, program.import_root) == ("module", folder)
    assert "package" not in sys.modules


def test_an_installed_module_writes_beside_the_user_only(folder):
    program = Program.find("-m json.tool")
    assert program.folders == (folder,)


@pytest.mark.parametrize("function", ["main", "decorated", "guarded", "fallback", "made", "joined"])
def test_a_function_that_may_take_no_arguments_is_found(folder, function):
    program = Program.find(f"loops.py:{function}")
    assert (program.kind, program.function, program.module) == ("function", function, None)


def test_a_function_of_a_module_is_found(folder):
    program = Program.find("package.fit:main")
    assert (program.module, program.import_root) == ("package.fit", folder)


def test_a_file_inside_a_package_is_imported_as_part_of_it(folder):
    program = Program.find("package/fit.py:main")
    assert (program.module, program.import_root) == ("package.fit", folder)


def test_a_callable_is_sent_by_value(folder):
    program = Program.find(lambda: 1)
    assert program.kind == "callable"
    assert program.folders == (folder,)
    assert "lambda" in program.name


def test_a_partial_is_named_for_its_function():
    assert Program.find(partial(print, "x")).name == "print"


def test_a_missing_file_offers_the_near_one(folder):
    assert wrong("trian.py") == "A program's file must exist. Received: program='trian.py'. Did you mean 'train.py'?"
    assert wrong("train").endswith("Did you mean 'train.py'?")
    assert wrong("pakage/fit.py").endswith("pakage' either. Did you mean 'package'?")
    assert wrong("elsewhere/fit.py").endswith("elsewhere' either.")


def test_a_missing_file_lists_what_is_there(folder):
    assert wrong("zzz.py").endswith("The Python files there are: loops.py, train.py.")


def test_a_module_without_its_option_is_recognised(folder):
    assert wrong("package.fit").endswith("A module is written with -m: did you mean '-m package.fit'?")


def test_a_folder_is_not_a_program(folder):
    assert wrong("package").startswith(
        "A program must be a file, not a folder. Received: program='package'. The Python files there"
    )


def test_a_notebook_is_told_how_to_become_one(folder):
    (folder / "n.ipynb").write_text("{}")
    assert wrong("n.ipynb").startswith("A notebook must be JSON with cells, as Jupyter writes it. Received: program='n.ipynb'")


def test_a_syntax_error_is_shown_with_its_line(folder):
    (folder / "broken.py").write_text("x = 1\nfor x in\n")
    message = wrong("broken.py")
    assert message.startswith(
        f"A program must be valid Python {sys.version_info[0]}.{sys.version_info[1]}. Received: program='broken.py'"
    )
    assert "(broken.py, line 2: for x in)" in message


def test_what_is_not_text_is_not_a_program(folder):
    (folder / "a.out").write_bytes(b"\x7fELF\x00\x00")
    assert "program='a.out'" in wrong("a.out")


def test_a_warning_of_the_source_is_not_ours_to_raise(folder):
    (folder / "warns.py").write_text("x = '\\d'\nx is 1\n")
    assert Program.find("warns.py").kind == "script"


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("-m package.fitt", "and where Python finds packages."),
        ("-m package", "It is a package without a __main__ module: name the module in it."),
        ("-m train.py", "A file is written without -m: 'train.py'."),
        ("-m", "and where Python finds packages."),
        ("package.none:main", "and where Python finds packages."),
    ],
)
def test_a_missing_module_says_where_it_was_looked_for(folder, name, end):
    message = wrong(name)
    assert message.startswith(f"A program's module must be there. Received: program='{name}'.")
    assert message.endswith(end)


def test_a_module_that_is_no_package_has_no_modules(folder):
    assert wrong("os.path:join") == (
        "A program's module must have a file of its own. Received: program='os.path:join', and 'os' is no package. "
        "Name the module that the function is written in."
    )


def test_a_link_that_leads_nowhere_says_where(folder):
    (folder / "dangling.py").symlink_to("gone.py")
    assert wrong("dangling.py") == (
        "A program's file must exist. Received: program='dangling.py', a link to 'gone.py', which does not. "
        "Fix the link, or name another file."
    )


def test_what_can_be_read_only_once_is_not_a_program(folder):
    os.mkfifo(folder / "queue")
    for name in ("queue", "/dev/null"):
        assert wrong(name) == (
            f"A program must be a regular file, which each host reads anew. Received: program={name!r}, a pipe or a device. "
            "Write it to a file first."
        )


def test_of_an_open_stream_the_file_behind_it_is_the_program(folder):
    with open("train.py") as file:
        assert Program.find(f"/dev/fd/{file.fileno()}").file == (folder / "train.py").resolve()


def test_a_missing_function_offers_the_near_one(folder):
    assert wrong("loops.py:mian") == (
        "A program's function must be there at the top level of its file. Received: program='loops.py:mian'. "
        "Did you mean 'loops.py:main'?"
    )
    assert wrong("loops.py:zzz").endswith("Functions there: main, needs, decorated, guarded, fallback.")
    assert wrong("train.py:main").endswith("'train.py' has no functions.")


def test_a_function_that_cannot_be_seen_is_left_to_the_run(folder):
    (folder / "star.py").write_text("from loops import *\n")
    assert Program.find("star.py:anything").function == "anything"


def test_a_function_with_required_arguments_names_them(folder):
    assert wrong("loops.py:needs") == (
        "A program must be callable without arguments. Received: program='loops.py:needs', which needs data, steps. "
        "Give them defaults, or name a function without arguments that calls it."
    )


def test_a_class_or_a_coroutine_is_not_a_program(folder):
    assert "which is a class" in wrong("loops.py:Trainer")
    assert "which is an async function" in wrong("loops.py:later")


def test_an_empty_function_name_is_explained(folder):
    assert wrong("loops.py:") == (
        "What follows the colon must be a function's name. Received: program='loops.py:'. "
        "Write 'loops.py:main', say, or 'loops.py' alone to run all of it."
    )


def test_a_callable_with_required_arguments_names_them():
    def train(data, epochs=1): ...

    assert "train', which needs data. Give them defaults" in wrong(train)


def test_a_coroutine_function_is_not_a_program():
    async def train(): ...

    assert "which is an async function" in wrong(train)


def test_a_callable_that_cannot_be_sent_says_what_to_do():
    lock = threading.Lock()
    message = wrong(lambda: lock)
    assert message.startswith("A callable and its arguments must be sendable to another process. Received: program=")
    assert "cannot pickle" in message
    assert message.endswith("Make such objects (models, datasets, tensors, locks) inside the function.")


@pytest.mark.parametrize("target", [None, 3, ["train.py"]])
def test_anything_else_is_not_a_program(target):
    assert wrong(target).startswith("A program is a path or a callable. Received: program=")
