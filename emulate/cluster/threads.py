"""Find out what the threads of a host wait for, from their Python stacks and the kernel.

A stack is requested by a signal, so that it is read while the interpreter's lock is held.
"""

from __future__ import annotations

import faulthandler
import linecache
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
_BLOCK = re.compile(r"\n(?=(?:Current thread|Thread) 0x)")
_OURS = str(Path(__file__).resolve().parents[1]) + "/"
_MAIN = "emulate/cluster/host.py"
_TENSORFLOW = ("/tensorflow/", "/keras/", "/tf_keras/")
_DATA = ("/data/ops/iterator_ops.py", "/ops/gen_dataset_ops.py", "/distribute/input_lib.py", "/data/ops/multi_device_iterator")
_PIPELINE = "/gpudist_core/pipelines/"
_COORDINATOR = "/distribute/coordinator/"
_GENERATORS = ("/ops/script_ops.py", "/data/ops/from_generator_op.py")
_THREADING = "/threading.py"
_LOCKS = (_THREADING, "/queue.py", "/multiprocessing/", "/concurrent/futures/", "/_weakrefset.py")
_POOL = "/multiprocessing/pool.py"
_OPERATION = re.compile(r"/gen_\w+_ops\.py$")
_LOCK_LINE = re.compile(
    r"\.acquire\(|\.join\(|\.wait\(|\.get\(|\.result\(|^(?:async )?with .*(?:lock|mutex|cond|sem)", re.IGNORECASE
)
_TAKES_A_LOCK = re.compile(r"\.acquire\(|^(?:async )?with ")
_TIMED = re.compile(r"\btimeout\b|\.(?:join|wait|result|get)\(\s*\.?\d")
_MAY_BE_TIMED = re.compile(r"\.(?:join|wait|result|exception)\(\s*[^\s)]|\.(?:get|acquire|wait_for)\(\s*(?:\*|[^,]+,\s*[^\s)])")
_IN_THREADING = re.compile(
    r"(?:gotit = )?waiter\.acquire\((?P<wait>True, timeout)?\)|self\._wait_for_tstate_lock\((?P<join>timeout=.+)?\)"
)
_HOUSEKEEPERS = ("/tqdm/_monitor.py", "/tensorboard/summary/writer/")  # look around for ever, and give nobody anything
_LINES_OF_A_CALL = 12
_SLEEP_LINE = re.compile(r"\bsleep\(|signal\.pause\(|sigwait")

DATA, LOCK, TENSORFLOW, SLEEP, OTHER = "data", "lock", "tensorflow", "sleep", "other"


