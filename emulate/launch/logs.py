"""Show the logs of a job's hosts as they grow: `host-0.log`, `host-1.log` in the job's folder."""

from __future__ import annotations

import sys
from pathlib import Path

PATTERN = "host-*.log"


def log_file(folder: Path, host: int | str) -> Path:
    """Return the log file of a host."""
    return folder / PATTERN.replace("*", str(host))


class JobLogs:
    """Relay what hosts write, line by line, with the name of the host.

    Args:
        folder: The job's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def relay(self, *, is_last: bool = False) -> None:
        """Print the lines that are new. The last time also one without an end."""
        for file in sorted(self._folder.glob(PATTERN), key=lambda path: (len(path.name), path.name)):
            with file.open("rb") as log:
                log.seek(self._read.get(file, 0))
                text = log.read()
            end = len(text) if is_last else text.rfind(b"\n") + 1
            self._read[file] = self._read.get(file, 0) + end
            host = file.stem.removeprefix("host-")
            for line in text[:end].decode("utf-8", "replace").splitlines():
                print(f"[host {host}] {line}")
        sys.stdout.flush()
