"""Write expressions with the names that a program itself uses: its alias of TensorFlow, its strategy."""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst

from emulate.fix.source import Source, last_name

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
        imports = dict(_imports(source))
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


def _imports(source: Source) -> list[tuple[str, str]]:
    aliases = [name for statement in source.all(cst.Import) for name in statement.names]
    named = [(source.code(alias.name), alias) for alias in aliases]
    return [(module, source.code(alias.asname.name) if alias.asname else module) for module, alias in named]


def _strategy(source: Source) -> str | None:
    for assign in source.all(cst.Assign):
        target = assign.targets[0].target
        is_made = isinstance(assign.value, cst.Call) and last_name(assign.value.func).lower().endswith("strategy")
        if is_made and isinstance(target, cst.Name) and isinstance(source.function(assign), cst.Module):
            return target.value
    return None
