"""A fault is written as it is read, and one that cannot be meant is refused in words."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulate.errors import UsageError
from emulate.faults import EXAMPLES, KINDS, PHASES, Fault, Fired, Kill, Link, Stop, check_fired, check_for, parse, parse_all
from emulate.topology import Topology

SECONDS = st.floats(min_value=1e-6, max_value=1e6, allow_nan=False)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "host": st.integers(0, 99),
    "step": st.integers(1, 10**6),
    "phase": st.sampled_from(PHASES),
    "seconds": SECONDS,
    "factor": st.floats(min_value=1.001, max_value=1e6),
    "latency": st.floats(min_value=1e-6, max_value=5),
    "loss": st.floats(min_value=0, max_value=0.999),
}


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    kind = draw(st.sampled_from(sorted(KINDS)))
    known = {field.name: field for field in fields(KINDS[kind])}
    names = {name for name, field in known.items() if field.default is MISSING or draw(st.booleans())}
    if kind == "slow":
        names = (names - {"seconds", "factor", "phase"}) | {draw(st.sampled_from(["seconds", "factor"]))}
    if kind == "link":
        names |= {"latency"}
    return KINDS[kind](**{name: draw(VALUES[name]) for name in names})


@given(faults())
def test_a_fault_reads_back_what_it_writes(fault: Fault) -> None:
    assert parse(str(fault)) == fault


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_has_an_example_that_can_be_read_and_a_meaning(kind: str) -> None:
    assert parse(EXAMPLES[kind]).kind == kind
    assert KINDS[kind].meaning


def test_times_and_parts_may_have_units() -> None:
    assert parse("link:latency=20ms,loss=1%") == Link(latency=0.02, loss=0.01)
    assert parse("stop:host=0,seconds=2min") == Stop(host=0, seconds=120)
    assert str(parse("link:latency=20ms,loss=1%")) == "link:latency=20ms,loss=1%"
    assert parse(" kill: host = 1 , step = 5 ") == Kill(host=1, step=5)


def test_faults_come_as_texts_or_values_one_or_several() -> None:
    kill = Kill(host=1)
    assert parse_all("kill:host=1") == parse_all(kill) == parse_all([kill]) == parse_all(["kill:host=1"]) == (kill,)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kil:host=1", "A fault must begin with its kind. Received: fault='kil:host=1'. Did you mean 'kill'?"),
        ("kill:step=5", "A fault must say its host. Received: fault='kill:step=5'. Write it as in 'kill:host=1,step=5,"),
        (
            "kill:host=1,stp=5",
            "A kill takes host, step, phase. Received: fault='kill:host=1,stp=5', 'stp=5' in it. Did you mean",
        ),
        ("kill:host=one", "A fault's host must be a whole number. Received: fault='kill:host=one', 'host=one' in it."),
        ("kill:host=1,step=0", "Steps are counted from 1. Received: fault='kill:host=1,step=0'. Write it as in 'kill:"),
        ("kill:host=1,phase=now", "A phase must be one of input, before-all-reduce, all-reduce, after-all-reduce, checkpoint."),
        ("kill:host=-1", "Hosts are counted from 0. Received: fault='kill:host=-1'."),
        ("slow:host=1", "A slow host needs seconds or a factor, one of them. Received: fault='slow:host=1'."),
        ("slow:host=1,factor=1", "A slow host must have factor > 1. Received: fault='slow:host=1,factor=1'."),
        ("late:host=1", "A fault must say its seconds. Received: fault='late:host=1'."),
        ("late:host=1,seconds=0", "A late host must have seconds > 0. Received: fault='late:host=1,seconds=0'."),
        (
            "stop:host=1,seconds=-1",
            "A stop must have seconds > 0, or none to stop forever. Received: fault='stop:host=1,seconds=-1'.",
        ),
        ("stop:host=1,seconds=nan", "A fault's seconds must be a time. Received: fault='stop:host=1,seconds=nan',"),
        ("link:host=1", "A link must have a latency or a loss. Received: fault='link:host=1'."),
        ("link:latency=20", "A latency must be at most 5 s (a number without a unit is in seconds). Received: fault='link:lat"),
        (
            "kill:host=1,step=3,step=4",
            "A fault must say each of its values once. Received: fault='kill:host=1,step=3,step=4', w",
        ),
        ("link:loss=100%", "A loss must be from 0% to below 100%. Received: fault='link:loss=100%'."),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (Kill, {"host": "a"}, "A fault's host must be a whole number. Received: fault='kill:host=a'. Write it as in 'kill:"),
        (Kill, {"host": 1, "step": 1.5}, "A fault's step must be a whole number. Received: fault='kill:host=1,step=1.5'."),
        (Kill, {"host": 1, "phase": 3}, "A fault's phase must be a text. Received: fault='kill:host=1,phase=3'."),
        (Kill, {"host": None}, "A fault's host must be a whole number. Received: fault='kill:host=None'."),
        (Stop, {"host": 1, "seconds": "5"}, "A fault's seconds must be a number. Received: fault='stop:host=1,seconds=5'."),
        (Link, {"latency": "1ms"}, "A fault's latency must be a number. Received: fault='link:latency=1ms'."),
    ],
)
def test_a_value_of_another_kind_is_refused_in_words(kind: type[Fault], values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        kind(**values)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("text", "topology", "said"),
    [
        (
            "kill:host=2",
            "2x1",
            "The host of a fault must exist. Received: fault='kill:host=2', topology='2x1', which has",
        ),
        (
            "kill:host=1",
            "1x4",
            "The host of a fault must exist. Received: fault='kill:host=1', topology='1x4', which has host 0",
        ),
        (
            "link:loss=1%",
            "1x4",
            "A link needs several hosts. Received: fault='link:loss=1%', topology='1x4', which has one host.",
        ),
        (
            "missing:host=0",
            "1x4",
            "At least one host must start. Received: fault='missing:host=0', topology='1x4', which has one host.",
        ),
        (
            "kill:host=1",
            "1x1+1ps",
            "A fault in a step needs hosts that train synchronously. Received: fault='kill:host=1', topology=",
        ),
    ],
)
def test_a_fault_that_a_topology_cannot_have_is_refused_in_words(text: str, topology: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_for([parse(text)], Topology.parse(topology))
    assert str(caught.value).startswith(said)


def test_a_fault_that_never_came_to_pass_is_an_error() -> None:
    kill = Kill(host=1, step=50)
    check_fired([kill], [Fired(0, kill, 50)])
    with pytest.raises(UsageError) as caught:
        check_fired([kill], [])
    assert str(caught.value) == (
        "A fault must happen. Received: fault='kill:host=1,step=50', which did not happen: the program ended before "
        "(gpudist counts the steps of optimizers of Keras and TensorFlow). Use an earlier step or another phase."
    )


def test_what_came_to_pass_is_told_in_words() -> None:
    fired = Fired(0, Kill(host=1, step=5, phase="all-reduce"), 5)
    assert (
        str(fired)
        == "host 1 was killed in its step 5 (counted from 1), all-reduce (--fault kill:host=1,step=5,phase=all-reduce)"
    )
    assert str(Fired(0, Link(loss=0.5))) == "the links were made slow or lossy (--fault link:loss=50%)"
    assert math.isclose(parse("link:loss=50%").loss, 0.5)  # type: ignore[attr-defined]
