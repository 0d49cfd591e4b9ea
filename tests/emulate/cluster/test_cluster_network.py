"""Nobody outside reaches a cluster's ports, or where that cannot be had: no two clusters collide, and the user is told."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from emulate.cluster import HostContext, RunningCluster, describe_isolation
from emulate.cluster.isolation import Capability, find_capability
from emulate.cluster.plan import hold_ports
from tests.emulate.cluster.helpers import Ran, events_until, start_python
from tests.emulate.cluster.test_cluster_isolation import REFUSED

Run = Callable[..., Ran]
Launch = Callable[..., RunningCluster]
needs_own_network = pytest.mark.skipif(
    bool(find_capability().network), reason=f"no network of its own here: {find_capability().network}"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

# Becomes somebody else, then tries the port on every address of this machine, and to get into the host's own network.
STRANGER = """
import ctypes, fcntl, json, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
who, pid, port, addresses = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
if "another user" in who:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
if "another namespace" in who:
    assert libc.unshare(0x10000000 | 0x40000000) == 0
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", 0x1 | 0x40))  # up, running

def reached():
    found = []
    for address in addresses:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
            sock.settimeout(5)
            if sock.connect_ex((address, port)) == 0:
                found.append(address)
    return found

def enter():
    try:
        fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    except OSError as error:
        return error.strerror
    return "" if libc.setns(fd, 0x40000000) == 0 else os.strerror(ctypes.get_errno())

before, refusal = reached(), enter()
print(json.dumps({"reached": before, "refusal": refusal, "reached inside": reached()}))
"""


def listen(context: HostContext) -> bool:
    """Serve on this host's port, on all interfaces, as a TensorFlow server does; host 1 then visits host 0 once."""
    ports = [int(address.rpartition(":")[2]) for address in json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]]
    with socket.create_server(("::", ports[context.host]), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        if context.host == 0:
            context.send({"event": "listening", "pid": os.getpid(), "port": ports[0]})
            while True:  # everybody is served, until the cluster is ended
                server.accept()[0].close()
        while True:
            with socket.socket() as visitor:
                if visitor.connect_ex(("127.0.0.1", ports[0])) == 0:
                    return True


def ask_stranger(who: str, launch: Launch, **options: Any) -> dict[str, Any]:
    """What somebody gets of a cluster while it runs, and its hosts of each other."""
    with launch("2x1", listen, **options) as cluster:
        events = events_until(cluster, lambda seen: {"listening", "exit"} <= {event["event"] for _, event in seen})
        [host] = [event for _, event in events if event["event"] == "listening"]
        addresses = [one.address for all_of in psutil.net_if_addrs().values() for one in all_of if _is_ip(one)]
        arguments = (who, str(host["pid"]), str(host["port"]), json.dumps(addresses))
        process = start_python(STRANGER, *arguments, stdout=subprocess.PIPE)
        out, _ = process.communicate()
        assert process.returncode == 0
        assert {outcome.host: outcome.value for outcome in cluster.outcomes} == {1: True}
    answer: dict[str, Any] = json.loads(out)
    return answer


def _is_ip(address: Any) -> bool:
    return address.family in (socket.AF_INET, socket.AF_INET6) and "%" not in address.address


@needs_own_network
def test_from_this_machine_s_network_no_port_of_a_cluster_is_reached(launch: Launch) -> None:
    assert ask_stranger("the same user", launch)["reached"] == []


@needs_own_network
def test_from_another_network_namespace_no_port_is_reached_and_the_cluster_s_cannot_be_entered(launch: Launch) -> None:
    answer = ask_stranger("the same user in another namespace", launch)
    assert (answer["reached"], answer["reached inside"]) == ([], [])
    assert answer["refusal"] in ("Operation not permitted", "Permission denied")


@needs_own_network
@needs_root
@pytest.mark.parametrize("who", ["another user", "another user in another namespace"])
def test_another_user_reaches_no_port_and_cannot_enter_the_cluster_s_network(who: str, launch: Launch) -> None:
    answer = ask_stranger(who, launch)
    assert (answer["reached"], answer["reached inside"]) == ([], [])
    assert answer["refusal"] in ("Operation not permitted", "Permission denied")


@needs_own_network
@needs_root
def test_the_port_is_open_to_whoever_is_inside(launch: Launch) -> None:
    """Else the tests above would show nothing: root may enter, and then reaches it."""
    answer = ask_stranger("root", launch)
    assert (answer["reached"], answer["refusal"]) == ([], "")
    assert "127.0.0.1" in answer["reached inside"]


def test_on_this_machine_s_network_everybody_reaches_the_ports_and_the_user_is_told(launch: Launch, run: Run) -> None:
    assert "127.0.0.1" in ask_stranger("the same user", launch, network="host")["reached"]
    [note] = run("2x1", lambda context: None, network="host").notes
    assert note == (
        "The hosts share this machine's network: it was asked for. Ports are reserved until the run ends, so that runs "
        "do not collide. Nothing else protects them: TensorFlow's servers listen on all interfaces and have no "
        "authentication. During the run, anyone who can reach this machine can run operations, and read and write files, as "
        "its user."
    )


def test_one_host_has_no_ports_and_needs_no_note(run: Run) -> None:
    assert run("1x2", lambda context: None, network="host").notes == []


def test_what_protects_the_ports_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "emulate.cluster.isolation.find_capability"
    monkeypatch.setattr(module, lambda: Capability(0, "", "it is refused"))
    monkeypatch.setattr("emulate.cluster.isolation.why_no_devices", lambda: "/dev/net/tun: Permission denied")
    assert describe_isolation() == {
        "own_network": {
            "available": True,
            "why": None,
            "ports": "The ports of several hosts are in a private network, which other machines and users cannot reach.",
        },
        "copy_on_write": {"available": False, "why": "it is refused"},
        "faults_of_links": {"available": False, "why": "/dev/net/tun: Permission denied"},
    }
    monkeypatch.setattr(module, lambda: Capability(None, "Operation not permitted", ""))
    assert "have no authentication" in describe_isolation()["own_network"]["ports"]


def test_ports_that_are_held_are_given_to_nobody_else_however_many_ask_at_once() -> None:
    """Other clusters, servers on any port, and the near ends of connections, all choosing at the same time."""
    stop = threading.Event()
    chosen: list[int] = []

    def serve_and_connect() -> None:
        while not stop.is_set():
            with socket.create_server(("", 0)) as server, socket.create_connection(server.getsockname()) as client:
                chosen.extend((server.getsockname()[1], client.getsockname()[1]))

    held: list[socket.socket] = []
    try:
        with ThreadPoolExecutor(12) as pool:
            busy = [pool.submit(serve_and_connect) for _ in range(4)]
            for ports in [pool.submit(hold_ports, 8) for _ in range(50)]:
                held += ports.result()
            chosen.clear()  # what was chosen before a port was held is of no interest
            while len(chosen) < 2_000 and not any(one.done() for one in busy):
                pass
            stop.set()
            for one in busy:
                one.result()
        numbers = Counter(sock.getsockname()[1] for sock in held)
        assert len(numbers) == 400
        assert not numbers.keys() & set(chosen)
    finally:
        for sock in held:
            sock.close()


def test_a_port_is_held_for_as_long_as_the_cluster_runs(launch: Launch) -> None:
    """Also after its host has closed it: a host that is started again finds it free."""

    def close_and_wait(context: HostContext) -> None:
        [port] = [int(one.rpartition(":")[2]) for one in json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]][:1]
        if context.host == 0:
            socket.create_server(("", port)).close()
            context.send({"event": "closed", "port": port})
        while True:
            pass

    with launch("2x1", close_and_wait, network="host") as cluster:
        events = events_until(cluster, lambda seen: any(event["event"] == "closed" for _, event in seen))
        [port] = [event["port"] for _, event in events if event["event"] == "closed"]
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("", port))
    with socket.create_server(("", port)):
        pass