@dataclass(frozen=True)
class Frame:
    """Describe one call."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """Return the source line, if the file can be read."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def call(self) -> str:
        """Return the source line and the following lines until the brackets close, if the file can be read."""
        text = ""
        for number in range(self.line, self.line + _LINES_OF_A_CALL):
            text += linecache.getline(self.file, number)
            if text.count("(") <= text.count(")"):
                break
        return text.strip()

    @property
    def is_of(self) -> str:
        """Return `tensorflow` (or Keras), `ours`, `library` or `program`."""
        if self.file.startswith(_OURS):
            return "ours"
        if any(part in self.file for part in _TENSORFLOW):
            return "tensorflow"
        library_paths = ("/lib/python", "site-packages", "<frozen", "<string>")
        return "library" if any(part in self.file for part in library_paths) else "program"

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Thread:
    """Describe one thread of a host.

    Attributes:
        frames: Its calls, the innermost first.
    """

    frames: tuple[Frame, ...]

    @property
    def is_main(self) -> bool:
        """Return whether it runs the program."""
        return any(frame.file.endswith(_MAIN) for frame in self.frames)

    @property
    def is_ours(self) -> bool:
        """Return whether gpudist started it. Wrappers of gpudist around TensorFlow's functions also occur in other threads."""
        begun_by = next((frame.is_of for frame in reversed(self.frames) if frame.is_of != "library"), "library")
        return not self.is_main and begun_by == "ours"

    @property
    def place(self) -> Frame | None:
        """Return the innermost call of the program itself."""
        return next((frame for frame in self.frames if frame.is_of == "program"), None)

    @property
    def feeds(self) -> bool:
        """Return whether TensorFlow runs the program's own code in it, as with a generator of data."""
        return not self.is_main and any(part in frame.file for frame in self.frames for part in _GENERATORS)

    @property
    def operation(self) -> str | None:
        """Return the TensorFlow operation that it is in, if Python knows it: `IteratorGetNext`."""
        name = next((frame.function for frame in self.frames if _OPERATION.search(frame.file)), None)
        return None if name is None else "".join(part.capitalize() for part in name.removesuffix("_eager_fallback").split("_"))

    def is_in_pool(self, function: str) -> bool:
        """Return whether it is in this function of Python's `multiprocessing.pool`."""
        return any(frame.file.endswith(_POOL) and frame.function == function for frame in self.frames)

    @property
    def has_waits_with_an_end(self) -> bool:
        """Return whether it waits for a limited time and then continues by itself. In doubt it does.

        Python's `threading` has lines of its own for a wait without an end. Any other wait is what its call says.
        """
        if not self.frames or any(part in frame.file for frame in self.frames for part in _HOUSEKEEPERS):
            return False
        place = self.place
        if place is not None and _TIMED.search(place.call):
            return True
        in_threading = (_IN_THREADING.search(frame.source) for frame in self.frames[:2] if frame.file.endswith(_THREADING))
        match = next(filter(None, in_threading), None)
        if match is not None:
            return match.group("wait") is not None or match.group("join") is not None
        outside = (frame for frame in self.frames if not any(part in frame.file for part in _LOCKS))
        call = (place or next(outside, self.frames[0])).call
        return bool(_TIMED.search(call) or _MAY_BE_TIMED.search(call))

    @property
    def waits_for(self) -> str:
        """Return `data` (the next batch), `lock` (another thread), `tensorflow`, `sleep` or `other`."""
        if not self.frames:
            return OTHER
        before_program = []
        for frame in self.frames:
            if frame.is_of == "program":
                break
            before_program.append(frame)
        if any(part in frame.file for frame in before_program for part in (*_DATA, _PIPELINE)):
            return DATA
        innermost = self.frames[0]
        if innermost.function == "quick_execute" or _OPERATION.search(innermost.file):
            return TENSORFLOW
        if any(_COORDINATOR in frame.file for frame in before_program):
            return TENSORFLOW  # what workers do, who are other processes
        if any(part in innermost.file for part in _LOCKS):
            return LOCK
        if _SLEEP_LINE.search(innermost.source):
            return SLEEP
        return LOCK if _LOCK_LINE.search(innermost.source) else OTHER


def parse(dump: str) -> list[Thread]:
    """Parse the threads from faulthandler's output, without those of gpudist."""
    threads = [Thread(_frames(block)) for block in _BLOCK.split(dump.strip())]
    return [thread for thread in threads if thread.frames and not thread.is_ours]


def _frames(block: str) -> tuple[Frame, ...]:
    matches = (_FRAME.fullmatch(line) for line in block.splitlines())
    return tuple(Frame(m["file"], int(m["line"]), m["function"]) for m in matches if m)


def main_of(threads: Sequence[Thread]) -> Thread | None:
    """Return the thread that runs the program."""
    return next((thread for thread in threads if thread.is_main), None)


