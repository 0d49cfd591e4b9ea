"""Share one pre-loaded parent among the clusters of a process: each needs seconds to import TensorFlow."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from emulate.cluster.environ import is_read_at_import
from emulate.cluster.parent import Preload
from emulate.program import working_directory

_OF_ONE_TEST = "PYTEST_CURRENT_TEST"
_lock = threading.Lock()
_shared: Preload | None = None
_started_with: dict[str, str] = {}


def share_preload(environment: Mapping[str, str]) -> tuple[Preload, dict[str, str]]:
    """Return the pre-loaded parent of this process. It ends with this process.

    Another one is started where a host must not have what the first one was started with.

    Args:
        environment: Environment variables for the hosts, added to those of this process.

    Returns:
        The parent, and the environment variables that its hosts get besides its own.

    Raises:
        UsageError: If the working directory is gone, or no supported TensorFlow is installed.
        Unavailable: If no parent can be started on this system.
    """
    global _shared, _started_with
    wanted = {**os.environ, **environment}
    with _lock:
        if _shared is None or not _shared.is_usable or not _fits(wanted):
            early = {name: value for name, value in environment.items() if _is_read_at_start(name)}
            _shared, _started_with = Preload(environment=early), {**os.environ, **early}
        working_directory()
        return _shared, {name: value for name, value in wanted.items() if _started_with.get(name) != value}


def _fits(wanted: Mapping[str, str]) -> bool:
    """Return whether hosts can have this environment: nothing vanished, and nothing changed that was read at the start."""
    early = {name for name in (*wanted, *_started_with) if _is_read_at_start(name)}
    is_read_otherwise = any(wanted.get(name) != _started_with.get(name) for name in early)
    return not is_read_otherwise and not (_started_with.keys() - wanted.keys() - {_OF_ONE_TEST})


def _is_read_at_start(name: str) -> bool:
    return is_read_at_import(name) or name.startswith(("PYTHON", "LD_"))
