"""Read the Python stack of a host, requested by a signal so that it works while the interpreter's lock is held."""

from __future__ import annotations

import faulthandler
import re
import signal
from pathlib import Path

SIGNAL = int(getattr(signal, "SIGRTMAX", signal.SIGTERM)) - 2  # programs have no business with it, unlike SIGUSR1
_FILE = "stack.txt"
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
_OURS = str(Path(__file__).resolve().parents[1]) + "/"
_MACHINERY = ("<frozen runpy>", "<string>", "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")


def answer_signals(directory: Path) -> None:
    """Write every thread's stack to the host's folder whenever the signal arrives. Call it in a host."""
    file = (directory / _FILE).open("w", encoding="utf-8")
    _open_files.append(file)  # faulthandler keeps only the descriptor
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    faulthandler.enable(file=file)


_open_files: list[object] = []
_NOT_IN_THE_PROGRAM = "  not in the program: it has ended there, or has not begun"
_NOT_IN_PYTHON = "  in a thread that runs no Python"


def read(directory: Path, since: int) -> str:
    """Return what was written since an earlier size of the file."""
    try:
        with (directory / _FILE).open("rb") as file:
            file.seek(since)
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def size(directory: Path) -> int:
    """Return the present size of the file."""
    path = directory / _FILE
    return path.stat().st_size if path.exists() else 0


def main_thread(dump: str) -> str:
    """Return the stack of the thread that runs the program, outermost call first, without frames of gpudist.

    faulthandler writes the innermost call first and no source lines; they are added where the file can be read.
    """
    blocks = _threads(dump)
    ours = [block for block in blocks if "emulate/cluster/host.py" in block]
    return _shown((ours or blocks)[0]) or dump.strip()


def of_crash(directory: Path) -> str:
    """Return the error that crashed a host, and the stack of its thread; empty without a crash.

    Args:
        directory: The host's folder.

    Returns:
        `Segmentation fault` (Python's own words) and, below it, calls as `main_thread` gives them.
    """
    _, said, dump = read(directory, 0).rpartition("Fatal Python error: ")
    if not said:
        return ""
    reason, _, rest = dump.partition("\n")
    met = [block for block in _threads(rest) if block.startswith("Current thread")]
    return f"{reason}\n{(_shown(met[0]) if met else '') or _NOT_IN_PYTHON}"


def _threads(dump: str) -> list[str]:
    return re.split(r"\n(?=(?:Current thread|Thread) 0x)", dump.strip())


def _shown(block: str) -> str:
    """Return the frames of one thread; empty if there are none."""
    frames = [match for line in reversed(block.splitlines()) if (match := _FRAME.fullmatch(line))]
    shown = [_show(match) for match in frames if not _is_ours(match["file"])]
    return "\n".join(shown) if shown else _NOT_IN_THE_PROGRAM if frames else ""


def _is_ours(file: str) -> bool:
    return file in _MACHINERY or file.startswith(_OURS)


def _show(match: re.Match[str]) -> str:
    import linecache

    source = linecache.getline(match["file"], int(match["line"])).strip()
    text = f'  File "{match["file"]}", line {match["line"]}, in {match["function"]}'
    return f"{text}\n    {source}" if source else text
