"""Observe random draws inside a step, and make them depend on the example in comparison runs.

Dropout masks and noise follow a row's position in the batch and, in some strategies, the replica: neither a permuted nor a
sharded batch would draw the same. So a draw of shape [rows, ...] is replaced by one that depends on the seed, the place in the
program and the contents of the row alone (`recorder/row_keys.py`); a draw without the batch's leading dimension by one of seed
and place. What the program draws by itself is made besides and recorded, so that one run shows both. Only what replicas draw
for something else than rows (a coin for the whole batch, its negatives, the noise of a gradient) can make a difference that is
gone then: for it a run is made with own draws, which shows whether the replicas draw the same (`judge.py` says so).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
import zlib
from collections.abc import Callable
from typing import Any

from emulate import upstream
from emulate.imports import tf
from emulate.interventions import distributions
from emulate.point import around, caller, program_caller
from emulate.recorder import Body, Recorder, current_body
from emulate.recorder.rng_streams import Streams
from emulate.recorder.row_keys import DRAWN, mixed
from gpudist_core.state import PerThread

SAMPLE = 8
"""So many numbers of a draw are kept: independent draws never agree in them, and a share of few rows has as many."""
_bypass = PerThread(False)


def install(recorder: Recorder) -> None:
    """Wrap the ops behind every draw."""
    for module, name, distribution in upstream.random_ops():
        _wrap(module, name, functools.partial(_draw, recorder, distribution))
    for module, name in upstream.shuffles():
        _wrap(module, name, functools.partial(_draw_whole, recorder, _shuffled))
    for module, name in upstream.candidate_samplers():
        _wrap(module, name, functools.partial(_draw_whole, recorder, _candidates))
    for module, name, generator in upstream.python_draws():
        _wrap(module, name, functools.partial(_draw_in_python, recorder, generator))

    @around(type(tf.Variable), "__call__")
    def create(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        with unwatched():  # a variable's initial value, drawn in the first step on one replica, is no draw of the step
            return original(cls, *args, **kwargs)


def _wrap(module: Any, name: str, drawn: Callable[..., Any]) -> None:
    """Let `drawn` draw in a replica's step: it gets what is wrapped, the replica's call, the draw's number and arguments."""

    @around(module, name)
    def draw(original: Any, *args: Any, **kwargs: Any) -> Any:
        body = current_body()
        if body is None or are_unwatched():
            return original(*args, **kwargs)
        body.num_draws += 1
        return drawn(original, body, body.num_draws - 1, args, kwargs)


def _draw(recorder: Recorder, distribution: str, original: Any, body: Body, place: int, args: Any, kwargs: Any) -> Any:
    """Draw numbers that may be for rows."""
    template = original(*args, **kwargs)
    # A few whole numbers may be the same on replicas by chance.
    may_be_same = distribution in distributions.WHOLE or not template.dtype.is_floating
    of_rows = _sample(template, body.number if may_be_same else None)
    _observe(recorder, body, place, template, of_rows, of_parts=_is_of_parts(template))
    _count_rows(recorder, body, template, place)
    if recorder.plan.own_draws:
        return template
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if distribution == "categorical":
        drawn = _categorical(recorder, body, template, place, given)
    else:
        drawn = _keyed(recorder, body, template, place, distribution, given)
    return tf.identity(drawn, DRAWN)


def _draw_whole(recorder: Recorder, replace: Any, original: Any, body: Body, place: int, args: Any, kwargs: Any) -> Any:
    """Draw for a batch as a whole; in comparison runs by `replace`, which gets the operation and its arguments."""
    own = original(*args, **kwargs)
    # Of a shuffle that there was one: whether replicas draw the same says nothing of their rows.
    of_rows = None if isinstance(own, tuple) else tf.cast(tf.reshape(body.number, [1]), tf.int64)
    _observe(recorder, body, place, own if of_rows is not None else own[0], of_rows)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    return own if recorder.plan.own_draws else replace(recorder, body, place, original, given)


def _draw_in_python(recorder: Recorder, generator: Any, original: Any, body: Body, place: int, args: Any, kwargs: Any) -> Any:
    """Draw from a global generator of Python or NumPy; in comparison runs from one of seed and place."""
    if program_caller(caller()) is None:
        body.num_draws -= 1  # a library's, for the seed of a layer that it builds on the first replica
        return original(*args, **kwargs)
    draw = original if recorder.plan.own_draws else getattr(generator(recorder.plan.seed + place), original.__name__)
    drawn = draw(*args, **kwargs)
    sample = zlib.crc32(repr((drawn, args)).encode())  # a shuffle changes what it is given
    _observe(recorder, body, place, tf.constant(sample, tf.int64), None)
    return drawn


