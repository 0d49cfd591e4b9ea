"""Run a program in a host: seed every generator, list folders in an order of its own, install the probe, start the program."""

from __future__ import annotations

import contextlib
import glob
import importlib
import json
import math
import os
import pathlib
import random
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, TypeVar, final

from emulate import devices, probe, upstream
from emulate.evaluate import count_operations, evaluate, find_joins
from emulate.grouping import grouped
from emulate.imports import tf, when_imported
from emulate.instrument import Paths
from emulate.point import instead_of
from emulate.program import Program
from emulate.recorder import ProbePlan, Recorder

GENERATORS = ("python", "numpy", "tensorflow")
"""Global generators. A program that seeds all of them does not depend on gpudist's seed."""

_LARGEST = 2**31 - 1
"""Modulus of TensorFlow's seeds."""
_HOSTS_APART = 1_000_003
"""Distance between the seeds of neighbouring hosts if each host has its own seed."""


def seed_of_host(seed: int, host: int) -> int:
    """Return the seed of a host if each has its own, as without a common seed; the first host's is `seed`."""
    return (seed + host * _HOSTS_APART) % 2**32


@final
class Seeding:
    """Seed Python, NumPy, TensorFlow and Keras, each as soon as its package is imported.

    Args:
        seed: What they are seeded with.
        precision: Keras's float type.
        host: Python, NumPy and TensorFlow get the seed of this host instead, as where nobody seeds them; None for all alike.
            (Keras keeps `seed`: what it was told is nothing that a host draws from.)
        told: Called with the name of each of `GENERATORS` once the program has seeded it itself before it has drawn from it.
            (Of Python's and TensorFlow's it is not known whether the program has drawn: their imports draw too.)
    """

    def __init__(
        self, seed: int, precision: str = "float32", *, host: int | None = None, told: Callable[[str], None] = lambda _: None
    ) -> None:
        self._seed = seed
        self._own = seed if host is None else seed_of_host(seed, host)
        self._precision = precision
        self._told = told
        self._known: set[str] = set()
        self._is_ours = False

    def install(self) -> None:
        """Seed what is there, and the rest when it comes."""
        import numpy as np

        random.seed(self._own)
        np.random.seed(self._own)  # the legacy generator: what programs use without making one
        untouched = np.random.get_state(legacy=False)
        self._listen(random, "seed", "python")
        self._listen(np.random, "seed", "numpy", lambda: _same_state(np.random.get_state(legacy=False), untouched))
        when_imported("tensorflow", self._seed_tensorflow)
        when_imported("keras", lambda: self._seed_keras("keras"))
        when_imported("tf_keras", lambda: self._seed_keras("tf_keras"))

    def _seed_tensorflow(self) -> None:
        tf.random.set_seed(self._own)
        self._listen(tf.random, "set_seed", "tensorflow")
        if self._own != self._seed:
            self._leave_seeded_operations()

    def _leave_seeded_operations(self) -> None:
        """Handle operations with their own seed, which draw the same on all hosts if nobody sets a global one."""

        @instead_of(upstream.seed_module(), "get_seed")
        def get_seed(real: Any, op_seed: Any) -> Any:
            first, second = real(op_seed)
            if op_seed is None or first != self._own % _LARGEST:
                return first, second
            first = self._seed % _LARGEST
            return (0, _LARGEST) if first == 0 and isinstance(second, int) and second == 0 else (first, second)

    def _seed_keras(self, package: str) -> None:
        import numpy as np

        keras = importlib.import_module(package)
        self._is_ours = True
        try:
            keras.utils.set_random_seed(self._seed)
            if self._own != self._seed:
                random.seed(self._own)
                np.random.seed(self._own)
                tf.random.set_seed(self._own)
        finally:
            self._is_ours = False
        if self._precision != "float32":
            keras.backend.set_floatx(self._precision)

    def _listen(self, module: Any, name: str, generator: str, is_untouched: Callable[[], bool] = lambda: True) -> None:
        @instead_of(module, name)
        def seed(real: Any, *args: Any, **kwargs: Any) -> Any:
            is_first = not self._is_ours and generator not in self._known
            # Instead of a seed, None stands for the operating system's entropy.
            tells = is_first and next(iter((*args, *kwargs.values())), None) is not None and is_untouched()
            result = real(*args, **kwargs)
            if tells:
                self._known.add(generator)
                self._told(generator)
            return result


def _same_state(one: Any, other: Any) -> bool:
    import numpy as np

    state, before = one["state"], other["state"]
    return bool(state["pos"] == before["pos"] and np.array_equal(state["key"], before["key"]))


