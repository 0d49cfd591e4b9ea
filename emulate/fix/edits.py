"""Propose edits for each cause: from a file's syntax tree and the lines of the finding, without a judgement of their own.

A proposal may be wrong: `loop.py` verifies each. They come in the order in which they are worth a verification: the smaller
and likelier edit first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import libcst as cst

from emulate.fix import whole_batch
from emulate.fix.source import (
    CORE,
    Change,
    Edit,
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

_MEANS = ("reduce_mean", "mean", "compute_average_loss")
_SUMS = ("reduce_sum", "sum", "count_nonzero")
_REDUCES = ("reduce", "all_reduce")
_DECREASED = "If the gradients are too small"


def propose(code: str, site: Site) -> Iterator[Proposal]:
    """Yield what may remove a cause at a line; nothing where gpudist has no edit for it.

    Args:
        code: The cause's.
        site: Where.

    Yields:
        Edits, the likeliest first.
    """
    for edit in EDITS.get(code, ()):
        yield from edit(site)


def _divide_by_replicas(site: Site) -> Iterator[Proposal]:
    """Divide a replica's mean, or the value that the line assigns, by the number of replicas."""
    statement, source, names = site.statement, site.source, site.names
    if statement is None or names.tf is None or _DECREASED in site.fixes:
        return
    words = "Divide the mean of the replica's examples by the number of replicas, as gradients are summed."
    for call in calls_of(source, _MEANS, statement):
        if argument(call, 1, "axis") is None:
            yield Proposal(words, (source.replace(call, f"{source.code(call)} / {names.replicas}"),))
    if (value := _assigned(statement)) is not None:
        words = "Divide the loss of the replica by the number of replicas, as gradients are summed."
        yield Proposal(words, (source.replace(value, f"{_operand(source, value)} / {names.replicas}"),))


def _divide_the_whole_loss(site: Site) -> Iterator[Proposal]:
    """Divide a loss of several terms by the number of replicas, where its last term is added."""
    statement, source, names = site.statement, site.source, site.names
    name = _target(statement)
    if statement is None or name is None or names.tf is None or _DECREASED in site.fixes:
        return
    lines = source.all(cst.SimpleStatementLine, source.function(statement))
    terms = [one for one in lines if isinstance(one.body[0], cst.AugAssign) and _target(one) == name]
    if terms and source.stands_alone(terms[-1]):
        words = "Divide the loss with all its terms by the number of replicas, as gradients are summed."
        yield Proposal(words, (source.after(terms[-1], f"{name} = {name} / {names.replicas}"),))


def _divide_once(site: Site) -> Iterator[Proposal]:
    """Remove a division by the number of replicas, or a mean over them."""
    statement, source = site.statement, site.source
    if statement is None or _DECREASED not in site.fixes:
        return
    for division in _divisions_by_replicas(source, [statement, source.function(statement)]):
        words = "Remove the division by the number of replicas: the loss is divided already."
        yield Proposal(words, (_without_divisor(source, division),))
    yield from _sum_instead_of_mean(site)


@of_line
def _count_over_replicas(statement: cst.SimpleStatementLine, source: Source, names: Names) -> Iterator[Proposal]:
    """Sum a divisor over the replicas, and remove the division by their number, which is then too much."""
    for call in _divisors(source, statement):
        whole = source.replace(call, names.all_reduced(source.code(call)))
        uses = [statement, *_uses(source, statement)]
        divisions = [_without_divisor(source, one) for one in _divisions_by_replicas(source, uses)]
        more = " Then do not divide by the number of replicas." if divisions else ""
        yield Proposal(f"Divide by the count of all replicas.{more}", (whole, *divisions))
        average = source.replace(call, names.all_reduced(source.code(call), "MEAN"))
        yield Proposal("Divide by the mean of the replicas' counts.", (average,))


