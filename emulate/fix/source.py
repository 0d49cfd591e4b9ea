"""Read a file of the program as a concrete syntax tree, and edit its text: what no edit touches stays as it is, to the byte.

An edit is written with the names that the program itself uses: its alias of TensorFlow, its strategy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper, ParentNodeProvider, PositionProvider

from emulate.errors import UsageError

if TYPE_CHECKING:
    from libcst import CSTNode


Node = TypeVar("Node", bound=cst.CSTNode)
_FUNCTIONS = (cst.FunctionDef, cst.Module)


@dataclass(frozen=True)
class Change:
    """Describe new text for a part of a file.

    Attributes:
        start: Where the part begins, in bytes of UTF-8.
        end: Where it ends; `start` where text is inserted.
        text: What stands there instead.
    """

    start: int
    end: int
    text: str


class Source:
    """Find parts of a source file by line and kind, and write changes of them.

    Args:
        text: The file's content.
        file: Its path, for messages.

    Raises:
        UsageError: When its text cannot be kept as it is around an edit.
    """

    def __init__(self, text: bytes, file: Path) -> None:
        try:
            wrapper = MetadataWrapper(cst.parse_module(text))
        except (cst.ParserSyntaxError, UnicodeDecodeError, LookupError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UsageError(
                f"A file to edit must be valid Python. Received: file={str(file)!r} ({reason}). Fix it first."
            ) from None
        self.module = wrapper.module
        if self.module.bytes != text:
            raise UsageError(
                f"A file to edit must be plain text in its declared encoding. Received: file={str(file)!r}, which has "
                "a byte order mark or mixes encodings. Save it as UTF-8."
            )
        self.newline = self.module.default_newline
        self._code = self.module.code.encode()
        self._spans = wrapper.resolve(ByteSpanPositionProvider)
        self._places = wrapper.resolve(PositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)

    def span(self, node: CSTNode) -> tuple[int, int]:
        """Return where a node begins and ends, in bytes."""
        span = self._spans[node]
        return span.start, span.start + span.length

    def code(self, node: CSTNode) -> str:
        """Return the text of a node."""
        start, end = self.span(node)
        return self._code[start:end].decode()

    def first_line(self, node: CSTNode) -> int:
        """Return the line in which a node begins."""
        return int(self._places[node].start.line)

    def all(self, kind: type[Node], within: CSTNode | None = None) -> list[Node]:
        """Return the nodes of a kind in the file or in another node, in the order of the text; outer ones first."""
        everything: Iterable[CSTNode] = self._places if within is None else self._within(within)
        nodes = [node for node in everything if isinstance(node, kind)]
        return sorted(nodes, key=lambda node: (self.span(node)[0], -self.span(node)[1]))

    def statement(self, line: int) -> cst.SimpleStatementLine | None:
        """Return the statement that covers a line; of a function or a loop there, none."""
        around = [one for one in self.all(cst.SimpleStatementLine) if self._covers(one, line)]
        return around[-1] if around else None

    def function(self, node: CSTNode) -> CSTNode:
        """Return the innermost function around a node, or the module."""
        while not isinstance(node, _FUNCTIONS):
            node = self._parents[node]
        return node

    def holds(self, outer: CSTNode, inner: CSTNode) -> bool:
        """Return whether the text of a node has that of another one in it."""
        (start, end), (first, last) = self.span(outer), self.span(inner)
        return start <= first and last <= end

    def parent(self, node: CSTNode) -> CSTNode | None:
        """Return what holds a node."""
        return self._parents.get(node)

    def replace(self, node: CSTNode, text: str) -> Change:
        """Return the change that puts text in place of a node."""
        return Change(*self.span(node), text)

    def before(self, statement: cst.SimpleStatementLine, line: str) -> Change:
        """Return the change that inserts a line above a statement, as deep as it."""
        start, _ = self.span(statement)
        return Change(start, start, f"{line}{self.newline}{self._indent(start)}")

    def after(self, statement: cst.SimpleStatementLine, line: str) -> Change:
        """Return the change that inserts a line below a statement, and below the comment behind it."""
        start, end = self.span(statement)
        rest = self._code[end:]
        end += min(at for at in (rest.find(b"\r"), rest.find(b"\n"), len(rest)) if at >= 0)
        return Change(end, end, f"{self.newline}{self._indent(start)}{line}")

    def delete(self, statement: cst.SimpleStatementLine) -> Change:
        """Return the change that removes the line of a statement, with its comment."""
        start, end = self.span(statement)
        start -= len(self._indent(start))
        last = self._code.find(b"\n", end)
        return Change(start, len(self._code) if last < 0 else last + 1, "")

    def stands_alone(self, statement: cst.SimpleStatementLine) -> bool:
        """Return whether a statement has its line for itself, so that others can be put around it."""
        start, _ = self.span(statement)
        line = self._code[self._code.rfind(b"\n", 0, start) + 1 : start]
        return len(statement.body) == 1 and not line.strip()

    def apply(self, changes: Iterable[Change]) -> bytes:
        """Return the file's content with changes, which must not overlap; of those at one place the first comes first."""
        code = self._code
        for change in sorted(changes, key=lambda one: (one.start, one.end))[::-1]:
            code = code[: change.start] + change.text.encode() + code[change.end :]
        return code.decode().encode(self.module.encoding)

    def _indent(self, start: int) -> str:
        return self._code[self._code.rfind(b"\n", 0, start) + 1 : start].decode()

    def _covers(self, node: CSTNode, line: int) -> bool:
        place = self._places[node]
        return bool(place.start.line <= line <= place.end.line)

    def _within(self, node: CSTNode) -> Iterator[CSTNode]:
        yield node
        for child in node.children:
            yield from self._within(child)