def _observe(recorder: Recorder, body: Body, place: int, value: Any, of_rows: Any, *, of_parts: bool = False) -> None:
    """Record a sample of what the program draws, also where others take its place: two runs must make the same.

    Args:
        recorder: What records.
        body: The replica's call.
        place: The number of the draw in it.
        value: What is drawn.
        of_rows: The sample if it is drawn for rows; None where it never is.
        of_parts: Whether it may be drawn for parts of the batch that the step has joined.
    """
    key: tuple[Any, ...] = ("draw", len(body.draws))
    if of_rows is None or _is_of_all_rows(body, value, place, of_parts=of_parts):
        key, of_rows = ("draw", f"{_named(body, place)} {value.shape}"), _sample(value, None)
        recorder.facts.own_draws = True
        recorder.lines.note_call("draw", {"of": key[1]})
    if body.is_here():
        body.draws.append((key, of_rows))


def _is_of_all_rows(body: Body, value: Any, place: int, *, of_parts: bool) -> bool:
    """Return whether a draw is for the batch as a whole: it has no entry for each example that the step or a layer has."""
    if value.shape.rank == 0:
        return True
    rows = [*(tensor for _, tensor in body.inputs), *(body.row_keys.in_hand if body.row_keys is not None else ())]
    numbers = {tensor.shape[0] for tensor in rows if tensor.shape.rank}
    is_known = bool(numbers) and bool(value.shape.is_fully_defined())
    are_parts = of_parts and is_known and any(number and value.shape[0] % number == 0 for number in numbers)
    return (is_known and value.shape[0] not in numbers and not are_parts) or _is_of_a_weight(body, value, place)


