"""Make TensorFlow's running runtime look unstarted to each job in a warm host.

What is possible only before the first operation (splitting devices, a number of threads) is possible for a job that has run
none yet: a warm host cannot do it any more, says so, and the job is begun again on a host that has run nothing. What a program
may not do after its first operation raises here too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_MODULE = "tensorflow.python.eager.context"
_STRATEGY = "tensorflow.python.distribute.collective_all_reduce_strategy"
_OF_SEVERAL_HOSTS, _KEYS_APART = 1_000_000, 10_000  # apart from the groups that strategies of one host count
_LATE_METHODS = ("set_visible_devices", "set_memory_growth", "set_logical_device_configuration", "set_server_def")
_LATE_PROPERTIES = ("intra_op_parallelism_threads", "inter_op_parallelism_threads", "operation_timeout_in_ms")
_COLLECTIVES = (
    "_collective_leader",
    "_collective_scoped_allocator_enabled_ops",
    "_collective_use_nccl_communication",
    "_collective_device_filters",
)
_LATE_COLLECTIVES = "Collective ops must be configured at program startup"

NeedsFresh = Callable[[str], NoReturn]


def context() -> Any:
    """Return the eager context; None before there is one."""
    module = sys.modules.get(_MODULE)
    return None if module is None else module._context


def is_up() -> bool:
    """Return whether TensorFlow's runtime has started in this process."""
    return context() is not None and context()._context_handle is not None


def begin_job() -> None:
    """Start a job: as far as it can see, nothing has run yet."""
    _configured.clear()
    if is_up():
        # The servers of the cluster stay: they hold this host's port, and who finds them need not wait for peers.
        current = context()
        _devices[:] = [current._logical_devices]
        current._initialized = False
        current._logical_devices = _local(current._collective_ops_server_def, current._logical_devices)


def _local(server_def: Any, devices: Any) -> Any:
    """Return the devices of this host among those of the cluster, under their names without a cluster."""
    if server_def is None:
        return devices
    mine = f"/job:{server_def.job_name}/replica:0/task:{server_def.task_index}"
    kind = type(devices[0])
    return [kind(one.name.removeprefix(mine), one.device_type) for one in devices if one.name.startswith(mine)]


def end_job() -> None:
    """End a job: the runtime shows its real state."""
    if is_up():
        current = context()
        current._initialized = True
        if _devices:
            current._logical_devices = _devices.pop()
        if current._collective_ops_server_def is None:  # on one host, collectives are configured by each strategy anew
            for name in _COLLECTIVES:
                setattr(current, name, None)
        current._thread_local_data.function_call_options = None


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """Keep the runtime unstarted for a job that has run no operation, although TensorFlow's settings are read here."""
    current = context()
    was_warm = current is not None and _is_warm(current)
    yield
    if was_warm:
        current._initialized = False


@contextlib.contextmanager
def before_start(action: Callable[[], None]) -> Iterator[None]:
    """Run an action before the first operation of this job, if there is one in the block."""
    _before_start.append(action)
    try:
        yield
    finally:
        _before_start.clear()


def unlike_a_fresh_one(has_several_hosts: bool) -> str:
    """Return what a fresh process could not have, or could still choose, about the runtime; empty if nothing."""
    if not is_up():
        return ""
    current = context()
    if has_several_hosts and current._collective_ops_server_def is None:
        return "TensorFlow's runtime started without the servers of the cluster"
    if current._server_def is not None:
        return "TensorFlow was connected to a cluster of another kind"
    return "" if current.executing_eagerly() else "eager execution is off"


def first_key() -> int:
    """Return the first group key of the next MultiWorkerMirroredStrategy in this process."""
    return 0 if _STRATEGY not in sys.modules else int(_strategy()._collective_key_base)


def renew_collectives(first_key: int) -> None:
    """Have the groups of a process that has just met its cluster; on all hosts, while none is in a collective.

    TensorFlow does so for each strategy: a host that asks for a group before its leader has done it is forgotten.

    Args:
        first_key: What no host has counted to. Strategies that outlive a job keep their keys.
    """
    global _are_new
    if _STRATEGY in sys.modules:
        _strategy()._collective_key_base = max(first_key, _OF_SEVERAL_HOSTS) + _KEYS_APART
    if is_up() and context()._collective_ops_server_def is not None:
        from tensorflow.python import pywrap_tfe

        pywrap_tfe.TFE_EnableCollectiveOps(context()._context_handle, context()._collective_ops_server_def.SerializeToString())
        _are_new = True


