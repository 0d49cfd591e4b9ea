"""What a job changed and did not put back, the host puts back: the next job on it finds nothing of it."""

from __future__ import annotations

import asyncio
import contextvars
import copyreg
import gc
import multiprocessing
import os
import sys
import threading
import time
import types
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from emulate.cluster import HostContext, Preload
from emulate.pool import HostResult, Pool

Function = Callable[[], Any]


@pytest.fixture(scope="module")
def warm(preload: Preload) -> Iterator[Pool]:
    """One pool for all cases: what is put back needs no other host."""
    with Pool(preload=preload) as pool:
        yield pool


def value(results: list[HostResult]) -> Any:
    [result] = results
    assert result.status == "returned", (result.error and result.error.traceback_text, result)
    return result.value


def set_time_zone() -> None:
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()


def set_time_zone_and_forget_the_variable() -> None:
    set_time_zone()
    del os.environ["TZ"]


def put_stand_ins() -> None:
    sys.modules["mine"] = types.ModuleType("mine")
    sys.modules["mine.part"] = types.ModuleType("mine.part")
    sys.modules["json.mine"] = types.SimpleNamespace(load=len)  # type: ignore[assignment]
    sys.modules["csv"] = types.SimpleNamespace(reader=len)  # type: ignore[assignment]
    sys.modules["none"] = None  # type: ignore[assignment]
    sys.modules["other"] = sys.modules["os"]


def stand_ins() -> Any:
    names = sys.modules.keys() & {"mine", "mine.part", "json.mine", "none", "other"}
    return sorted(names), type(sys.modules["csv"]).__name__


def set_loop_policy() -> None:
    class Policy(asyncio.DefaultEventLoopPolicy):
        pass

    asyncio.set_event_loop_policy(Policy())


def set_opener() -> None:
    urllib.request.install_opener(urllib.request.build_opener())


def has_opener() -> bool:
    return getattr(urllib.request, "_opener", None) is not None


def set_digits() -> None:
    getattr(sys, "set_int_max_str_digits", int)(5000)


def digits() -> Any:
    return getattr(sys, "get_int_max_str_digits", int)()


def set_main() -> None:
    vars(sys.modules["__main__"]).update(mine=1, __doc__="mine")


def main() -> Any:
    names = vars(sys.modules["__main__"])
    return "mine" in names, names["__doc__"]


def set_variables() -> None:
    import decimal

    _variable().set(1)
    decimal.getcontext().prec = 5


def variables() -> Any:
    import decimal

    return _variable().get(), decimal.getcontext().prec


def _variable() -> contextvars.ContextVar[int]:
    """One for the life of the host, as a module's are."""
    place = vars(contextvars)
    if "mine" not in place:
        place["mine"] = contextvars.ContextVar("mine", default=0)
    return place["mine"]  # type: ignore[no-any-return]


def set_defaults() -> None:
    import keras
    import tensorflow as tf

    keras.layers.Dropout.__init__.__defaults__ = (None, 5)
    keras.layers.Layer.__init__.__kwdefaults__["trainable"] = False
    tf.constant.__defaults__ = (1, 2, 3)


def defaults() -> Any:
    import keras
    import tensorflow as tf

    named = keras.layers.Layer.__init__.__kwdefaults__["trainable"]
    return keras.layers.Dropout.__init__.__defaults__, named, tf.constant.__defaults__


def set_synchronous_execution() -> None:
    import tensorflow as tf

    tf.ones([])
    tf.config.experimental.set_synchronous_execution(False)


def synchronous_execution() -> Any:
    import tensorflow as tf

    return tf.config.experimental.get_synchronous_execution()


def set_summary_step() -> None:
    import tensorflow as tf

    tf.summary.experimental.set_step(7)


def summary_step() -> Any:
    import tensorflow as tf

    return tf.summary.experimental.get_step()


def set_found_by_name() -> None:
    sys.modules["keras.src.activations"].ALL_OBJECTS_DICT["mine"] = len  # type: ignore[attr-defined]