def last_name(node: CSTNode) -> str:
    """Return `reduce_mean` of `tf.math.reduce_mean`; empty for what is no name."""
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""


def calls_of(source: Source, names: Sequence[str], within: CSTNode) -> list[cst.Call]:
    """Return the calls of functions with these last names in a node, outer ones first."""
    return [call for call in source.all(cst.Call, within) if last_name(call.func) in names]


def argument(call: cst.Call, index: int, keyword: str) -> cst.Arg | None:
    """Return an argument of a call, given by place or by name."""
    by_name = [arg for arg in call.args if arg.keyword is not None and arg.keyword.value == keyword]
    by_place = [arg for arg in call.args if arg.keyword is None and not arg.star]
    return next(iter([*by_name, *by_place[index : index + 1]]), None)


_REPLICAS = "num_replicas_in_sync"
_ON_ONE_DEVICE = {
    "1": re.compile(rf"[\w.()]*({_REPLICAS}|num_input_pipelines)|len\(.*worker.*\)", re.DOTALL),
    "0": re.compile(r"[\w.()]*(input_pipeline_id|replica_id_in_sync_group|task_id)|.*\[.index.\]", re.DOTALL),
}
"""Values on one device, with how programs write the number (1) and the index (0) of replicas and hosts."""


@dataclass(frozen=True)
class Names:
    """Hold what a file calls the things that edits need.

    Attributes:
        tf: Its name of TensorFlow, None where it does not import it.
        core: Its name of gpudist_core, None where it does not import it.
        strategy: Its strategy, a name that all functions of the file see; None where it has none.
        is_called_outside: Whether the edited line also runs where there is no replica: Keras calls a loss of `compile` so.
    """

    tf: str | None
    core: str | None
    strategy: str | None
    is_called_outside: bool = False

    @classmethod
    def of(cls, source: Source) -> Names:
        """Return the names of a file."""
        aliases = [name for statement in source.all(cst.Import) for name in statement.names]
        imports = {source.code(name.name): source.code(name.asname.name if name.asname else name.name) for name in aliases}
        return cls(imports.get("tensorflow"), imports.get("gpudist_core"), _strategy(source))

    @property
    def replicas(self) -> str:
        """Return the number of replicas, as an expression."""
        return f"{self.strategy or f'{self.tf}.distribute.get_strategy()'}.{_REPLICAS}"

    def all_reduced(self, value: str, how: str = "SUM") -> str:
        """Return a value summed over the replicas, as an expression."""
        context = f"{self.tf}.distribute.get_replica_context()"
        reduced = f"{context}.all_reduce({self.tf}.distribute.ReduceOp.{how}, {value})"
        return f"({reduced} if {context} else {value})" if self.is_called_outside else reduced

    def gathered(self, value: str) -> str:
        """Return the rows of a value of all replicas, as an expression."""
        return f"{self.tf}.distribute.get_replica_context().all_gather({value}, axis=0)"


def value_on_one_device(source: Source, node: cst.CSTNode) -> str | None:
    """Return the value that one device has for a number or an index of replicas or hosts, or a name of one; else None."""
    texts = [source.code(node)] if isinstance(node, cst.Attribute) else []
    if isinstance(node, cst.Name):
        given = [one for one in source.all(cst.Assign) if source.code(one.targets[0].target) == node.value]
        texts = [source.code(one.value) for one in given]
    return next((value for text in texts for value, written in _ON_ONE_DEVICE.items() if written.fullmatch(text)), None)


def _strategy(source: Source) -> str | None:
    for assign in source.all(cst.Assign):
        target = assign.targets[0].target
        is_made = isinstance(assign.value, cst.Call) and last_name(assign.value.func).lower().endswith("strategy")
        if is_made and isinstance(target, cst.Name) and isinstance(source.function(assign), cst.Module):
            return target.value
    return None


PLAIN, CORE = "plain", "core"


@dataclass(frozen=True)
class Proposal:
    """Describe an edit of one file.

    Attributes:
        words: What it does, in the imperative.
        changes: What stands elsewhere in the file's text.
        form: `plain` for TensorFlow and Keras alone, `core` where it uses gpudist_core.
    """

    words: str
    changes: tuple[Change, ...]
    form: str = PLAIN


@dataclass(frozen=True)
class Site:
    """Describe where an edit is wanted.

    Attributes:
        source: The file.
        names: What it calls things.
        line: The line of the finding.
        fixes: The headings of the finding's fixes.
    """

    source: Source
    names: Names
    line: int
    fixes: Sequence[str] = ()

    @property
    def statement(self) -> cst.SimpleStatementLine | None:
        """Return the statement of the line."""
        return self.source.statement(self.line)


Edit = Callable[[Site], Iterator[Proposal]]


def of_line(edit: Callable[[cst.SimpleStatementLine, Source, Names], Iterator[Proposal]]) -> Edit:
    """Make an edit that is tried where the line has a statement and its file imports TensorFlow."""

    def propose_at(site: Site) -> Iterator[Proposal]:
        if site.statement is not None and site.names.tf is not None:
            yield from edit(site.statement, site.source, site.names)

    return propose_at