@of_line
def _divide_by_all_examples(statement: cst.SimpleStatementLine, source: Source, names: Names) -> Iterator[Proposal]:
    """Divide a sum by the number of values on all replicas, instead of a mean by a share."""
    for call in calls_of(source, _MEANS, statement):
        if not call.args or not source.stands_alone(statement):
            continue
        values = source.code(call.args[0].value)
        is_name = isinstance(call.args[0].value, cst.Name)
        name = values if is_name else _unused_name(source, "values")
        made = () if is_name else (source.before(statement, f"{name} = {values}"),)
        count = _unused_name(source, "count")
        whole = names.all_reduced(f"{names.tf}.cast({names.tf}.size({name}), {name}.dtype)")
        counted = source.before(statement, f"{count} = {whole}")
        divided = source.replace(call, f"{names.tf}.reduce_sum({name}) / {count}")
        divisions = [_without_divisor(source, one) for one in _divisions_by_replicas(source, [statement])]
        yield Proposal("Divide the sum by the number of examples on all replicas.", (*made, counted, divided, *divisions))


@of_line
def _scale_regularization(statement: cst.SimpleStatementLine, source: Source, names: Names) -> Iterator[Proposal]:
    """Give each replica its share of a term that all replicas have."""
    words = "Divide the regularization term by the number of replicas: each replica adds its share."
    values = [call for call in source.all(cst.Call, statement) if _is_regularization(source, call)]
    if isinstance(statement.body[0], cst.AugAssign):
        values.insert(0, statement.body[0].value)  # type: ignore[arg-type]
    for value in values:
        yield Proposal(words, (source.replace(value, f"{names.tf}.nn.scale_regularization_loss({source.code(value)})"),))
        yield Proposal(words, (source.replace(value, f"{_operand(source, value)} / {names.replicas}"),))
    for term in [one.right for one in source.all(cst.BinaryOperation, statement) if isinstance(one.operator, cst.Add)]:
        yield Proposal(words, (source.replace(term, f"{_operand(source, term)} / {names.replicas}"),))


@of_line
def _clip_the_sum(statement: cst.SimpleStatementLine, source: Source, names: Names) -> Iterator[Proposal]:
    """Sum the gradients, clip the sum, and give the optimizer, which sums again, an equal share."""
    if not source.stands_alone(statement):
        return
    given, result = _clipped(statement)
    if given is None or result is None:
        return
    whole = names.all_reduced(source.code(given))
    summed = (
        source.before(statement, f"{source.code(given)} = {whole}")
        if isinstance(given, cst.Name)
        else source.replace(given, whole)
    )
    divided = source.after(statement, f"{result} = [each / {names.replicas} for each in {result}]")
    yield Proposal("Sum the gradients over the replicas, clip the sum, and give each replica its share.", (summed, divided))


@of_line
def _sum_gradients(statement: cst.SimpleStatementLine, source: Source, names: Names) -> Iterator[Proposal]:
    """Sum the gradients over the replicas where the tape gives them."""
    for taken in calls_of(source, ("gradient",), source.function(statement)):
        for how, words in (("SUM", "Sum"), ("MEAN", "Average")):
            summed = names.all_reduced(source.code(taken), how)
            yield Proposal(f"{words} the gradients over the replicas.", (source.replace(taken, summed),))


def _sum_once(site: Site) -> Iterator[Proposal]:
    """Remove an all-reduce of gradients that are summed elsewhere, too."""
    statement, source = site.statement, site.source
    if statement is None:
        return
    for call in calls_of(source, ("all_reduce",), source.function(statement)):
        value = argument(call, 1, "value")
        if value is None:
            continue
        change = _left(source, call, value.value) or source.replace(call, source.code(value.value))
        yield Proposal("Remove the all-reduce: the optimizer sums the gradients.", (change,))


