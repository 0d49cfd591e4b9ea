"""Control the pre-loaded parent from the supervisor: start it, let it fork clusters, end it.

Clusters of a process share one, as each needs seconds to import TensorFlow. It has the scratch folder of its supervisor; those
of supervisors that were killed before they could clean up are removed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import final

from emulate.cluster.channel import CONTROL, Channel
from emulate.cluster.environ import is_read_at_import
from emulate.cluster.gpus import GpuHold
from emulate.cluster.plan import ClusterPlan, ForkGuard, Order
from emulate.cluster.preload import Hello
from emulate.cluster.supervision import RunningCluster
from emulate.cluster.views import remove_tree
from emulate.devices import check_tensorflow
from emulate.errors import Unavailable
from emulate.pickling import to_bytes
from emulate.program import working_directory

_START = "import sys; sys.path[:] = sys.argv[2:]; from emulate.cluster.preload import main; main(int(sys.argv[1]))"
_ROOT = str(Path(__file__).resolve().parents[2])
_PATIENCE = 15.0


@final
class Preload(AbstractContextManager["Preload"]):
    """Control the pre-loaded parent process. It starts at once and imports in the background.

    Args:
        environment: Set on top of this process's own. What TensorFlow reads at import must be given here.
        imports: False for one that has not imported TensorFlow, whose hosts do so themselves.
        modules: What to import besides, so that hosts need not; what cannot be found is left to them.

    Attributes:
        directory: A scratch folder, the place for the folders of runs: it is deleted with the process, even when
            this process is killed (when all are killed at once, the next one that is made on this machine does it).

    Raises:
        UsageError: When the working directory is gone, and where no supported TensorFlow is installed.
        Unavailable: On a system without what this rests on, or where no interpreter can be started.

    Example:
        with Preload() as preload, preload.launch(plan) as cluster:
            while not cluster.is_over:
                cluster.events(timeout=1)
    """

    def __init__(
        self, *, environment: Mapping[str, str] | None = None, imports: bool = True, modules: tuple[str, ...] = ()
    ) -> None:
        if sys.platform != "linux":
            raise Unavailable(
                f"Hosts are emulated on Linux only. Received: sys.platform={sys.platform!r}. Use a Linux machine or container."
            )
        check_tensorflow()
        working_directory()  # relative entries of sys.path begin there
        self.imports = imports
        self.directory, held = make_scratch()
        self._fork_guard = ForkGuard()
        self._lock = threading.Lock()
        self._control, theirs = Channel.pair()
        try:
            self._process = self._start(theirs, {**os.environ, **(environment or {})})
        except OSError as error:
            self._control.close()
            _clean_up(self.directory, held)
            raise Unavailable(
                "Hosts are forked from a Python process of their own, which must be able to start. Received: "
                f"sys.executable={sys.executable!r} ({error.strerror}). Use an interpreter that this user may execute."
            ) from error
        finally:
            theirs.close()
        self._finalizer = weakref.finalize(self, _end, self._fork_guard, self._control, self._process, self.directory, held)
        self._control.send(CONTROL, pickle.dumps(Hello(os.getpid(), self.directory, imports, modules)))

    def _start(self, theirs: Channel, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        environment.pop("TF_CONFIG", None)
        # With the script's folder last: TensorFlow must not import a timeit.py beside the script.
        beside = os.path.dirname(os.path.realpath(getattr(sys.modules["__main__"], "__file__", None) or ""))
        entries = dict.fromkeys([*filter(None, sys.path), _ROOT])
        search_path = sorted(entries, key=lambda entry: os.path.realpath(entry) == beside)
        with (self.directory / "preload.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), *search_path],
                env=environment,
                cwd="/",  # a keras.py in the working directory is the program's affair
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the supervisor, which ends all in good order
            )

    def launch(self, plan: ClusterPlan) -> RunningCluster:
        """Start a cluster; from any thread. What prevents it is raised by the cluster's `events`.

        On GPUs, which serve one cluster at a time, this waits until they are free.

        Args:
            plan: What to run.

        Returns:
            The cluster, to be left or ended by the caller.

        Raises:
            UsageError: When another process made this one, or the working directory is gone.
            Unavailable: When this machine's GPUs do not suffice, or are not free in time.
        """
        self._fork_guard.check("A pre-loaded parent")

        entry = to_bytes(plan.entry)
        gpus = GpuHold.take(plan) if plan.device == "gpu" else None
        order = Order(
            plan=plan.for_keeper(),
            entry=entry,
            search_path=tuple(sys.path),
            cwd=plan.cwd or working_directory(),
            supervisor=os.getpid(),
            gpus=gpus.shares if gpus else (),
        )
        cluster = RunningCluster(plan, self.directory / "preload.log", gpus)
        cluster.start(self._hand_over, order)
        return cluster

    def _hand_over(self, keeper_end: int) -> None:
        with self._lock:
            self._control.send(CONTROL, b"launch")
            self._control.send_fds([keeper_end])

    @property
    def is_usable(self) -> bool:
        """Return whether this process made it, it runs, and its folder is there."""
        return self._fork_guard.is_here and self._process.poll() is None and self.directory.exists()

    def close(self) -> None:
        """End the process, every cluster it forked, and delete the scratch folder; what another process made stays."""
        self._finalizer()

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(fork_guard: ForkGuard, control: Channel, process: subprocess.Popen[bytes], directory: Path, held: int | None) -> None:
    if not fork_guard.is_here:  # a fork of the supervisor that collects garbage, or leaves
        return
    control.close()
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        _clean_up(directory, held)


def _clean_up(directory: Path, held: int | None) -> None:
    with contextlib.suppress(OSError):
        remove_tree(directory)
    if held is not None:
        os.close(held)


_OF_ONE_TEST = "PYTEST_CURRENT_TEST"
_sharing = threading.Lock()
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
    with _sharing:
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


_PREFIX = "gpudist-"
_HELD = "held"  # locked as long as the supervisor is there; the kernel unlocks it, however that one ends


def make_scratch() -> tuple[Path, int | None]:
    """Make a scratch folder, and remove those that nobody holds any more.

    Returns:
        The folder, and the descriptor that holds it until it is closed; None where the file system has no locks, and nobody
        can tell whether it is held.

    Raises:
        OSError: When there is no place for it.
    """
    with os.scandir(tempfile.gettempdir()) as entries:
        folders = [Path(entry) for entry in entries if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False)]
    for other in folders:
        with contextlib.suppress(OSError):  # another user's, one that is being made, or one that is held
            os.close(_locked(other / _HELD))
            remove_tree(other)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    made = folder / "made"
    try:
        held = _locked(made, os.O_CREAT)
    except OSError:
        return folder, None
    made.rename(folder / _HELD)  # what has this name is locked, or abandoned
    return folder, held


def _locked(path: Path, flags: int = 0) -> int:
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd
