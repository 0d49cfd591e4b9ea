"""A virtual environment in the folder for temporary files: a package with its pinned versions, and this gpudist."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from benchmarks.compat.environment import interpreter
from benchmarks.outside.cases import Case

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(tempfile.gettempdir()) / "gpudist-outside"
_VERSIONS = """
import importlib.metadata, importlib.util, json, sys
names = [name for name in ("tensorflow", "keras", "tf_keras") if importlib.util.find_spec(name)]
print(json.dumps({name: importlib.metadata.version(name) for name in (*names, sys.argv[1])}))
"""


def make(case: Case) -> Path:
    """Return the folder with the commands of a case's environment, with everything installed.

    Args:
        case: Names the requirements.

    Returns:
        The folder `bin`.
    """
    folder = FOLDER / case.environment
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    wanted = json.dumps([str(ROOT), (ROOT / "pyproject.toml").read_text(), case.python, case.requirements.read_text()])
    if not (stamp.is_file() and stamp.read_text() == wanted):
        if not python.exists():
            subprocess.run([interpreter(case.python), "-m", "venv", str(folder)], check=True)
        # Without bytecode every import of TensorFlow takes 5 s instead of 2.
        left_out = ("PYTHONDONTWRITEBYTECODE", "PIP_NO_COMPILE")
        variables = {name: value for name, value in os.environ.items() if name not in left_out}
        pip = [str(python), "-m", "pip", "install", "--quiet", "--compile"]
        subprocess.run([*pip, "-r", str(case.requirements), "--editable", str(ROOT)], check=True, env=variables)
        stamp.write_text(wanted)
    return folder / "bin"


def versions(case: Case, commands: Path) -> dict[str, str]:
    """Return the versions of TensorFlow, of each Keras and of the package."""
    command = [str(commands / "python"), "-c", _VERSIONS, case.package]
    return dict(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
