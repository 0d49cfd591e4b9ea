"""Separate what belongs to a warm host from what a job left there."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from emulate.cluster import HostContext
from emulate.pool import framework
from emulate.pool.defaults import Defaults
from emulate.pool.framework import Framework
from emulate.pool.interpreter import Interpreter
from emulate.pool.job import Job
from emulate.pool.modules import Modules
from emulate.pool.patches import Holder, Patches, watched
from emulate.pool.resources import Resources, end_resource_tracker
from emulate.pool.switches import Switches
from emulate.pool.upstream import runtime
from emulate.pool.variables import Variables


class HostState:
    """Restore a host's state from before a job, and find what cannot be restored.

    Args:
        context: The host's own.
    """

    def __init__(self, context: HostContext) -> None:
        self._context = context
        self._temporary = Path(os.environ["TMPDIR"])
        self._is_first = True
        self._kept: set[str] = set()
        self._reasons: list[str] = []
        self._holders: list[Holder] = []
        self.keep()

    def keep(self) -> None:
        """Take the present state as the host's own."""
        self._holders = watched(self._holders)
        self._interpreter = Interpreter()
        self._variables = Variables()
        self._switches = Switches()
        self._modules = Modules()
        self._resources = Resources()
        self._framework = Framework()
        self._defaults = Defaults(self._holders)
        self._patches = Patches(self._holders)
        self._kept |= {entry.name for entry in self._folder.iterdir()}

    @property
    def _folder(self) -> Path:
        """Return the host's own temporary folder."""
        folder = self._temporary / f"host-{self._context.host}"
        folder.mkdir(exist_ok=True)
        return folder

    def begin(self, job: Job) -> None:
        """Make everything ready for a job."""
        sys.path[:] = job.search_path
        os.chdir(self._context.path(job.cwd))
        tempfile.tempdir = None
        os.environ["TMPDIR"] = str(self._folder)
        self._interpreter.environment["TMPDIR"] = str(self._folder)
        self._framework.begin()

    def restore_early(self) -> None:
        """Undo what a job did so far; why that is not enough, `restore` says when it is over."""
        self._reasons = self._undo()

    def restore(self) -> list[str]:
        """Undo what a job did; why that is not enough, one sentence for each reason."""
        reasons = dict.fromkeys([*self._reasons, *self._undo()])
        self._reasons = []
        return list(reasons)

    def _undo(self) -> list[str]:
        reasons: list[str] = []
        for action in (
            self._variables.restore,
            self._framework.restore,
            self._interpreter.restore,
            self._switches.restore,
            self._modules.restore,
            self._defaults.restore,
            _collect,
            self._clear_folder,
            _end_resource_tracker,
            self._patches.check,
            lambda: framework.check(self._context.topology, self._context.host),
            self._resources.check,
        ):
            reasons += _tried(action)
        if self._is_first and runtime.is_up():
            # The runtime's threads, sockets and memory came with its first use, and stay.
            self._is_first = False
            gc.freeze()  # it is not garbage, and need not be looked at after every job
            self._resources = Resources()
        return reasons

    def _clear_folder(self) -> list[str]:
        for entry in self._folder.iterdir():
            if entry.name not in self._kept:
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)
        return []


def _collect() -> list[str]:
    gc.collect()
    return []


def _end_resource_tracker() -> list[str]:
    end_resource_tracker()
    return []


def _tried(action: Callable[[], list[str]]) -> list[str]:
    """Run an action that may fail: a job may leave objects that cannot even be read."""
    try:
        return action()
    except Exception as error:
        return [f"it cannot be put back as it was ({type(error).__name__}: {error})"]
