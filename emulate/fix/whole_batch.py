"""Propose edits that give the replicas together what one device has: the whole batch, each example once, the same constants.

Most are one rule: what is computed from the examples of a replica is computed from those of all of them, and what depends on
the number or the index of a replica or host has the value that one device has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from emulate.fix.source import (
    Change,
    Names,
    Proposal,
    Site,
    Source,
    argument,
    calls_of,
    last_name,
    of_line,
    value_on_one_device,
)

_OVER_EXAMPLES = re.compile(r"reduce_\w+|tensordot")


@of_line
def gather(statement: cst.SimpleStatementLine, source: Source, names: Names) -> Iterator[Proposal]:
    """Give each reduction of a line the values of all replicas."""
    calls = [call for call in source.all(cst.Call, statement) if _OVER_EXAMPLES.fullmatch(last_name(call.func))]
    of_batch = [call for call in calls if last_name(call.func) == "tensordot" or _axis(source, call) in ("", "0")]
    given = [arg for call in of_batch for arg in call.args if arg.keyword is None]
    values = [arg.value for arg in given if not isinstance(arg.value, (cst.Integer, cst.Float))]
    inner = [one for one in values if not any(other is not one and source.holds(one, other) for other in values)]
    if inner:
        changes = tuple(source.replace(one, names.gathered(source.code(one))) for one in dict.fromkeys(inner))
        yield Proposal("Compute it from the examples of all replicas.", changes)


@of_line
def gather_pairs(statement: cst.SimpleStatementLine, source: Source, names: Names) -> Iterator[Proposal]:
    """Let each example meet those of all replicas: what is transposed, or has a new first axis, is gathered."""
    function = source.function(statement)
    others = [call.args[0].value for call in calls_of(source, ("transpose",), function) if call.args]
    products = [call for call in calls_of(source, ("matmul",), function) if argument(call, 3, "transpose_b") is not None]
    others += [second.value for call in products if (second := argument(call, 1, "b")) is not None]
    subscripts = source.all(cst.Subscript, function)
    others += [one.value for one in subscripts if re.search(r"\[\s*(None|\w+\.newaxis)\s*,\s*:\s*\]$", source.code(one))]
    if others:
        changes = tuple(source.replace(one, names.gathered(source.code(one))) for one in others)
        yield Proposal("Let each example meet the examples of all replicas.", changes)


def use_value_of_one_device(site: Site) -> Iterator[Proposal]:
    """Take numbers and indices of replicas and hosts out of a line, else out of its function: one at a time, then all."""
    source, statement = site.source, site.statement
    around = [] if statement is None else [statement, source.function(statement)]
    changes = next((some for node in around if (some := list(_numbers(source, node)))), [])
    for chosen in dict.fromkeys([*((change,) for change in changes), tuple(changes)] if changes else []):
        yield Proposal("Use the value of one device, whatever the number of replicas and hosts.", chosen)


def shard_once(site: Site) -> Iterator[Proposal]:
    """Remove a shard that the program takes: the strategy shards the dataset."""
    source = site.source
    for call in [] if site.statement is None else calls_of(source, ("shard",), site.statement):
        if isinstance(call.func, cst.Attribute) and site.statement is not None:
            dataset, line = source.code(call.func.value), site.statement
            is_all = source.code(line) == f"{dataset} = {source.code(call)}" and source.stands_alone(line)
            change = source.delete(line) if is_all else source.replace(call, dataset)
            yield Proposal("Do not shard by hand: the strategy shards the dataset.", (change,))


def shard(site: Site) -> Iterator[Proposal]:
    """Let the strategy shard a dataset, or each host take its batches."""
    source = site.source
    for policy in source.all(cst.Attribute):
        if source.code(policy).endswith("AutoShardPolicy.OFF"):
            text = source.code(policy).removesuffix("OFF") + "DATA"
            yield Proposal("Let the strategy shard the dataset, by data.", (source.replace(policy, text),))
    for call in calls_of(source, ("distribute_datasets_from_function",), source.module):
        name = source.code(call.args[0].value) if call.args else ""
        for function in source.all(cst.FunctionDef):
            parameters = function.params.params
            if function.name.value == name and parameters:
                context = parameters[0].name.value
                own = f".shard({context}.num_input_pipelines, {context}.input_pipeline_id)"
                ends = [one.value for one in source.all(cst.Return, function) if isinstance(one.value, (cst.Call, cst.Name))]
                changes = tuple(source.replace(one, source.code(one) + own) for one in ends)
                yield Proposal("Let each host take its share of the batches.", changes)


def reduce_all(site: Site) -> Iterator[Proposal]:
    """Reduce the results of all replicas where the first one's is taken."""
    source = site.source
    for one in source.all(cst.Subscript):
        call = one.value
        if not (isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute) and call.args):
            continue
        if call.func.attr.value == "experimental_local_results" and source.code(one).endswith("[0]"):
            strategy, value = source.code(call.func.value), source.code(call.args[0].value)
            for how in ("SUM", "MEAN"):
                words = f"Take the {how.lower()} of all replicas' results, instead of the first one's."
                text = f'{strategy}.reduce("{how}", {value}, axis=None)'
                yield Proposal(words, (source.replace(one, text),))


