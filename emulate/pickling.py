"""Turn objects into bytes for another process: with pickle, and by value for functions and classes it cannot import there."""

from __future__ import annotations

import collections
import functools
import io
import pickle
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar


def to_bytes(value: Any) -> bytes:
    """Pickle a value for `pickle.loads` in a host, with cloudpickle; code keeps the name of its file.

    Without that name (cloudpickle drops it from 3.1.3 on) tracebacks have no lines of the program, and autograph, which
    reads the source, leaves its loops and conditions unconverted.

    Args:
        value: Whatever is to be sent.

    Returns:
        The bytes.

    Raises:
        Exception: When it refers to something that cannot be sent; objects refuse in many ways.
    """
    with io.BytesIO() as file:
        _pickler()(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()


@functools.lru_cache(maxsize=1)
def _pickler() -> Callable[..., pickle.Pickler]:
    import cloudpickle

    reduce_code = cloudpickle.Pickler.dispatch_table[CodeType]

    def with_file_name(code: CodeType) -> tuple[Any, ...]:
        build, args = reduce_code(code)[:2]
        return _code_in_file, (code.co_filename, build, args)

    class Pickler(cloudpickle.Pickler):
        dispatch_table: ClassVar[Any] = collections.ChainMap({CodeType: with_file_name}, cloudpickle.Pickler.dispatch_table)

    return Pickler


def _code_in_file(file: str, build: Callable[..., CodeType], args: tuple[Any, ...]) -> CodeType:
    return build(*args).replace(co_filename=file)