def found_by_name() -> bool:
    import keras

    try:
        return keras.activations.get("mine") is len
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("change", "look"),
    [
        (set_time_zone, lambda: (time.tzname, "TZ" in os.environ)),
        (set_time_zone_and_forget_the_variable, lambda: time.tzname),
        (put_stand_ins, stand_ins),
        (set_loop_policy, lambda: type(asyncio.get_event_loop_policy()).__name__),
        (
            lambda: multiprocessing.set_start_method("spawn", force=True),
            lambda: multiprocessing.get_start_method(allow_none=True),
        ),
        (set_opener, has_opener),
        (set_digits, digits),
        (lambda: setattr(sys, "dont_write_bytecode", not sys.dont_write_bytecode), lambda: sys.dont_write_bytecode),
        (lambda: gc.callbacks.append(lambda *_: None), lambda: len(gc.callbacks)),
        (lambda: gc.set_debug(gc.DEBUG_UNCOLLECTABLE), gc.get_debug),
        (lambda: threading.settrace(lambda *_: None), lambda: threading.gettrace() is None),
        (lambda: threading.setprofile(lambda *_: None), lambda: threading.getprofile() is None),
        (lambda: copyreg.pickle(range, lambda one: (range, (0,))), lambda: range in copyreg.dispatch_table),
        (set_main, main),
        (set_variables, variables),
        (set_defaults, defaults),
        (set_synchronous_execution, synchronous_execution),
        (set_summary_step, summary_step),
        (set_found_by_name, found_by_name),
    ],
)
def test_the_next_job_finds_what_the_one_before_it_found(warm: Pool, change: Function, look: Function) -> None:
    def job(context: HostContext) -> Any:
        change()
        return look()

    with warm.lease("1x1") as lease:
        before = value(lease.run(lambda context: look()))
        assert value(lease.run(job)) != before
        assert value(lease.run(lambda context: look())) == before
    assert (warm.statistics.started, warm.statistics.reasons) == (1, [])


MODULE = """
import copyreg, gc

def reduce(one):
    return range, (0,)

def callback(*_):
    pass

copyreg.pickle(range, reduce)
gc.callbacks.append(callback)
"""


def test_what_an_import_set_stays_as_it_is_not_imported_a_second_time(warm: Pool) -> None:
    def look(context: HostContext) -> Any:
        return range in copyreg.dispatch_table, len(gc.callbacks)

    def import_module(context: HostContext) -> Any:
        before = look(context)
        (context.directory / "that_sets_something.py").write_text(MODULE)
        sys.path.insert(0, str(context.directory))
        __import__("that_sets_something")
        return before

    with warm.lease("1x1", fresh=True) as lease:
        assert value(lease.run(import_module)) == (False, 0)
        assert value(lease.run(look)) == (True, 1)


def leave_shared_memory(context: HostContext) -> tuple[str, int]:
    from multiprocessing import resource_tracker, shared_memory

    left = shared_memory.SharedMemory(create=True, size=64)
    return left.name, resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]


def look_around(context: HostContext) -> None:
    pass


def leave_shared_memory_and_a_process(context: HostContext) -> tuple[str, int]:
    found = leave_shared_memory(context)
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True).start()
    return found


def test_shared_memory_that_a_job_left_is_gone_and_its_host_stays(warm: Pool) -> None:
    before = warm.statistics.replaced
    with warm.lease("1x1") as lease:
        name, tracker = value(lease.run(leave_shared_memory))
        value(lease.run(look_around))  # which begins when the host has looked after itself
    assert name not in os.listdir("/dev/shm")
    assert not os.path.exists(f"/proc/{tracker}")
    assert warm.statistics.replaced == before


def test_a_process_that_was_left_with_shared_memory_does_not_hold_up_the_host(warm: Pool) -> None:
    before = warm.statistics.replaced
    with warm.lease("1x1") as lease:
        value(lease.run(leave_shared_memory_and_a_process))
        value(lease.run(leave_shared_memory))
    assert warm.statistics.replaced == before + 1
