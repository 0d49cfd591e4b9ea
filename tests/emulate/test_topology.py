"""A topology is what was written, and says what is wrong with what was not one."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulate.errors import UsageError
from emulate.topology import MAX_DEVICES_PER_HOST, MAX_HOSTS, REFERENCE, Topology

topologies = st.builds(Topology, st.integers(1, MAX_HOSTS), st.integers(1, MAX_DEVICES_PER_HOST), st.integers(0, MAX_HOSTS))


@given(topologies)
def test_parsing_is_the_inverse_of_printing(topology):
    assert Topology.parse(str(topology)) == topology


@given(topologies)
def test_printing_is_the_inverse_of_parsing(topology):
    text = f"{topology.num_hosts}x{topology.num_devices}" + (f"+{topology.num_ps}ps" if topology.num_ps else "")
    assert str(Topology.parse(text)) == text


@given(st.text(max_size=12).filter(lambda text: not re.fullmatch(r"[0-9]+x[0-9]+(\+[0-9]+ps)?", text.strip())))
def test_any_other_text_is_a_wrong_use_that_shows_it(text):
    with pytest.raises(UsageError, match=r"Received: topology=.* Write it as HxD"):
        Topology.parse(text)


def test_a_topology_parses_to_itself():
    topology = Topology(2, 4)
    assert Topology.parse(topology) is topology


@pytest.mark.parametrize(
    ("text", "replicas", "several"),
    [("1x4", 4, False), ("2x2", 4, True), ("3x1+2ps", 3, True), ("1x1", 1, False), ("1x2+1ps", 2, True)],
)
def test_replicas_and_hosts_follow_from_the_shape(text, replicas, several):
    topology = Topology.parse(text)
    assert (topology.num_replicas, topology.has_several_hosts) == (replicas, several)


def test_the_reference_is_one_device():
    assert str(REFERENCE) == "1x1"


@pytest.mark.parametrize(
    "text", ["", "4", "x4", "2x", "2X2", "2x2x2", "2x2ps", "2x2+ps", "-1x4", "1.5x2", "2 x 2", "zwei", "٢x2"]
)
def test_a_wrong_form_names_the_right_one(text):
    with pytest.raises(
        UsageError, match=r"A topology has the form HxD or HxD\+Pps\. Received: topology=.*'1x4' or '2x2'.*'3x1\+2ps'"
    ):
        Topology.parse(text)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        *((text, "Did you mean '1x4'? Write") for text in ("1X4", "1*4", "1 x 4", "1\u00d74", "1,4", "1:4", "1x4+ps", "1x4x1")),
        ("1x4,2x2", "Give each topology by itself: --topology 1x4 --topology 2x2. Write"),
        ("1x4 2X2", "Give each topology by itself: --topology 1x4 --topology 2x2. Write"),
        ("4", "Did you mean '1x4' (one host with 4 devices) or '4x1' (4 hosts with one device)? Write"),
        ("2x2+1", "Did you mean '2x2+1ps'? Write"),
        *((text, f"topology='{text}'. Write") for text in ("-1x4", "1.5x2", "x4", "four")),
    ],
)
def test_a_near_miss_gets_the_topology_that_was_meant(text, hint):
    with pytest.raises(UsageError, match=re.escape(hint)):
        Topology.parse(text)


@pytest.mark.parametrize("value", [None, 4, (2, 2)])
def test_what_is_not_text_is_a_wrong_use(value):
    with pytest.raises(UsageError, match="A topology has the form HxD"):
        Topology.parse(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0x4", "A topology has 1 to 64 hosts. Received: topology='0x4' with 0 hosts."),
        ("4x0", "A topology has 1 to 256 devices per host. Received: topology='4x0' with 0 devices per host."),
        ("1x100000", "A topology has 1 to 256 devices per host. Received: topology='1x100000' with 100000 devices per host."),
        ("65x1", "A topology has 1 to 64 hosts. Received: topology='65x1' with 65 hosts."),
        ("1x1+99ps", "A topology has 0 to 64 parameter servers. Received: topology='1x1+99ps' with 99 parameter servers."),
    ],
)
def test_a_number_out_of_range_is_named_with_its_limits(text, message):
    with pytest.raises(UsageError) as caught:
        Topology.parse(text)
    assert str(caught.value).startswith(message)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("text", "hosts"), [("1x4", 1), ("3x2", 3), ("3x2+2ps", 1)])
def test_with_parameter_servers_one_host_makes_the_steps(text: str, hosts: int) -> None:
    assert Topology.parse(text).num_stepping_hosts == hosts