def waits_for(threads: Sequence[Thread]) -> str:
    """Return what a host waits for: what its program does, unless another of its threads may still continue.

    Args:
        threads: Of one host.

    Returns:
        As `Thread.waits_for`.
    """
    main = main_of(threads)
    if main is None or any(thread.waits_for == LOCK and thread.has_waits_with_an_end for thread in threads):
        return OTHER
    # Of a pool of threads, such as TensorFlow has for eager collectives, one thread only looks after the others.
    has_pool_of_threads = any(thread.is_in_pool("worker") for thread in threads)
    idle = [thread for thread in threads if has_pool_of_threads and thread.is_in_pool("_wait_for_updates")]
    others = {thread.waits_for for thread in threads if thread is not main and thread not in idle}
    if main.waits_for in (DATA, LOCK, TENSORFLOW) and others & {SLEEP, OTHER}:
        return OTHER
    if main.waits_for == TENSORFLOW and any(thread.feeds for thread in threads):
        return DATA
    return main.waits_for


def is_at_a_lock(threads: Sequence[Thread]) -> bool:
    """Return whether a host's program takes a lock itself; otherwise it waits for a queue, an event or a thread."""
    main = main_of(threads)
    if main is None or any(part in main.frames[0].file for part in _LOCKS):
        return False
    return bool(_TAKES_A_LOCK.search(main.frames[0].source))


def place_of(threads: Sequence[Thread]) -> str:
    """Return where a host is: ` (train.py:31 in read, operation IteratorGetNext)`; empty if it is unknown."""
    main = main_of(threads)
    if main is None or main.place is None:
        return ""
    operation = f", operation {main.operation}" if main.operation else ""
    feeding = next(
        (f"; its data is made at {thread.place}" for thread in threads if thread.feeds and thread.place is not None), ""
    )
    return f" ({main.place}{operation}{feeding})"


STACK_SIGNAL = int(getattr(signal, "SIGRTMAX", signal.SIGTERM)) - 2  # programs have no business with it, unlike SIGUSR1
_FILE = "stack.txt"
_MACHINERY = ("<frozen runpy>", "<string>", "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")


def answer_signals(directory: Path) -> None:
    """Write every thread's stack to the host's folder whenever the signal arrives. Call it in a host."""
    file = (directory / _FILE).open("w", encoding="utf-8")
    _open_files.append(file)  # faulthandler keeps only the descriptor
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)
    faulthandler.enable(file=file)


_open_files: list[object] = []
_NOT_IN_THE_PROGRAM = "  not in the program: it has ended there, or has not begun"
_NOT_IN_PYTHON = "  in a thread that runs no Python"


def read_stacks(directory: Path, since: int) -> str:
    """Return what was written since an earlier size of the file."""
    try:
        with (directory / _FILE).open("rb") as file:
            file.seek(since)
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def size_of_stacks(directory: Path) -> int:
    """Return the present size of the file."""
    path = directory / _FILE
    return path.stat().st_size if path.exists() else 0


def main_thread(dump: str) -> str:
    """Return the stack of the thread that runs the program, outermost call first, without frames of gpudist.

    faulthandler writes the innermost call first and no source lines; they are added where the file can be read.
    """
    blocks = _BLOCK.split(dump.strip())
    ours = [block for block in blocks if _MAIN in block]
    return _shown((ours or blocks)[0]) or dump.strip()


def stack_of_crash(directory: Path) -> str:
    """Return the error that crashed a host, and the stack of its thread; empty without a crash.

    Args:
        directory: The host's folder.

    Returns:
        `Segmentation fault` (Python's own words) and, below it, calls as `main_thread` gives them.
    """
    _, said, dump = read_stacks(directory, 0).rpartition("Fatal Python error: ")
    if not said:
        return ""
    reason, _, rest = dump.partition("\n")
    met = [block for block in _BLOCK.split(rest.strip()) if block.startswith("Current thread")]
    return f"{reason}\n{(_shown(met[0]) if met else '') or _NOT_IN_PYTHON}"


def _shown(block: str) -> str:
    """Return the frames of one thread; empty if there are none."""
    frames, lines = _frames(block), []
    for frame in reversed(frames):
        if frame.file not in _MACHINERY and frame.is_of != "ours":
            lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
            lines += [f"    {frame.source}"] if frame.source else []
    return "\n".join(lines) if lines else _NOT_IN_THE_PROGRAM if frames else ""