def _sum_instead_of_mean(site: Site) -> Iterator[Proposal]:
    """Exchange SUM and MEAN where results of the replicas are reduced."""
    statement, source = site.statement, site.source
    near = [] if statement is None else calls_of(source, _REDUCES, statement)
    for call in dict.fromkeys([*near, *calls_of(source, _REDUCES, source.module)]):
        how = argument(call, 0, "reduce_op")
        written = "" if how is None else source.code(how.value)
        for old, new in (("MEAN", "SUM"), ("SUM", "MEAN")):
            if how is not None and old in written:
                words = f"Reduce the replicas' results with {new}, as the loss is divided."
                yield Proposal(words, (source.replace(how.value, written.replace(old, new)),))


@of_line
def _report_the_whole(statement: cst.SimpleStatementLine, source: Source, names: Names) -> Iterator[Proposal]:
    """Report the loss of all replicas where a training step updates a metric or returns its own."""
    for call in calls_of(source, ("update_state",), statement):
        if call.args:
            value = call.args[0].value
            text = f"{_operand(source, value)} * {names.tf}.distribute.get_strategy().num_replicas_in_sync"
            yield Proposal(
                "Report the loss times the number of replicas, by which it is divided.", (source.replace(value, text),)
            )
    for element in source.all(cst.DictElement, statement):
        for how in ("MEAN", "SUM"):
            text = names.all_reduced(source.code(element.value), how)
            yield Proposal("Report the loss of all replicas.", (source.replace(element.value, text),))


def _seed(site: Site) -> Iterator[Proposal]:
    """Give a seed to what draws without one."""
    statement, source = site.statement, site.source
    if statement is None:
        return
    for call in calls_of(source, ("default_rng", "RandomState", "Random"), statement):
        if not call.args:
            yield Proposal("Seed the generator.", (source.replace(call, f"{source.code(call.func)}(0)"),))
    for call in calls_of(source, ("from_non_deterministic_state",), statement):
        seeded = source.code(call.func).replace("from_non_deterministic_state", "from_seed")
        yield Proposal("Seed the generator.", (source.replace(call, f"{seeded}(0)"),))
    for call in calls_of(source, ("shuffle",), statement):
        if argument(call, 1, "seed") is None:
            yield Proposal("Seed the shuffle.", (_with_argument(source, call, "seed=0"),))


def _synchronize(site: Site) -> Iterator[Proposal]:
    """Let batch normalization use the statistics of the whole batch."""
    source = site.source
    layers = [
        call
        for call in calls_of(source, ("BatchNormalization",), source.module)
        if not any(arg.keyword is not None and arg.keyword.value == "synchronized" for arg in call.args)
    ]
    if layers:
        changes = tuple(_with_argument(source, call, "synchronized=True") for call in layers)
        yield Proposal("Normalize with the statistics of the whole batch.", changes)


def _distribute(site: Site) -> Iterator[Proposal]:
    """Let gpudist_core train the compiled model."""
    source, names = site.source, site.names
    for call in calls_of(source, ("compile",), source.module):
        statement = source.statement(source.first_line(call))
        if not isinstance(call.func, cst.Attribute) or statement is None or not source.stands_alone(statement):
            continue
        model, core = source.code(call.func.value), names.core or "gd"
        wrapped = source.before(statement, f"{model} = {core}.distributed({model})")
        imports = [] if names.core else _import_of(source, "import gpudist_core as gd")
        words = "Let gd.distributed divide by the examples of all replicas, and clip and report what all of them have."
        yield Proposal(words, (*imports, wrapped), CORE)