Entry = TypeVar("Entry")

_HOSTS = 30
"""Every k-th file goes to another host where files are moved on by a number that has no factor in common with k."""
_KEPT = (
    (getattr(pathlib, "_NormalAccessor", None), "listdir"),
    (getattr(pathlib, "_NormalAccessor", None), "scandir"),
    (getattr(glob, "_GlobberBase", None), "scandir"),
    (getattr(glob, "_StringGlobber", None), "scandir"),
)
"""Places (object, name) of the listing functions in the standard library: pathlib in Python 3.10, glob from 3.13 on."""


def in_another_order(entries: Iterable[Entry], name: Callable[[Entry], str] = str) -> list[Entry]:
    """Return a folder's entries in an order in which most have another place, also among those with their suffix.

    Args:
        entries: As the file system lists them.
        name: Of an entry.

    Returns:
        All of them.
    """
    by_ending = grouped((os.path.splitext(name(entry))[1], entry) for entry in entries)
    return [entry for group in by_ending.values() for entry in _moved_on(group)]


def _moved_on(entries: list[Entry]) -> list[Entry]:
    """Reorder entries: about half of the last ones come first, so blocks of entries differ too."""
    by = next(number for number in count(max(1, len(entries) // 2)) if math.gcd(number, _HOSTS) == 1) % len(entries) or 1
    return entries[by:] + entries[:by]


def list_in_another_order() -> None:
    """Make os, glob, pathlib and TensorFlow list so in this process, from now on."""
    listdir, scandir = instead_of(os, "listdir")(_listed), instead_of(os, "scandir")(_scanned)
    for owner, attribute in _KEPT:
        if attribute in vars(owner or object):
            setattr(owner, attribute, staticmethod(listdir if attribute == "listdir" else scandir))
    when_imported("tensorflow", _of_tensorflow)


def _of_tensorflow() -> None:
    gfile = tf.io.gfile
    for name, listed in (("listdir", _listed), ("glob", _listed), ("walk", _walked)):
        instead_of(gfile, name)(listed)


def _listed(real: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    return in_another_order(real(*args, **kwargs), os.fsdecode)


def _walked(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
    for top, folders, files in real(*args, **kwargs):
        for names in (folders, files):
            names[:] = in_another_order(names)
        yield top, folders, files


def _scanned(real: Callable[..., Any], *args: Any, **kwargs: Any) -> _Entries:
    with real(*args, **kwargs) as entries:
        return _Entries(in_another_order(entries, lambda entry: os.fsdecode(entry.name)))


@final
class _Entries(contextlib.AbstractContextManager["_Entries"], Iterator[os.DirEntry[Any]]):
    """Provide what `os.scandir` returns: an iterator, and the context that closes it."""

    def __init__(self, entries: list[os.DirEntry[Any]]) -> None:
        self._left = iter(entries)

    def __next__(self) -> os.DirEntry[Any]:
        return next(self._left)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration."""
        self._left = iter(())


COMPARABLE_ON_GPUS = {
    name: os.environ.get(name, value)
    for name, value in {
        # float32 means float32: TF32 rounds products to 10 bits, far above any noise floor of float32.
        "NVIDIA_TF32_OVERRIDE": "0",
        # Kernels that add in whatever order threads arrive would make every run differ from its own repeat. An operation
        # that has no deterministic kernel raises then: who needs it sets this to 0 and gets a wider noise floor.
        "TF_DETERMINISTIC_OPS": "1",
        "TF_CUDNN_DETERMINISTIC": "1",
        # cuDNN may take Winograd's transforms for one batch size and not for another: coarser than what permuted rows show.
        "TF_ENABLE_WINOGRAD_NONFUSED": "0",
    }.items()
}
"""Environment variables of hosts on GPUs when runs are compared. Variables that the user has set stay."""


@dataclass(frozen=True)
class RecordedProgram:
    """Run a recorded program, as the entry of a host in a verification.

    Attributes:
        program: What to run.
        plan: How to record it; None runs it unprobed.
        seed: Seeds Python, NumPy, TensorFlow and Keras; None leaves them alone.
        precision: Keras's float type.
        device: `cpu` or `gpu`; on GPUs TF32 is off.
        since: When the verification began, in seconds since the epoch.
    """

    program: Program
    plan: ProbePlan | None
    seed: int | None
    precision: str = "float32"
    device: str = "cpu"
    since: float = math.inf

    def __call__(self, context: Any) -> None:
        """Run on this host."""
        if self.device == "gpu":
            when_imported("tensorflow", _without_tf32)
        paths = Paths(
            context.is_private,
            lambda path, was_there: context.send({"event": "wrote", "path": path, "was_there": was_there}),
            lambda path, is_own: context.send({"event": "read", "path": path, "is_own": is_own}),
            lambda path: context.send({"event": "saved", "path": path}),
            self.since,
        )
        paths.install()
        if self.plan is not None:
            when_imported("tensorflow", _without_graph_optimization)
        has_servers = context.topology.num_ps > 0
        if self.plan is None or (has_servers and context.role != "chief"):  # of what serves the chief records what it does
            if self.seed is not None:
                Seeding(self.seed, self.precision).install()
            self.program.start(context.path)
            return
        recorder = Recorder(
            self.plan,
            host=context.host,
            send=context.send,
            several_hosts=context.topology.num_stepping_hosts > 1,
            has_servers=has_servers,
            all_reduce=devices.all_reduce_in_use,
            receive=context.receive,
        )
        if self.seed is not None:
            host = context.host if self.plan.host_variation == "seeds" else None
            Seeding(self.seed, self.precision, host=host, told=recorder.seeded).install()
        if self.plan.host_variation == "listing" and context.host:
            list_in_another_order()
        probe.install(recorder)
        _finish_at_exit(recorder)
        try:
            self.program.start(context.path)
        except BaseException as error:
            if isinstance(error, SystemExit):
                recorder.exits([(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)])
            recorder.finish("returned" if isinstance(error, SystemExit) and not error.code else "raised")
            raise
        recorder.finish("returned")


@dataclass(frozen=True)
class Evaluation:
    """Evaluate the functions of a recorded run, as the entry of a host.

    Attributes:
        source: The folder of the run's trace.
        plan: How the evaluated run differs.
        device: `cpu` or `gpu`; on GPUs TF32 is off.
    """

    source: Path
    plan: ProbePlan
    device: str = "cpu"

    def __call__(self, context: Any) -> None:
        """Run on this host."""
        if self.device == "gpu":
            when_imported("tensorflow", _without_tf32)
        when_imported("tensorflow", _without_graph_optimization)
        evaluate(self.source, self.plan)


@dataclass(frozen=True)
class Counting:
    """Count the floating-point operations of a recorded run, as the entry of a host.

    Attributes:
        source: The folder of the run's trace.
        half: That of a run with half the batch, if there is one.
        target: The file for what was counted.
    """

    source: Path
    half: Path | None
    target: Path

    def __call__(self, context: Any) -> None:
        """Run on this host."""
        self.target.write_text(json.dumps(count_operations(self.source, self.half)), encoding="utf-8")


@dataclass(frozen=True)
class Joining:
    """Find what must see the whole batch in a step of a recorded run, as the entry of a host.

    Attributes:
        reference: The folder of the trace of the run on one device.
        local: That of a run on one device with one replica's examples, where it takes one to have a graph for these.
        topology: That of the judged run.
        optimizer: Whose gradients differ.
        step: In which step.
        permutes: Whether rows may come in another order.
        target: The file for what was found.
        device: As of `Evaluation`.
    """

    reference: Path
    local: Path | None
    topology: Path
    optimizer: str
    step: int
    permutes: bool
    target: Path
    device: str = "cpu"

    def __call__(self, context: Any) -> None:
        """Run on this host."""
        if self.device == "gpu":
            when_imported("tensorflow", _without_tf32)
        when_imported("tensorflow", _without_graph_optimization)
        found = find_joins(self.reference, self.local, self.topology, self.optimizer, self.step, permutes=self.permutes)
        self.target.write_text(json.dumps(found), encoding="utf-8")


def _finish_at_exit(recorder: Recorder) -> None:
    """Write the pending records before `os._exit` ends the process."""
    pid = os.getpid()

    @instead_of(os, "_exit")
    def exit_at_once(leave: Callable[[int], NoReturn], status: int) -> NoReturn:
        try:
            if os.getpid() == pid:  # and no child of it
                recorder.exits()
                recorder.finish("raised" if status else "returned")
        finally:
            leave(status)


def _without_graph_optimization() -> None:
    """Leave graphs as they were traced.

    Grappler's rewrites take most of the time of a short run (a retraced step on eight replicas 75 s, without them 1 s;
    TensorFlow 2.21) and change nothing but rounding. A program that asks for one of them itself gets all of them.
    """
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

    @instead_of(tf.config.optimizer, "set_experimental_options")
    def set_experimental_options(real: Any, options: Any) -> None:
        real({"disable_meta_optimizer": False, **options})


def _without_tf32() -> None:
    tf.config.experimental.enable_tensor_float_32_execution(False)
