"""Run the loop of a host: job after job on the main thread, with a reset after each.

The reset undoes what pytest's users expect to be undone between tests.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from emulate.cluster import upstream
from emulate.cluster.context import HostContext
from emulate.cluster.host import describe, exit_code, note_no_route, sendable
from emulate.imports import when_imported


@dataclass(frozen=True)
class Job:
    """Describe one job, as each host of a cluster gets it.

    Attributes:
        number: Counts the jobs of the cluster.
        call: A file with the pickled function and its arguments.
        cwd: The working directory of the caller.
        search_path: Where the caller imports from.
        resets: Whether the host undoes afterwards what `Reset` undoes. Otherwise the function takes care of it.
    """

    number: int
    call: Path
    cwd: Path
    search_path: tuple[str, ...]
    resets: bool


@dataclass(frozen=True)
class Renew:
    """Ask for new collectives for the next job. It is sent in place of a job.

    Attributes:
        first_key: From where on the next strategy of several hosts counts its groups: the same on every host.
    """

    first_key: int


# Events of a warm host, beside those that its job sends.
JOB_DONE = "job-done"  # status, pickled, error, code
IDLE = "job-idle"  # first_key, from where on the host's next strategy counts
NEEDS_PROCESS = "needs-fresh-process"  # the job sets what TensorFlow has read when it was imported
OUTPUT = "output"  # the file in a host's folder that has both its streams


class WarmHost:
    """Run jobs, as the entry of a pool's hosts."""

    def __call__(self, context: HostContext) -> NoReturn:
        """Run jobs until the host is ended.

        Args:
            context: The host's own.
        """
        output = context.directory / OUTPUT
        # Both streams in one file keep their order.
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for number in (1, 2):
            os.dup2(fd, number)
        os.close(fd)
        folder = Path(os.environ["TMPDIR"], f"host-{context.host}")
        folder.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = None
        when_imported(upstream.CONTEXT, upstream.watch)
        while True:
            context.answer({"event": IDLE, "first_key": upstream.first_key()})
            job: Job | Renew = pickle.loads(context.receive())
            if isinstance(job, Renew):
                upstream.renew_collectives(job.first_key)
                continue
            os.truncate(output, 0)
            if job.resets or job.number == 1:  # what sets up something for later jobs may change the working directory, too
                sys.path[:] = job.search_path
                os.chdir(context.path(job.cwd))
            reset = Reset() if job.resets else None
            answer = _run(job, context)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            context.answer(answer)
            if reset is not None:
                reset.undo()


def _run(job: Job, context: HostContext) -> dict[str, Any]:
    try:
        try:
            function, args = pickle.loads(job.call.read_bytes())
        except Exception as error:  # a class that cannot be made again
            raise TypeError(
                "A host must be able to unpickle a job and its arguments, as it can numbers, NumPy arrays and containers of "
                f"them, before it calls it. Received: {type(error).__name__}: {error}. Make such objects inside it."
            ) from error
        return {"event": JOB_DONE, "status": "returned", "pickled": sendable(function(context, *args), "a job returns")}
    except SystemExit as leave:
        return {"event": JOB_DONE, "status": "exited", "code": exit_code(leave.code)}
    except BaseException as error:
        said = describe(error)
        note_no_route(said, context)
        return {"event": JOB_DONE, "status": "raised", "error": said}


class Reset:
    """Hold the environment, the folders and Keras's dtype policy of a host at one moment, and restore them later."""

    def __init__(self) -> None:
        self._environ = os.environ
        self._environment = dict(os.environ)
        self._cwd = os.getcwd()
        self._temporary = Path(os.environ["TMPDIR"])
        self._kept = self._files()
        self._policy = _dtype_policy()

    def undo(self) -> None:
        """Restore them, forget seeds, clear Keras's session, and empty the folder for temporary files."""
        os.environ = self._environ  # noqa: B003 - a job may have assigned another mapping
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        for name, value in self._environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        os.chdir(self._cwd)
        tempfile.tempdir = None
        forget_seeds()
        if (keras := upstream.imported_keras_3()) is not None:
            keras.utils.clear_session()
        upstream.clear_legacy_session()
        if self._policy is not None and _dtype_policy() != self._policy:
            sys.modules["keras"].config.set_dtype_policy(self._policy)
        for entry in self._temporary.iterdir():  # last: Keras's session may have held files of it open
            if entry.name in self._kept:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Leave alone, in a later `undo`, what the block changes in the environment and in the folder for temporary files."""
        before = dict(os.environ)
        files = self._files()
        try:
            yield
        finally:
            self._kept |= self._files() - files
            for name in before.keys() | os.environ.keys():
                value = os.environ.get(name)
                if value is None:
                    self._environment.pop(name, None)
                elif value != before.get(name):
                    self._environment[name] = value

    def _files(self) -> set[str]:
        return {entry.name for entry in self._temporary.iterdir()}


def forget_seeds() -> None:
    """Reset the generators of Python, NumPy and TensorFlow to the unseeded state after a start."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (tensorflow := sys.modules.get("tensorflow")) is not None:
        tensorflow.random.set_seed(None)
        upstream.forget_generator()


def _dtype_policy() -> Any:
    """Return Keras's global dtype policy, which is part of the session that is cleared; None before Keras is imported."""
    keras = upstream.imported_keras_3()
    return None if keras is None else keras.config.dtype_policy()
