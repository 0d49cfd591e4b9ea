"""List the items of a run: all variables of its model, optimizer and metrics, and everything else it names.

Variables have names that are equal in every run: the path in the model without Keras's counters.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from gpudist_core.checkpoints.items import Item, PerReplica, Sliced, Whole, aggregation_on_read, check_kept
from gpudist_core.errors import UsageError
from gpudist_core.gradients import shard_of
from gpudist_core.replicas import Replicas


class Collector:
    """Make items from variables.

    Args:
        strategy: The strategy of the run.
        replicas: Its replicas.
    """

    def __init__(self, strategy: tf.distribute.Strategy, replicas: Replicas) -> None:
        self._strategy, self._replicas = strategy, replicas

    def of_model(self, model: Any) -> list[Item]:
        """Return the items of a model."""
        variables = list(_unique(getattr(model, "variables", ())))
        named = [*zip(unique_names_of(variables, Numbered()), variables, strict=True), *_attributes(model, variables)]
        return [self.item(f"model/{name}", variable) for name, variable in named]

    def of_optimizer(self, group: str, optimizer: Any, model: Any) -> list[Item]:
        """Return the items of an optimizer. Its slots are named after the variables of the model."""
        from gpudist_core.upstream import optimizers

        variables = list(_unique(getattr(model, "variables", ()))) if model is not None else []
        names_of_variables = unique_names_of(variables, Numbered())
        by_path = dict(zip((path_of(v) for v in variables), names_of_variables, strict=True))
        candidates = optimizers.variables_of(optimizer) if hasattr(optimizer, "apply") else _variables_of(optimizer)
        slots = list(_unique(candidates))
        called = unique_names_of_slots(slots, by_path, Numbered())
        trained = optimizers.trained_by(optimizer) if hasattr(optimizer, "apply") and getattr(optimizer, "built", False) else []
        owners = _shards_of_owners(slots, list(_unique([*trained, *variables])))
        return [self.item(f"{group}/{name}", slot, owner) for name, slot, owner in zip(called, slots, owners, strict=True)]

    def of_metrics(self, model: Any) -> list[Item]:
        """Return the items of the metrics that a Keras model was compiled with."""
        variables = list(_unique(getattr(model, "metrics_variables", ())))
        called = unique_names_of(variables, Numbered())
        return [self.item(f"metrics/{name}", variable) for name, variable in zip(called, variables, strict=True)]

    def of_others(self, group: str, variables: Iterable[Any]) -> list[Item]:
        """Return the items of variables, metrics, layers or random generators that the run names itself."""
        kept = [variable for value in variables for variable in _variables_of(value)]
        called = unique_names_of(kept, Numbered())
        return [self.item(f"{group}/{name}", variable) for name, variable in zip(called, kept, strict=True)]

    def item(self, name: str, variable: Any, owner: Any = None) -> Item:
        """Return one item.

        Args:
            name: Its name.
            variable: A Keras or TensorFlow variable, or the state of a random generator.
            owner: The `ShardInfo` of the table whose optimizer slot the variable is, if it is one.

        Returns:
            The item.
        """
        from gpudist_core.upstream import models

        replicas = self._replicas
        if isinstance(variable, _State):
            return self._per_replica(name, variable.variable)
        shard = shard_of(variable) or owner
        variable = models.plain(variable)
        check_kept(name, variable.dtype)
        copies = self._strategy.experimental_local_results(variable)
        if shard is not None and len(copies[0].shape) > shard.axis and copies[0].shape[shard.axis] == shard.height:
            return Sliced(name, copies, replicas.first, shard)
        if aggregation_on_read(variable) == "NONE":
            return self._per_replica(name, variable)
        return Whole(name, variable, copies, replicas.host == 0)

    def _per_replica(self, name: str, variable: Any) -> Item:
        replicas, copies = self._replicas, self._strategy.experimental_local_results(variable)
        if hasattr(variable, "distribute_strategy"):
            return PerReplica(name, copies, replicas.first, replicas.total)
        return PerReplica(name, copies, 0, 1, writes=replicas.host == 0)


class _State:
    """Hold the state of a random generator, which each replica advances by itself."""

    def __init__(self, name: str, variable: Any) -> None:
        self.name, self.variable = name, variable


def _variables_of(value: Any) -> list[Any]:
    """Return the variables of an object in `extra`."""
    from gpudist_core.static import ShardedTable

    if isinstance(value, tf.random.Generator):
        return [_State("generator", value.state)]
    if isinstance(value, Mapping):
        return [v for inner in value.values() for v in _variables_of(inner)]
    if isinstance(value, (list, tuple)):
        return [v for inner in value for v in _variables_of(inner)]
    if isinstance(value, tf.Variable):
        return [value]
    if isinstance(value, ShardedTable):
        return [value.variable]
    variables = getattr(value, "variables", None)
    if variables is None and not (hasattr(value, "assign") and hasattr(value, "dtype")):
        raise UsageError(
            "A value in extra must be a variable, a metric or a random generator, or have state() and restore(state)",
            "Put a number into a tf.Variable, or into an object with state() and restore(state).",
            value=value,
        )
    return [value] if variables is None else list(variables)


def _shards_of_owners(slots: Iterable[Any], variables: Iterable[Any]) -> list[Any]:
    """Return, for each slot, the `ShardInfo` of its table; None for slots of other variables.

    Several tables may have the same name: the optimizer makes their slots in the order of its variables.
    """
    shards: dict[str, list[Any]] = {}
    for variable in variables:
        shards.setdefault(path_of(variable).replace("/", "_"), []).append(shard_of(variable))
    counts: Counter[str] = Counter()
    shards_of_slots = []
    for slot in slots:
        path = path_of(slot)
        of_name = shards.get(owner_of(path, shards) or "", [None])
        shards_of_slots.append(of_name[min(counts[path], len(of_name) - 1)])
        counts[path] += 1
    return shards_of_slots


def _unique(variables: Iterable[Any]) -> Iterator[Any]:
    seen = set()
    for variable in variables:
        if id(variable) not in seen:
            seen.add(id(variable))
            yield variable


def _attributes(model: Any, listed: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return plain tf.Variables and random generators in the attributes of layers. Keras 3 does not list them as variables."""
    from gpudist_core.upstream import models, runtime

    seen = {id(models.plain(variable)) for variable in listed}
    numbered = Numbered()
    attributes = []
    for layer in runtime.flat_layers(model):
        for attribute, value in sorted(vars(layer).items()):
            inside = [value] if isinstance(value, (tf.Variable, tf.random.Generator)) else _inside(value)
            for item in inside:
                if isinstance(item, (tf.Variable, tf.random.Generator)) and id(item) not in seen:
                    seen.add(id(item))
                    attributes.append((f"{numbered(str(layer.path or layer.name))}/{attribute}", item))
    called = unique(name for name, _ in attributes)
    return [
        (name, _State(name, item.state) if isinstance(item, tf.random.Generator) else item)
        for name, (_, item) in zip(called, attributes, strict=True)
    ]


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else []


