"""Say what must see the whole batch in a step, as experiments have found it (`emulate/evaluate/joins.py`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Member:
    """Describe a tensor of a step that replicas need from the whole batch.

    Attributes:
        name: That of its operation in the graph; of a mean, that of the mean.
        operation: The type of the operation.
        kind: What it is to the replicas' own values: `sum`, `count` (of what has been chosen from the examples), `maximum`,
            `minimum`, `rows` (those of all replicas), `number` (of the examples), `constant` (another one on a replica), `mean`
            (a sum, and what divides it), or `other`.
        value_alone: Whether no gradient need pass through it.
        of_data: Whether it depends on no variable.
        scales: Whether it multiplies or divides what examples have, and is not added to it.
        belongs: Whether it is made of another member, or scales what is made of others alone: it needs no cause of its own.
        behind: The operations before it in which examples first meet: what needs fewer joins may be far behind them.
        is_assigned: Whether the loss depends on it only by a variable that the step assigns and then reads.
    """

    name: str
    operation: str
    kind: str
    value_alone: bool
    of_data: bool
    scales: bool
    is_assigned: bool = False
    belongs: bool = False
    behind: Sequence[str] = ()

    @property
    def is_divisor(self) -> bool:
        """Return whether it is a number of the examples alone, or a count of what the model chooses, that divides others."""
        return self.scales and (self.of_data or (self.value_alone and self.kind in ("sum", "count")))


@dataclass(frozen=True)
class Joins:
    """Hold the smallest set of tensors with which the replicas would have one device's gradient.

    Attributes:
        optimizer: Whose gradients are explained.
        step: In which step.
        members: The tensors, in the order of the forward pass.
        terms: Terms of the loss that all replicas have, and that count once for each.
        scale: By which number the replicas' gradients are larger besides.
    """

    optimizer: str
    step: int
    members: tuple[Member, ...]
    terms: tuple[str, ...] = ()
    scale: float = 1.0

    @classmethod
    def read(cls, found: Mapping[str, Any], optimizer: str, step: int) -> Joins | None:
        """Return what `find_joins` has found; None where it has no answer."""
        if "refused" in found:
            return None
        members: dict[str, Member] = {}
        for about in found["members"]:
            member, name = Member(**about), about["name"]
            pair = [member, members.get(name, member)]
            are_divisors = [one.kind in ("number", "count") for one in pair]
            if sum(are_divisors) == 1:  # of one mean
                own = pair[are_divisors.index(False)]
                member = replace(own, name=name, operation="Mean", kind="mean")
            members[name] = member
        return cls(optimizer, step, tuple(members.values()), tuple(found["terms"]), found["scale"])

    def without(self, layers: Collection[str]) -> Joins:
        """Return what is left without the tensors of some layers."""
        own = [one for one in self.members if not any(_is_of_layer(one.name, layer) for layer in layers)]
        return Joins(self.optimizer, self.step, tuple(own), self.terms, self.scale)

    @property
    def tells(self) -> bool:
        """Return whether anything is left that explains gradients."""
        return bool(self.members or self.terms or self.scale != 1)

    @property
    def numbers(self) -> Sequence[Member]:
        """Return the numbers of examples by which a part of the loss is divided."""
        return [one for one in self.members if one.kind == "number" and one.scales and not (one.is_assigned or one.belongs)]

    @property
    def normalizers(self) -> Sequence[Member]:
        """Return what other examples are divided by: counts and sums, of weights or of what the model has chosen."""
        return [one for one in self._mixing if one.is_divisor and not one.belongs]

    @property
    def meetings(self) -> Sequence[Member]:
        """Return everything else by which the loss of one example depends on others: first what depends on the model."""
        others = [one for one in self._mixing if not one.is_divisor]
        return sorted(
            others + [one for one in self._mixing if others and one.belongs and one not in others], key=lambda one: one.of_data
        )

    @property
    def is_of_one_sum(self) -> bool:
        """Return whether a sum or a mean that depends on the model is all: the loss is a function of it."""
        return [one.kind in ("sum", "mean") and not one.of_data for one in self.members] == [True]

    @property
    def constants(self) -> Sequence[Member]:
        """Return numbers that a replica has in another way than one device."""
        return [one for one in self.members if one.kind == "constant"]

    @property
    def assigned(self) -> Sequence[Member]:
        """Return what the replicas assign to variables that the loss then reads."""
        return [one for one in self.members if one.is_assigned]

    @property
    def _mixing(self) -> Sequence[Member]:
        others = (one for one in self.members if one.kind != "constant" and not one.is_assigned)
        return [one for one in others if one.kind != "number" or not one.scales]  # a limit, say, to which rows are compared


def _is_of_layer(name: str, layer: str) -> bool:
    """Return whether a layer made an operation: a scope has the layer's name, with a number where it is entered again."""
    return any(scope == layer or scope.rpartition("_")[0] == layer for scope in name.split("/"))