ALL_REDUCE = """
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
total = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones([])))
print("total", float(total), flush=True)
"""


def test_where_namespaces_are_refused_clusters_run_side_by_side_and_say_once_what_protects_them(tmp_path: Path) -> None:
    """Refused for real: the kernel is told to give out none."""
    (tmp_path / "train.py").write_text(ALL_REDUCE)
    command = "from emulate.cli import main; import sys; sys.exit(main(['run', 'train.py', '--topology', '2x1']))"
    options: Any = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [start_python(REFUSED, command, **options) for _ in range(2)]
    for process in processes:
        out, err = (text.decode() for text in process.communicate())
        assert process.returncode == 0, err
        assert out.count("total 2.0") == 2
        assert err.count("have no authentication") == 1
        assert "the system refuses them one of their own (" in err


@needs_own_network
@pytest.mark.parametrize("network", ["own", "host"])
def test_a_download_that_fails_says_that_the_private_network_has_no_way_out(run: Run, network: str) -> None:
    def entry(context: HostContext) -> None:
        import urllib.request

        urllib.request.urlopen("http://192.0.2.1/mnist.npz" if network == "own" else "http://127.0.0.1:9/", timeout=5)

    ran = run("2x1", entry, network=network)
    said = [event["text"] for event in ran.sent("note")]
    assert ran.outcomes[0].status == "raised"
    told = "The hosts have a private network without a way out, so a program cannot download there. Use --network host, or "
    assert [text.startswith(told) for text in said] == ([True, True] if network == "own" else [])