def keep_collectives() -> None:
    """Mark the collectives as unused: the next strategy of this process takes them as they are."""
    global _are_new
    _are_new = True


def _strategy() -> Any:
    return sys.modules[_STRATEGY].CollectiveAllReduceStrategy


_are_new = False  # no strategy has used the collectives since
_configured: set[str] = set()  # what the job has configured
_before_start: list[Callable[[], None]] = []
_devices: list[Any] = []  # all that the cluster's hosts have, as an earlier job found them


def watch(needs_fresh: NeedsFresh) -> None:
    """Change the class of the eager context; called once in a process, when TensorFlow has been imported.

    Args:
        needs_fresh: Called with what the job asks for where only a host that has run nothing can do it.
    """
    cls = sys.modules[_MODULE].Context
    _initialize_again(cls)
    for name in _LATE_METHODS:
        setattr(cls, name, _or_fresh(getattr(cls, name), name, needs_fresh))
    for name in _LATE_PROPERTIES:
        known = getattr(cls, name)
        setattr(cls, name, known.setter(_or_fresh(known.fset, name, needs_fresh)))
    _configure_collectives(cls, needs_fresh)
    _enable_collectives(cls)


def _is_warm(self: Any) -> bool:
    """Return whether an earlier job, and not this one, has started the runtime."""
    return self._context_handle is not None and not self._initialized


def _initialize_again(cls: Any) -> None:
    real = cls.ensure_initialized

    @functools.wraps(real)
    def ensure_initialized(self: Any) -> None:
        if _before_start and not self._initialized:
            _before_start.pop()()
        if self._initialized:
            return
        if self._context_handle is not None:
            self._initialized = True
            return
        real(self)

    cls.ensure_initialized = ensure_initialized


def _or_fresh(real: Callable[..., Any], name: str, needs_fresh: NeedsFresh) -> Callable[..., Any]:
    @functools.wraps(real)
    def late(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_warm(self):
            return real(self, *args, **kwargs)
        try:
            return real(self, *args, **kwargs)  # what is asked for may be what is so already
        except (RuntimeError, ValueError):
            needs_fresh(name)

    return late


def _configure_collectives(cls: Any, needs_fresh: NeedsFresh) -> None:
    real = cls.configure_collective_ops

    @functools.wraps(real)
    def configure_collective_ops(self: Any, *args: Any, **kwargs: Any) -> None:
        if self._initialized and "collectives" not in _configured:
            raise RuntimeError(_LATE_COLLECTIVES)
        if _is_warm(self) and not (args or kwargs.get("collective_leader")) and self._collective_leader is None:
            _configure_local(self, real, kwargs)
        elif _is_warm(self):
            try:
                real(self, *args, **kwargs)
            except (RuntimeError, ValueError):
                needs_fresh("configure_collective_ops")
        else:
            real(self, *args, **kwargs)
        _configured.add("collectives")

    cls.configure_collective_ops = configure_collective_ops


def _configure_local(self: Any, real: Callable[..., None], options: dict[str, Any]) -> None:
    """Configure collectives within one host, which need no server: only options of later functions are set."""
    handle, self._context_handle = self._context_handle, None
    try:
        real(self, **options)
    finally:
        self._context_handle = handle
    self._thread_local_data.function_call_options = None


def _enable_collectives(cls: Any) -> None:
    real = cls.enable_collective_ops

    @functools.wraps(real)
    def enable_collective_ops(self: Any, server_def: Any) -> Any:
        global _are_new
        if not _is_warm(self) and not _are_new:
            return real(self, server_def)
        self._initialized = True
        are_new, _are_new = _are_new, False
        known = self._collective_ops_server_def
        if are_new and known is not None and _place(known) == _place(server_def):
            self._collective_ops_server_def = server_def
            with self._initialize_lock:
                self._initialize_logical_devices()
                self._clear_caches()
            return None
        logger = logging.getLogger("absl")
        logger.addFilter(_is_worth_telling)
        try:
            return real(self, server_def)
        finally:
            logger.removeFilter(_is_worth_telling)

    cls.enable_collective_ops = enable_collective_ops


def _place(server_def: Any) -> tuple[Any, ...]:
    return server_def.cluster, server_def.job_name, server_def.task_index


def _is_worth_telling(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Enabling collective ops after program startup")
