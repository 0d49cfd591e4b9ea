"""Run the loop of a host: job after job on the main thread, with a reset after each."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from emulate.cluster import HostContext, describe, note_no_route
from emulate.imports import when_imported
from emulate.pickling import to_bytes
from emulate.pool import upstream
from emulate.pool.job import DONE, IDLE, OUTPUT, Job, Renew
from emulate.pool.reset import Reset


class WarmHost:
    """Run jobs, as the entry of a pool's hosts."""

    def __call__(self, context: HostContext) -> NoReturn:
        """Run jobs until the host is ended.

        Args:
            context: The host's own.
        """
        output = context.directory / OUTPUT
        _write_both_streams_to(output)
        _use_own_temporary_folder(context)
        when_imported(upstream.CONTEXT, upstream.watch)
        context.answer(_idle())
        while True:
            job: Job | Renew = pickle.loads(context.receive())
            if isinstance(job, Renew):
                upstream.renew_collectives(job.first_key)
            else:
                os.truncate(output, 0)
                _do(job, context)
            context.answer(_idle())


def _do(job: Job, context: HostContext) -> None:
    if job.resets or job.number == 1:  # what sets up something for later jobs may change the working directory, too
        sys.path[:] = job.search_path
        os.chdir(context.path(job.cwd))
    reset = Reset() if job.resets else None
    answer = _run(job, context)
    _flush()
    context.answer(answer)
    if reset is not None:
        reset.undo()


def _idle() -> dict[str, Any]:
    return {"event": IDLE, "first_key": upstream.first_key()}


def _use_own_temporary_folder(context: HostContext) -> None:
    folder = Path(os.environ["TMPDIR"], f"host-{context.host}")
    folder.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None


def _write_both_streams_to(path: os.PathLike[str]) -> None:
    """Write both streams to one file, so that their order is kept."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number in (1, 2):
        os.dup2(fd, number)
    os.close(fd)


def _run(job: Job, context: HostContext) -> dict[str, Any]:
    try:
        function, args = _load(job)
        return {"event": DONE, "status": "returned", "pickled": _dump(function(context, *args))}
    except SystemExit as leave:
        return {"event": DONE, "status": "exited", "code": _exit_code(leave.code)}
    except BaseException as error:
        said = describe(error)
        note_no_route(said, context)
        return {"event": DONE, "status": "raised", "error": said}


def _load(job: Job) -> Any:
    try:
        return pickle.loads(job.call.read_bytes())
    except Exception as error:  # a class that cannot be made again
        raise TypeError(
            "A host must be able to unpickle a job and its arguments, as it can numbers, NumPy arrays and containers of them, "
            f"before it calls it. Received: {type(error).__name__}: {error}. Make such objects inside it."
        ) from error


def _dump(value: Any) -> bytes:
    try:
        return to_bytes(value)
    except Exception as error:  # objects refuse in many ways
        raise TypeError(
            f"What a job returns must be sendable to another process. Received: a {type(value).__name__}, which is not "
            f"({type(error).__name__}: {error}). Return numbers, NumPy arrays and containers of them."
        ) from error


def _exit_code(code: Any) -> int:
    """Return the exit code of a Python program that ends with `sys.exit(code)`."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