class Numbered:
    """Replace the counters in paths by new ones: a second model in a process has `dense_2` instead of `dense`."""

    def __init__(self) -> None:
        self._by_base: dict[str, dict[str, int]] = {}

    def __call__(self, path: str) -> str:
        """Return the path with each part's counter replaced by the number of earlier parts of that name.

        Args:
            path: A path such as `sequential_3/dense_7/kernel`.

        Returns:
            A path such as `sequential/dense/kernel`.
        """
        return "/".join(self._part(part) for part in path.split("/"))

    def _part(self, part: str) -> str:
        base = re.sub(r"_\d+$", "", part)
        numbers = self._by_base.setdefault(base, {})
        number = numbers.setdefault(part, len(numbers))
        return base if number == 0 else f"{base}_{number}"


def unique(names: Iterable[str]) -> list[str]:
    """Return the names, with `#2`, `#3` appended to repeated ones."""
    taken: dict[str, int] = {}
    result = []
    for name in names:
        taken[name] = taken.get(name, 0) + 1
        result.append(name if taken[name] == 1 else f"{name}#{taken[name]}")
    return result


def path_of(variable: Any) -> str:
    """Return the path of a Keras variable in its model, or the name of a tf.Variable."""
    path = getattr(variable, "path", None) or getattr(variable, "name", None) or "variable"
    return str(path).removesuffix(":0")


def unique_names_of(variables: Iterable[Any], numbered: Numbered) -> list[str]:
    """Return unique names for a model's variables, in order."""
    return unique(numbered(path_of(variable)) for variable in variables)


def unique_names_of_slots(variables: Iterable[Any], model_names: Mapping[str, str], numbered: Numbered) -> list[str]:
    """Return unique names for an optimizer's variables. A slot is named after its variable.

    Args:
        variables: The optimizer's variables, in order.
        model_names: The names of the model's variables by their paths.
        numbered: The counters for the optimizer.

    Returns:
        Names such as `adam/iteration` and `adam/sequential/dense/kernel/momentum`.
    """
    owners = {path.replace("/", "_"): name for path, name in model_names.items()}
    return unique(_name_of_slot(path_of(variable), owners, numbered) for variable in variables)


def owner_of(path: str, owners: Mapping[str, Any]) -> str | None:
    """Return the longest flattened path that is a prefix of a slot's path; None if the slot belongs to no variable."""
    prefix = path.rsplit("/", 1)[-1]
    while "_" in prefix:
        prefix = prefix.rpartition("_")[0]
        if prefix in owners:
            return prefix
    return None


def _name_of_slot(path: str, owners: Mapping[str, str], numbered: Numbered) -> str:
    flat = owner_of(path, owners)
    first, _, last = path.rpartition("/")
    optimizer = numbered((first or "optimizer").lower())
    return f"{optimizer}/{last.lower() if flat is None else owners[flat] + '/' + last[len(flat) + 1 :]}"
