"""The built wheel, installed where nothing of this repository is in reach, serves the example project of an outsider."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "fixtures" / "outsider"
OURS = ("gpudist", "_gpudist", "__editable__", "emulate")  # an editable install keeps the data of emulate/examples there
LIMIT = 580
pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that knows nothing of the pytest around it, of this repository, or of GPUs."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in hidden and not name.startswith("PYTEST_")}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip wheel` makes of this repository, with the hatchling that is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir")
    done = run(sys.executable, "-m", "pip", "wheel", *options, folder, ROOT, cwd=folder)
    assert done.returncode == 0, done.stderr
    [made] = folder.glob("gpudist-*.whl")
    return made


@dataclass
class Outside:
    """An environment of its own, and a folder that is not ours."""

    bin: Path
    folder: Path

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run what is installed there."""
        return run(self.bin / str(command[0]), *command[1:], cwd=self.folder)


@pytest.fixture(scope="module")
def outside(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Outside:
    """What the wheel needs is there as links to what is installed here; gpudist itself comes from the wheel alone."""
    folder = tmp_path_factory.mktemp("outside")
    place = folder / "venv"
    assert run(sys.executable, "-m", "venv", "--without-pip", place, cwd=folder).returncode == 0
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(OURS) and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    options = ("--quiet", "--no-deps", "--no-index", "--no-compile")
    done = run(sys.executable, "-m", "pip", "--python", place / "bin/python", "install", *options, wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "elsewhere").mkdir()
    return Outside(place / "bin", folder / "elsewhere")


def test_the_wheel_has_the_packages_their_types_and_the_entry_points_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [about] = [name for name in names if name.endswith(".dist-info/METADATA")]
        entry_points = archive.read(about.replace("METADATA", "entry_points.txt")).decode()
        metadata = HeaderParser().parsestr(archive.read(about).decode())
    assert {name.partition("/")[0] for name in names} == {"emulate", "gpudist_core", about.partition("/")[0]}
    assert {"emulate/py.typed", "gpudist_core/py.typed", "emulate/report/html/verdict.html.jinja"} <= set(names)
    apart = (about.partition("/")[0], "emulate/examples/")  # what stands in the latter: tests/emulate/cli/test_demo.py
    ours = [name for name in names if not name.startswith(apart)]
    assert {Path(name).suffix for name in ours} <= {".py", ".typed", ".jinja", ".md", ".toml", ".csv"}
    assert {
        str(path.relative_to(ROOT)) for package in ("emulate", "gpudist_core") for path in (ROOT / package).rglob("*.py")
    } <= {*names}
    assert "[console_scripts]\ngpudist = emulate.cli:main" in entry_points
    assert "[pytest11]\ngpudist = emulate.pytest_plugin.entry" in entry_points
    assert metadata["Requires-Python"] == "<3.14,>=3.10"
    assert metadata["License-Expression"] == "Apache-2.0 AND BSD-2-Clause AND CC-BY-4.0"


def test_the_installed_packages_are_those_of_the_wheel(outside: Outside) -> None:
    script = "import emulate, gpudist_core; print(emulate.__file__); print(gpudist_core.__file__)"
    done = outside.run("python", "-c", script)
    assert done.returncode == 0, done.stderr
    assert all(Path(line).is_relative_to(outside.bin.parent) for line in done.stdout.split())
    assert str(ROOT) not in outside.run("python", "-c", "import sys; print(sys.path)").stdout


def test_the_command_works_from_the_wheel(outside: Outside) -> None:
    assert outside.run("gpudist", "--version").stdout.startswith("gpudist 0.")
    assert "loss-scaling" in outside.run("gpudist", "causes").stdout


def test_the_demo_works_from_the_wheel_and_leaves_nothing(outside: Outside) -> None:
    done = outside.run("gpudist", "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1. loss-scaling" in done.stdout
    assert not list(outside.folder.iterdir())


def test_the_example_passes_emulated_and_says_so(outside: Outside) -> None:
    done = outside.run("python", "-m", "pytest", "-q", EXAMPLE, "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed" in done.stdout
    assert "tests ran on emulated devices" in done.stdout
    assert not list(outside.folder.iterdir())


def test_a_run_that_is_to_be_on_gpus_fails_where_there_are_none_and_names_what_was_skipped(outside: Outside) -> None:
    """What ci/gpu.sh rests on: nothing falls back in silence."""
    options = ("-p", "no:cacheprovider", "--gpudist-device", "gpu", "--gpudist-strict", "-k", "mean")
    done = outside.run("python", "-m", "pytest", "-q", EXAMPLE, *options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "4 skipped" in done.stdout
    assert "--device gpu needs GPUs that TensorFlow can use. Received: device='gpu' for 1x1 (1 device), and" in done.stdout
    assert "--gpudist-strict: the run fails, because skipped: " in done.stdout


def test_wrong_training_fails_the_outsider_s_test_with_the_report(outside: Outside) -> None:
    program = ROOT / "fixtures" / "bugs" / "loss_scaling.py"
    test = outside.folder / "test_wrong.py"
    test.write_text(
        f"import emulate\ndef test_it():\n    emulate.assert_equivalent({str(program)!r}, topology='1x2', steps=2)\n"
    )
    done = outside.run("python", "-m", "pytest", "-q", test, "-p", "no:cacheprovider")
    test.unlink()
    assert done.returncode == 1
    assert "1. loss-scaling" in done.stdout