def without_shuffle(source: Source) -> list[Change]:
    """Return the changes under which nothing shuffles: neither datasets, nor what makes them, nor the `fit` of Keras.

    Args:
        source: The file.

    Returns:
        The changes, which do not overlap.
    """
    changes = []
    compiled = {source.code(call.func) for call in calls_of(source, ("compile",), source.module)}
    for call in source.all(cst.Call):
        name = last_name(call.func)
        given = {arg.keyword.value: arg.value for arg in call.args if arg.keyword is not None}
        is_compiled = source.code(call.func).removesuffix("fit") + "compile" in compiled
        is_of_keras = name == "fit" and (is_compiled or not _OF_KERAS_FIT.isdisjoint(given))
        if "shuffle" in given:
            changes.append(source.replace(given["shuffle"], "False"))
        elif is_of_keras or name.endswith("_dataset_from_directory"):
            changes.append(_with_argument(source, call, "shuffle=False"))
        elif name == "shuffle" and isinstance(call.func, cst.Attribute) and last_name(call.func.value) != "random":
            changes.append(Change(source.span(call.func.value)[1], source.span(call)[1], ""))
    return changes


_OF_KERAS_FIT = {"batch_size", "callbacks", "epochs", "validation_data", "validation_split", "verbose"}


EDITS: dict[str, tuple[Edit, ...]] = {
    "accumulation": (whole_batch.aggregate_otherwise,),
    "batchnorm-local-statistics": (_synchronize,),
    "clip-before-reduce": (_clip_the_sum, _distribute),
    "depends-on-replicas": (whole_batch.use_value_of_one_device, whole_batch.reduce_all),
    "double-all-reduce": (_sum_once, _divide_once),
    "empty-shard": (_divide_by_all_examples, _distribute),
    "framework-limit": (_distribute,),
    "in-batch-negatives": (whole_batch.gather_pairs, whole_batch.gather),
    "initial-weights": (whole_batch.use_value_of_one_device,),
    "local-normalization": (_count_over_replicas, _divide_by_all_examples, _distribute),
    "loss-report": (whole_batch.reduce_all, _sum_instead_of_mean, _report_the_whole, _distribute),
    "loss-scaling": (_divide_by_replicas, _divide_the_whole_loss, _divide_once, _distribute),
    "missing-all-reduce": (_sum_gradients, whole_batch.reduce_all),
    "regularization-per-replica": (_scale_regularization,),
    "replicas-missing": (whole_batch.use_all_devices,),
    "samples-missing": (whole_batch.shard_once, whole_batch.use_value_of_one_device),
    "samples-repeated": (whole_batch.use_value_of_one_device, whole_batch.shard),
    "sparse-gradient": (whole_batch.keep_rows, _distribute),
    "uneven-batch": (_divide_by_all_examples, _count_over_replicas, _distribute),
    "unseeded-hosts": (_seed,),
    "unseeded-randomness": (_seed,),
    "update-scaling": (whole_batch.use_value_of_one_device,),
    "variable-aggregation": (whole_batch.aggregate_otherwise,),
}
"""The edits of each cause."""


def _assigned(statement: cst.SimpleStatementLine) -> cst.BaseExpression | None:
    """Return the value that a statement assigns, adds or returns."""
    return statement.body[0].value if isinstance(statement.body[0], (cst.Assign, cst.AugAssign, cst.Return)) else None


def _target(statement: cst.SimpleStatementLine | None) -> str | None:
    """Return the one name that a statement assigns or adds to."""
    assign = None if statement is None else statement.body[0]
    target = assign.targets[0].target if isinstance(assign, cst.Assign) else getattr(assign, "target", None)
    return target.value if isinstance(target, cst.Name) else None


def _operand(source: Source, value: cst.CSTNode) -> str:
    """Return an expression as it can be divided: in parentheses where it is an operation."""
    text = source.code(value)
    is_open = isinstance(value, (cst.BinaryOperation, cst.IfExp, cst.UnaryOperation)) and not value.lpar
    return f"({text})" if is_open else text


def _divisions_by_replicas(source: Source, within: Iterable[cst.CSTNode]) -> list[cst.BinaryOperation]:
    operations = [one for node in within for one in source.all(cst.BinaryOperation, node)]
    divisions = [
        one for one in operations if isinstance(one.operator, cst.Divide) and value_on_one_device(source, one.right) == "1"
    ]
    return list(dict.fromkeys(divisions))