def aggregate_otherwise(site: Site) -> Iterator[Proposal]:
    """Change how a variable combines what the replicas assign to it."""
    source, tf = site.source, site.names.tf
    given = [arg for call in source.all(cst.Call) if (arg := argument(call, len(call.args), "aggregation")) is not None]
    for arg in given if tf is not None else []:
        for how in ("MEAN", "ONLY_FIRST_REPLICA", "SUM"):
            if last_name(arg.value) not in ("", how):
                words = f"Combine what the replicas assign to the variable by {how}."
                yield Proposal(words, (source.replace(arg.value, f"{tf}.VariableAggregation.{how}"),))


def keep_rows(site: Site) -> Iterator[Proposal]:
    """Give the optimizer a sparse gradient as the tape has it, or a dense one."""
    source, names = site.source, site.names
    for call in calls_of(source, ("IndexedSlices",), source.module):
        indices = argument(call, 1, "indices")
        if indices is not None and isinstance(indices.value, cst.Attribute):
            values, whole = argument(call, 0, "values"), source.code(indices.value.value)
            lines = [] if values is None else _only_for(source, source.code(values.value))
            words = "Give the optimizer the gradient as it is: the optimizer sums it, with its rows."
            yield Proposal(words, (*(source.delete(one) for one in lines), source.replace(call, whole)))
    for call in [] if names.tf is None else calls_of(source, ("gradient",), source.module):
        text = f"[{names.tf}.convert_to_tensor(each) for each in {source.code(call)}]"
        yield Proposal("Make the gradients dense: values of the same row are summed.", (source.replace(call, text),))


def use_all_devices(site: Site) -> Iterator[Proposal]:
    """Make a strategy that has all devices, or all hosts."""
    source = site.source
    for call in calls_of(source, ("MirroredStrategy", "OneDeviceStrategy"), source.module):
        for name in ("MirroredStrategy", "MultiWorkerMirroredStrategy"):
            made = source.code(call.func).removesuffix(last_name(call.func)) + name
            if f"{made}()" != source.code(call):
                yield Proposal(f"Make a strategy of all devices: {name}().", (source.replace(call, f"{made}()"),))


def _numbers(source: Source, within: cst.CSTNode) -> Iterator[Change]:
    """Yield the changes that give numbers and indices of replicas and hosts the value of one device."""
    for node in [*source.all(cst.Attribute, within), *source.all(cst.Name, within)]:
        parent, value = source.parent(node), value_on_one_device(source, node)
        if value is None or isinstance(parent, (cst.Attribute, cst.AssignTarget, cst.Param)):
            continue
        is_factor = isinstance(parent, cst.BinaryOperation) and isinstance(parent.operator, (cst.Multiply, cst.Divide))
        if is_factor and value == "1" and isinstance(parent, cst.BinaryOperation) and parent.right is node:
            yield Change(source.span(parent.left)[1], source.span(node)[1], "")
        else:
            yield source.replace(node, value)


def _only_for(source: Source, name: str) -> list[cst.SimpleStatementLine]:
    """Return the line that assigns a name which is used once."""
    attributes = [one.attr for one in source.all(cst.Attribute)]
    uses = [one for one in source.all(cst.Name) if one.value == name and not any(one is other for other in attributes)]
    lines = [source.statement(source.first_line(one)) for one in uses]
    return [one for one in lines[:1] if len(uses) == 2 and one is not None and source.stands_alone(one)]


def _axis(source: Source, call: cst.Call) -> str:
    axis = argument(call, 1, "axis")
    return "" if axis is None else source.code(axis.value)
