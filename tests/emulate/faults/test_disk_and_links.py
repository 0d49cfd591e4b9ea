"""A full disk refuses what needs room, links are slow, lossy or cut, and where the system cannot do it, it is said."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emulate import Cluster
from emulate.cluster.isolation import Capability, Isolation, Links
from emulate.cluster.keeper import _Keeper
from emulate.cluster.plan import ClusterPlan, Order
from emulate.errors import Unavailable
from emulate.faults import check_disk, parse_all
from emulate.topology import Topology
from tests.emulate.faults.needs import needs_links

Make = Callable[..., Cluster]


def test_a_full_disk_refuses_new_files_on_that_host_alone_and_files_can_be_read(cluster: Make) -> None:
    def work() -> list[Any]:
        import json

        import keras
        import tensorflow as tf

        host = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        folder = Path(os.environ["WHERE"], f"of-host-{host}")
        folder.mkdir()
        (folder / "old").write_text("old")
        keras.optimizers.SGD().apply([tf.constant(1.0)], [tf.Variable(1.0)])
        found: list[Any] = [(folder / "old").read_text()]
        for act in (lambda: (folder / "new").write_text("new"), lambda: (folder / "sub").mkdir()):
            try:
                act()
                found.append("done")
            except OSError as error:
                found.append(error.errno)
        return found

    assert cluster("2x1").run(work, faults="fill-disk:host=1") == [
        ["old", "done", "done"],
        ["old", errno.ENOSPC, errno.ENOSPC],
    ]


@needs_links
def test_what_hosts_send_takes_as_long_as_the_link_says(cluster: Make) -> None:
    def meet() -> float:
        import json
        import socket
        import time

        config = json.loads(os.environ["TF_CONFIG"])
        places = [place.split(":") for place in config["cluster"]["worker"]]
        if config["task"]["index"] == 0:
            with socket.create_server((places[0][0], int(places[0][1]))) as server:
                server.accept()[0].recv(1)
            return 0.0
        while True:
            began = time.monotonic()
            try:
                with socket.create_connection((places[0][0], int(places[0][1]))) as sock:
                    sock.send(b"x")
                return time.monotonic() - began
            except ConnectionRefusedError:
                time.sleep(0.01)

    assert cluster("2x1").run(meet, faults="link:latency=100ms")[1] >= 0.2


def test_without_tun_devices_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", "/dev/net/tun")

    monkeypatch.setattr("emulate.cluster.system.unshare", refuse)
    monkeypatch.setattr("emulate.cluster.system.set_namespace", lambda fd, kind: None)
    with pytest.raises(Unavailable) as caught:
        Links.lay(2)
    assert str(caught.value).startswith(
        "Links that can be cut, slowed down or lossy need TUN devices. Received: /dev/net/tun: Operation not permitted."
    )


def test_on_a_shared_network_links_are_not_available(tmp_path: Path) -> None:
    plan = ClusterPlan(Topology.parse("2x1"), lambda context: None, tmp_path, faults=parse_all("disconnect:host=1"))
    keeper = _Keeper(None, Order(plan, b"", (), tmp_path, 0))  # type: ignore[arg-type]
    keeper._isolation = Isolation()
    with pytest.raises(Unavailable) as caught:
        keeper._lay_links(Capability(None, "namespaces are refused"))
    assert str(caught.value).startswith(
        "Links that can be cut, slowed down or lossy need a network of the cluster's own. Received: network='own', "
        "namespaces are refused."
    )


def test_on_an_unknown_processor_a_full_disk_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    with pytest.raises(Unavailable) as caught:
        check_disk()
    assert str(caught.value) == (
        "A full disk must be possible to emulate. Received: fault='fill-disk', where processors of the kind vax are not known. "
        "Leave the fault out here."
    )