def _candidates(recorder: Recorder, body: Body, place: int, original: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Draw the same candidates on each replica in each step (for a sampled softmax, noise contrastive estimation).

    The operation goes on from its last draw each time that it runs, so it runs once here, for the true classes that any example
    may have: what it expects of them depends on the draw.
    """
    number, seed = given.get("range_max", 0), recorder.plan.seed & 0x7FFFFFFF
    if not 0 < number <= 1 << 24:  # all candidates are none that is drawn; a table of more classes takes much memory
        return original(**given)
    with tf.init_scope():
        every = {"true_classes": tf.range(number, dtype=tf.int64)[None], "num_true": number}
        drawn, of_true, of_drawn = original(**{**given, **every, "seed": seed + 1, "seed2": place + 1})
    return tf.identity(drawn), tf.gather(of_true[0], given["true_classes"]), tf.identity(of_drawn)


def _shuffled(recorder: Recorder, body: Body, place: int, original: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Shuffle by keys: each example moves to the place of the next larger key, so the pairs do not depend on the order."""
    value = tf.convert_to_tensor(given["value"])
    if value.shape.rank == 0:
        return value
    shape = tf.shape(value)[:1]
    of_place = tf.cast(_bits(recorder, body, tf.range(shape[0]), shape, place, for_rows=False), tf.int64)
    if body.row_keys is None:
        order = tf.argsort(of_place)
        return tf.gather(value, order)
    in_hand, place_of_rows = body.row_keys.at(place)
    of_rows = tf.cast(mixed(in_hand + _salt(recorder, place_of_rows)), tf.int64)
    keys = tf.cond(tf.equal(shape[0], tf.shape(of_rows)[0]), lambda: of_rows, lambda: of_place)
    order = tf.argsort(keys, stable=True)
    shuffled = tf.gather(value, tf.gather(tf.roll(order, -1, 0), tf.argsort(order)))
    shuffled.set_shape(value.shape)
    return shuffled


def _count_rows(recorder: Recorder, body: Body, value: Any, place: int) -> None:
    """Count the examples that a function draws itself, because it gets none."""
    if body.inputs or not value.shape.rank or value.shape[0] is None or _is_of_a_weight(body, value, place):
        return
    recorder.facts.drawn[_named(body, place)] = int(value.shape[0])


def _named(body: Body, place: int) -> str:
    return f"{body.label} {place}"


def unwatched() -> contextlib.AbstractContextManager[bool]:
    """Leave draws of this thread in the block unobserved and unchanged."""
    return _bypass.set(True)


def are_unwatched() -> bool:
    """Return whether this thread makes draws that are not the program's."""
    return _bypass.value


def _is_of_a_weight(body: Body, value: Any, place: int) -> bool:
    """Return whether the step itself, and no layer, draws in the shape of a weight that it trains.

    A weight may have as many rows as the batch: then it is one where the gradients that a tape gave have that shape in turn.
    """
    if body.layer_depth or not value.shape.rank or not value.shape.is_fully_defined():
        return False
    taped = [variable for _, variables in body.tape for variable in variables]
    weights = [*taped, *(weight for model in body.models.values() for weight in getattr(model, "trainable_variables", ()))]
    if not any(tuple(weight.shape) == tuple(value.shape) for weight in weights):
        return False
    may_be_rows = any(tensor.shape.rank and tensor.shape[0] == value.shape[0] for _, tensor in body.inputs)
    if not may_be_rows:
        return True
    variables, before = body.last_tape
    turn = place - before
    return turn < len(variables) and tuple(variables[turn].shape) == tuple(value.shape)


def _sample(value: Any, owner: Any) -> Any:
    """Return a sample of what was drawn. With an owner it differs between replicas."""
    sample = tf.reshape(value, [-1])[:SAMPLE]
    if owner is None:
        return sample
    dtype = value.dtype if value.dtype.is_floating else tf.int64
    return tf.concat([tf.cast(tf.reshape(owner, [1]), dtype), tf.cast(sample, dtype)], 0)


def _keyed(recorder: Recorder, body: Body, template: Any, place: int, distribution: str, given: dict[str, Any]) -> Any:
    """Draw with the template's shape and type, as a function of seed, place and example."""
    for_rows = template.shape.rank != 0 and not _is_of_a_weight(body, template, place)
    shape, columns = tf.shape(template), distributions.COLUMNS.get(distribution)
    bits = _bits(recorder, body, template, tf.concat([shape, [columns]], 0) if columns else shape, place, for_rows=for_rows)
    drawn = distributions.draws_made_of(bits, distribution, given, template.dtype)
    drawn.set_shape(template.shape)
    return drawn


def _categorical(recorder: Recorder, body: Body, template: Any, place: int, given: dict[str, Any]) -> Any:
    """Draw classes: add Gumbel noise to the logits (Gumbel 1954) and take the largest. The template is (rows, samples)."""
    logits = tf.cast(given["logits"], tf.float32)
    shape = tf.concat([tf.shape(template), tf.shape(logits)[1:]], 0)
    uniform = distributions.uniform(_bits(recorder, body, template, shape, place)) * (1.0 - 2e-7) + 1e-7
    drawn = tf.argmax(logits[:, None, :] - tf.math.log(-tf.math.log(uniform)), axis=-1, output_type=template.dtype)
    drawn.set_shape(template.shape)
    return drawn


def _bits(recorder: Recorder, body: Body, template: Any, shape: Any, place: int, *, for_rows: bool = True) -> Any:
    """Random bits of a shape: of the rows where it is for them, its first dimension the batch's; else of the place alone.

    Where replicas that are given no rows make together as many as the reference, each makes its part of the same.
    """
    size = tf.reduce_prod(shape)

    def by_place() -> Any:
        numbers = size * _part(recorder, body, template, place) + tf.range(size)
        return mixed(mixed(tf.cast(numbers, tf.uint32)) + _salt(recorder, place))

    if body.row_keys is None or not shape.shape[0] or not for_rows:
        return tf.reshape(by_place(), shape)
    keys, place_of_rows = body.row_keys.at(place)
    number = tf.shape(keys)[0]
    parts = shape[0] // tf.maximum(number, 1) if _is_of_parts(template) else 1

    def by_row() -> Any:
        columns = tf.cast(tf.range(size // tf.maximum(number * parts, 1)), tf.uint32)
        part = tf.cast(tf.repeat(tf.range(parts), number), tf.uint32)  # the first part has the bits of a draw without parts
        of_rows = mixed(tf.tile(keys, [parts]) + part * 0x9E3779B1 + _salt(recorder, place_of_rows))
        return tf.reshape(mixed(of_rows[:, None] + mixed(columns)[None, :]), [-1])

    matches = tf.logical_and(tf.equal(shape[0], number * parts), tf.greater(number, 0))
    return tf.reshape(tf.cond(matches, by_row, by_place), shape)


_joined: weakref.WeakKeyDictionary[Any, tuple[int, set[int | None]]] = weakref.WeakKeyDictionary()
"""How many operations of a graph were seen, and the lengths of what they have joined one after the other. A vector may be
a shape."""


def _is_of_parts(template: Any) -> bool:
    """Return whether a draw may be for parts that its graph has joined one after the other: fake and real, or two views."""
    if isinstance(template, tf.__internal__.EagerTensor):
        return False
    graph, length = template.graph, template.shape[0] if template.shape.rank else None
    seen, lengths = _joined.get(graph, (0, set()))
    operations = graph.get_operations()
    for op in operations[seen:]:  # each once: a large graph has many draws
        if op.type == "ConcatV2" and (op.outputs[0].shape.rank or 0) > 1 and tf.get_static_value(op.inputs[-1]) == 0:
            lengths.add(op.outputs[0].shape[0])
    _joined[graph] = len(operations), lengths
    return length in lengths


def _salt(recorder: Recorder, place: Any) -> Any:
    """Return what a draw at a place, a number or a tensor of 64 bits, begins with."""
    first = tf.constant((recorder.plan.seed * 0x9E3779B1 + 1) & 0xFFFFFFFF, tf.int64)
    return tf.cast(tf.math.floormod(first + tf.cast(place, tf.int64) * 0x85EBCA77, 1 << 32), tf.uint32)


def _part(recorder: Recorder, body: Body, template: Any, place: int) -> Any:
    """Return which part of the replicas' common draw belongs to this replica; the first if each draws all."""
    rows = recorder.plan.drawn.get(_named(body, place))
    context = tf.distribute.get_replica_context()
    if rows is None or context is None or not template.shape.rank or template.shape[0] is None:
        return 0
    return body.number if int(template.shape[0]) * int(context.num_replicas_in_sync) == rows else 0


def see_generators(streams: Streams) -> None:
    """Have each generator that `numpy.random.default_rng` makes followed."""
    import numpy as np

    @around(np.random, "default_rng")
    def default_rng(original: Any, seed: Any = None) -> Any:
        generator = original(seed)
        streams.made(seed, generator, caller())
        return generator
