"""TensorFlow and Keras are checked by the modules that `import` finds; what must be installed is said in one sentence."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpudist_core
from emulate.cluster import Preload
from emulate.errors import UsageError
from gpudist_core.errors import Unavailable
from gpudist_core.installed import installed_version, release, unsupported

ROOT = Path(__file__).resolve().parents[2]


def install(folder: Path, module: str, version: str, *distributions: str) -> None:
    """Write a module, and the metadata of the distributions that it came with."""
    (folder / module).mkdir(exist_ok=True)
    (folder / module / "__init__.py").write_text(f"__version__ = {version!r}")
    for distribution in distributions:
        (folder / f"{distribution}.dist-info").mkdir()
        (folder / f"{distribution}.dist-info" / "top_level.txt").write_text(f"{module}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all there is to import from."""
    for module in ("tensorflow", "keras"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


@pytest.mark.parametrize(
    ("version", "distributions"),
    [
        ("2.21.0", ["tensorflow-2.21.0"]),
        ("2.21.0", ["tensorflow_cpu-2.21.0"]),
        ("2.22.0-dev20261120", ["tf_nightly-2.22.0-dev20261120"]),
        ("2.20.0+nv26.1", ["nvidia_tensorflow-2.20.0+nv26.1"]),
        ("2.20.0", []),  # a vendor's build without metadata
        ("2.22.0", ["tensorflow-2.21.0", "tf_nightly-2.22.0"]),  # both in one folder: what was written last is there
    ],
)
def test_any_distribution_of_tensorflow_is_one(site: Path, version: str, distributions: list[str]) -> None:
    install(site, "tensorflow", version, *distributions)
    install(site, "keras", "3.8.0", "keras-3.8.0")
    assert installed_version("tensorflow") == version
    assert unsupported() is None


def test_a_file_of_the_user_or_what_an_uninstall_left_is_no_tensorflow(site: Path) -> None:
    (site / "tensorflow.py").write_text("raise SystemExit('this is the program')")
    (site / "keras").mkdir()
    assert (installed_version("tensorflow"), installed_version("keras")) == (None, None)


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({}, r"TensorFlow 2\.16 or newer must be installed\. Received: tensorflow=None, .*'gpudist\[tensorflow\]'"),
        ({"tensorflow": "2.15.1", "keras": "3.8.0"}, r"TensorFlow 2\.16 .* Received: tensorflow='2\.15\.1'"),
        ({"tensorflow": "2.18.0", "keras": "3.7.0"}, r"Keras 3\.8 .* Received: keras='3\.7\.0', .*'keras>=3\.8'"),
        ({"tensorflow": "2.18.0"}, r"Keras 3\.8 or newer must be installed\. Received: keras=None"),
    ],
)
def test_what_must_be_installed_is_said_before_anything_starts(site: Path, versions: dict[str, str], message: str) -> None:
    for module, version in versions.items():
        install(site, module, version, f"{module}-{version}")
    with pytest.raises(UsageError, match=message):
        Preload()
    with pytest.raises(Unavailable, match=message):
        gpudist_core.__getattr__("make_strategy")
    assert gpudist_core.__getattr__("UsageError")


def test_programs_of_tensorflow_2_15_are_verified_but_gpudist_core_needs_keras_3(site: Path) -> None:
    for module, version in (("tensorflow", "2.15.1"), ("keras", "2.15.0")):
        install(site, module, version, f"{module}-{version}")
    assert unsupported(with_keras_2=True) is None
    with pytest.raises(Unavailable, match=r"TensorFlow 2\.16 .* Received: tensorflow='2\.15\.1'"):
        gpudist_core.__getattr__("distributed")


def test_keras_2_is_the_package_keras_in_tensorflow_2_15(site: Path) -> None:
    install(site, "keras", "2.15.0", "keras-2.15.0")
    code = "from emulate import upstream; print(*upstream.LEGACY_KERAS, upstream.KERAS_3)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["keras.src", "tf_keras.src", "no_keras_3.src"]


@pytest.mark.parametrize(("version", "numbers"), [("2.22.0-dev20261120", (2, 22)), ("3.10.1", (3, 10)), ("head", (0, 0))])
def test_a_release_has_two_numbers(version: str, numbers: tuple[int, int]) -> None:
    assert release(version) == numbers


@pytest.fixture
def without_tensorflow(tmp_path: Path) -> dict[str, str]:
    """The variables of an environment that has everything but TensorFlow."""
    spec = importlib.util.find_spec("tensorflow")
    assert spec is not None
    assert spec.origin is not None
    for entry in Path(spec.origin).parents[1].iterdir():
        if not entry.name.startswith(("tensorflow", "keras", "tf_keras", "__editable__")) and entry.suffix != ".pth":
            (tmp_path / entry.name).symlink_to(entry)
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}


@pytest.mark.parametrize("command", [["verify", "train.py"], ["run", "train.py"]])
def test_the_command_says_it_and_exits_with_2(command: list[str], without_tensorflow: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    result = subprocess.run(
        [sys.executable, "-S", "-m", "emulate", *command],
        env=without_tensorflow, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("gpudist: TensorFlow 2.16 or newer must be installed. Received: tensorflow=None, ")
    assert result.stderr.count("\n") == 1


def test_the_plugin_says_it_for_a_test_of_a_topology(without_tensorflow: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n@pytest.mark.topology('1x2')\ndef test_it(strategy):\n    pass\n\ndef test_other():\n    pass\n"
    )
    plugins = ["-p", "emulate.pytest_plugin.entry", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [sys.executable, "-S", "-m", "pytest", *plugins, "test_it.py"],
        env={**without_tensorflow, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "TensorFlow 2.16 or newer must be installed. Received: tensorflow=None" in result.stdout, result.stdout
    assert "1 passed" in result.stdout
