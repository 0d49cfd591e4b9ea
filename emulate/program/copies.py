"""Name the user's own files where a host works on copies of them, because the system refuses views.

Code that is imported from a copy gets the name of the original. So all that reads the names of code names the user's files:
tracebacks, stacks of hosts that hang, lines of operations and of calls. `__file__` stays the copy's: what the program finds or
writes beside it is there.
"""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

_root = ""


def name_originals(root: str) -> None:
    """Name the originals in this process from now on.

    Args:
        root: The folder of the copies, without a slash at its end. The copy of `/a/b.py` is `<root>/a/b.py`.
    """
    global _root
    _root = root
    get_code = SourceFileLoader.get_code

    def get_named_code(self: SourceFileLoader, fullname: str) -> Any:
        return _named(get_code(self, fullname), original(self.path))

    SourceFileLoader.get_code = get_named_code  # type: ignore[assignment, method-assign]


def original(text: str) -> str:
    """Return a path or a text with the paths of the user's files in place of those of their copies."""
    return text.replace(_root, "") if _root else text


def _named(code: Any, file: str) -> Any:
    consts = tuple(_named(const, file) if isinstance(const, CodeType) else const for const in code.co_consts)
    return code if code.co_filename == file else code.replace(co_filename=file, co_consts=consts)
