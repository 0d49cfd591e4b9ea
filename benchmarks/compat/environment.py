"""The virtual environment of a pair, made once and made again when what belongs into it changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.compat.pairs import Pair

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".compat"
_VERSIONS = """
import json, platform, tensorflow, keras, numpy, tf_keras
modules = {"tensorflow": tensorflow, "keras": keras, "tf_keras": tf_keras, "numpy": numpy}
print(json.dumps({"python": platform.python_version(), **{name: module.__version__ for name, module in modules.items()}}))
"""


def make(pair: Pair) -> Path:
    """Return the Python of a pair's environment, with everything installed.

    Args:
        pair: What to install.

    Returns:
        The path of its interpreter.

    Raises:
        SystemExit: When this machine lacks that Python; the text names it.
    """
    python = FOLDER / pair.environment / "bin" / "python"
    stamp, wanted = FOLDER / pair.environment / "installed.json", _wanted(pair)
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    if not python.exists():
        subprocess.run([interpreter(pair.python), "-m", "venv", str(FOLDER / pair.environment)], check=True)
    _pip(python, "--upgrade", "pip>=25.1")  # the first that reads dependency groups
    _pip(python, "--upgrade", *pair.requirements, "--editable", ".", "--group", "test-tools")
    stamp.write_text(wanted)
    return python


def versions(python: Path) -> dict[str, str]:
    """Return the versions that an environment has."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    said = subprocess.run([str(python), "-c", _VERSIONS], capture_output=True, text=True, check=True, env=environment).stdout
    return dict(json.loads(said.splitlines()[-1]))


def _wanted(pair: Pair) -> str:
    return json.dumps([pair.python, *pair.requirements, (ROOT / "pyproject.toml").read_text()])


def _pip(python: Path, *args: str) -> None:
    # Without bytecode every import of TensorFlow takes 5 s instead of 2.
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONDONTWRITEBYTECODE", "PIP_NO_COMPILE")}
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--compile", *args], check=True, cwd=ROOT, env=environment)


def interpreter(version: str) -> str:
    found = next((path for path in _candidates(version) if _is_of(path, version)), None)
    if found is None:
        raise SystemExit(
            f"Python {version} must be installed. Received: no python{version} on PATH and none of pyenv's. Install it."
        )
    return found


def _candidates(version: str) -> Iterator[str]:
    if on_path := shutil.which(f"python{version}"):
        yield on_path
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    yield from map(str, sorted(of_pyenv.glob(f"{version}.*/bin/python")))


def _is_of(path: str, version: str) -> bool:
    """Return whether it starts and is that Python; a shim of pyenv may not."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    result = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
    return result.stdout.strip() == version