def _without_divisor(source: Source, division: cst.BinaryOperation) -> Change:
    """Return the change that leaves the dividend of a division: what stands behind it goes, or all of `loss = loss / n`."""
    return _left(source, division, division.left) or Change(source.span(division.left)[1], source.span(division.right)[1], "")


def _left(source: Source, value: cst.BaseExpression, part: cst.BaseExpression) -> Change | None:
    """Return the change that removes the line in which a name gets this value, of which the name itself would be left."""
    line = source.statement(source.first_line(value))
    is_all = line is not None and _assigned(line) is value and _target(line) == source.code(part) and source.stands_alone(line)
    return source.delete(line) if is_all and line is not None else None


def _divisors(source: Source, statement: cst.SimpleStatementLine) -> list[cst.Call]:
    """Return the sums in a statement that something is divided by; else its sums, else what it assigns, but a history."""
    divided = [one.right for one in source.all(cst.BinaryOperation, statement) if isinstance(one.operator, cst.Divide)]
    by_call = calls_of(source, ("divide_no_nan", "divide", "truediv"), statement)
    divided += [given.value for call in by_call if (given := argument(call, 1, "y")) is not None]
    sums = [call for right in divided for call in calls_of(source, _SUMS, right)]
    value = _assigned(statement)
    whole = [value] if isinstance(value, cst.Call) and last_name(value.func) != "fit" else []
    return list(dict.fromkeys(sums)) or calls_of(source, _SUMS, statement) or whole


def _uses(source: Source, statement: cst.SimpleStatementLine) -> list[cst.SimpleStatementLine]:
    """Return the statements of its function that use the name that a statement assigns."""
    target = _target(statement)
    if target is None:
        return []
    others = source.all(cst.SimpleStatementLine, source.function(statement))
    return [one for one in others if any(name.value == target for name in source.all(cst.Name, one)) and one is not statement]


def _is_regularization(source: Source, call: cst.Call) -> bool:
    inner = {last_name(node) for node in source.all(cst.BaseExpression, call)}  # type: ignore[type-abstract]
    return bool(inner & {"losses", "l2_loss", "trainable_variables", "trainable_weights"})


def _clipped(statement: cst.SimpleStatementLine) -> tuple[cst.BaseExpression | None, str | None]:
    """Return which gradients a statement clips, and the name that it gives to the result."""
    assign = statement.body[0]
    if not isinstance(assign, cst.Assign):
        return None, None
    target, value = assign.targets[0].target, assign.value
    first = target.elements[0].value if isinstance(target, cst.Tuple) else target
    result = first.value if isinstance(first, cst.Name) else None
    if isinstance(value, (cst.ListComp, cst.GeneratorExp)):
        return value.for_in.iter, result
    return (value.args[0].value, result) if isinstance(value, cst.Call) and value.args else (None, None)


def _unused_name(source: Source, wish: str) -> str:
    taken = {name.value for name in source.all(cst.Name)}
    return next(name for name in (wish, *(f"{wish}_{k}" for k in range(1, 1000))) if name not in taken)


def _with_argument(source: Source, call: cst.Call, text: str) -> Change:
    """Return the change that adds a keyword argument behind a call's own."""
    if not call.args:
        return source.replace(call, f"{source.code(call.func)}({text})")
    end = source.span(call.args[-1].value)[1]
    return Change(end, end, f", {text}")


def _import_of(source: Source, line: str) -> list[Change]:
    """Return the change that adds an import behind those at the top level."""
    imports = [*source.all(cst.Import), *source.all(cst.ImportFrom)]
    lines = [source.statement(source.first_line(one)) for one in imports if isinstance(source.function(one), cst.Module)]
    alone = [one for one in lines if one is not None and isinstance(source.parent(one), cst.Module)]
    return [source.after(max(alone, key=source.first_line), line)] if alone else []
