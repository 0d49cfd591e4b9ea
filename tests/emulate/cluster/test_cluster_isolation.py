"""Several hosts have a network of their own, runs have their own view of the user's files, and refusals are said."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emulate.cluster import HostContext, RunningCluster, describe_isolation
from emulate.cluster.plan import hold_ports
from emulate.cluster.views import Views, mounts_below, outermost
from tests.emulate.cluster.helpers import Ran, events_until, start_python

REFUSALS = {name: told["why"] for name, told in describe_isolation().items()}
needs_network = pytest.mark.skipif(bool(REFUSALS["own_network"]), reason=f"no networks here: {REFUSALS['own_network']}")
needs_views = pytest.mark.skipif(bool(REFUSALS["copy_on_write"]), reason=f"no views here: {REFUSALS['copy_on_write']}")

Run = Callable[..., Ran]
Launch = Callable[..., RunningCluster]

# As somebody who is not root and has no rights; and where the system allows no namespaces at all.
# They import nothing of ours: a namespace can be entered only before there are threads, which some imports start.
UNPRIVILEGED = """
import ctypes, os, sys
uid, gid = os.getuid(), os.getgid()
assert ctypes.CDLL(None).unshare(0x10000000) == 0
from pathlib import Path
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"1000 {uid} 1")
Path("/proc/self/gid_map").write_text(f"1000 {gid} 1")
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""
REFUSED = """
import ctypes, os, sys
uid = os.getuid()
from pathlib import Path
if ctypes.CDLL(None).unshare(0x10000000) == 0:  # else the system allows none anyway
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    for kind in ("user", "net", "mnt"):
        Path(f"/proc/sys/user/max_{kind}_namespaces").write_text("0")
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""
SUPERVISOR = """
import sys, json, os, tempfile
from pathlib import Path
from emulate.cluster import *
from emulate.topology import Topology
import tests.emulate.cluster.test_cluster_isolation as module
import cloudpickle; cloudpickle.register_pickle_by_value(module)
with Preload(imports=False) as preload:
    directory = Path(tempfile.mkdtemp(dir=preload.directory))
    plan = ClusterPlan(Topology.parse(sys.argv[1]), module.edit, directory, views=(Path.cwd(),), cwd=Path.cwd())
    with preload.launch(plan) as cluster:
        while not cluster.is_over:
            cluster.events(1)
    values = [[outcome.status, outcome.value, outcome.error and outcome.error.traceback_text] for outcome in cluster.outcomes]
    left = sorted(os.listdir(directory))
    print(json.dumps({"values": values, "isolation": cluster.isolation, "notes": cluster.notes, "left": left}))
"""


def edit(context: HostContext) -> dict[str, Any]:
    """Change, make and remove files, and say what is seen."""
    Path(f"made-{context.host}").write_text("made")
    if context.host == 0:
        Path("file").write_text("changed")
        Path("removed").unlink()
        Path("folder/inner").write_text("changed")
    return {"cwd": os.getcwd(), "file": Path("file").read_text(), "made": Path(f"made-{context.host}").exists()}


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A folder of the user's."""
    folder = tmp_path / "a user's, odd: folder"
    (folder / "folder").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name in ("file", "removed", "folder/inner"):
        (folder / name).write_text("as it was")
    return folder


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def supervise(how: str, folder: Path, topology: str) -> Any:
    process = start_python(how, SUPERVISOR, topology, cwd=folder, stdout=subprocess.PIPE)
    out, _ = process.communicate()
    assert process.returncode == 0
    return json.loads(out)


@needs_network
def test_mounts_inside_of_a_folder_are_known_by_their_names_in_any_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "データ of mine"
    inside.mkdir()
    told = "".join(
        f"36 35 0:3 / {place} rw - tmpfs tmpfs rw\n" for place in ("/", str(inside).replace(" ", "\\040"), "/\\134x")
    )
    monkeypatch.setattr(Path, "read_bytes", lambda path: told.encode())
    assert mounts_below(tmp_path) == [inside]


@needs_views
def test_a_program_may_change_its_folder_and_the_users_files_stay(run: Run, users: Path) -> None:
    before = content(users)
    ran = run("2x1", edit, views=(users,), cwd=users)
    assert ran.values[0] == {"cwd": str(users), "file": "changed", "made": True}
    assert content(users) == before
    assert ran.isolation == "own network, copy-on-write view"
    assert ran.notes == []


@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel lets root alone rename folders of the lower layer")
def test_a_program_may_rename_a_folder(run: Run, users: Path) -> None:
    def entry(context: HostContext) -> str:
        os.rename("folder", "renamed")
        return Path("renamed/inner").read_text()

    before = content(users)
    assert run("1x1", entry, views=(users,), cwd=users).values == ["as it was"]
    assert content(users) == before


def test_what_one_run_writes_is_not_there_for_the_next(run: Run, users: Path) -> None:
    def entry(context: HostContext) -> list[str]:
        Path("checkpoint").touch()
        return sorted(os.listdir())

    first, second = run("1x1", entry, views=(users,), cwd=users), run("1x1", entry, views=(users,), cwd=users)
    assert first.values == second.values == [[".git", "checkpoint", "file", "folder", "removed"]]


def test_hosts_of_one_cluster_share_the_view(run: Run, users: Path) -> None:
    def entry(context: HostContext) -> str:
        if context.host == 0:
            Path("made").write_text("by host 0")
        while not Path("made").exists() or not (text := Path("made").read_text()):
            pass
        return text

    assert run("2x1", entry, views=(users,), cwd=users).values == ["by host 0", "by host 0"]


def test_nested_folders_are_viewed_once(run: Run, users: Path) -> None:
    before = content(users)
    run("1x1", edit, views=(users, users / "folder", users.parent), cwd=users).values[0]
    assert content(users) == before
    assert outermost([users, users / "folder", users]) == [users.resolve()]


def test_the_runs_folder_is_real_even_inside_a_view(run: Run, launch: Launch, users: Path) -> None:
    before = content(users)
    directory = users / "runs" / "first"
    directory.mkdir(parents=True)

    def entry(context: HostContext) -> None:
        print("said")
        (context.directory / "trace").write_text("recorded")
        Path("file").write_text("changed")

    ran = run("1x1", entry, views=(users,), cwd=users, directory=directory)
    assert ran.values == [None]
    assert (directory / "host-0" / "trace").read_text() == "recorded"
    assert ran.output(0) == "said\n"
    assert {name: text for name, text in content(users).items() if not name.startswith("runs")} == before


def test_a_file_system_mounted_inside_a_view_is_still_seen(run: Run) -> None:
    """An overlay shows the mounts below it as empty folders."""
    assert run("1x1", lambda context: os.path.exists("/dev/shm/.") and os.listdir("/dev/pts"), views=(Path("/dev"),)).values[0]


def test_folders_of_the_views_are_gone_afterwards(run: Run, users: Path) -> None:
    ran = run("1x1", edit, views=(users,), cwd=users)
    assert sorted(path.name for path in ran.directory.iterdir()) == ["host-0"]


def test_the_root_folder_gets_no_view_and_a_note(run: Run) -> None:
    ran = run("1x1", lambda context: os.getcwd(), views=(Path("/"),), cwd=Path("/"))
    assert ran.values == ["/"]
    assert ran.notes == ["What the program writes directly under / is kept: the root folder gets no view."]


def test_a_run_without_views_sees_and_writes_the_real_files(run: Run, users: Path) -> None:
    ran = run("1x1", edit, cwd=users)
    assert content(users)["made-0"] == "made"
    assert ran.isolation == "host network, no view"


def test_every_cluster_has_the_same_ports_to_itself(launch: Launch, tmp_path: Path) -> None:
    def entry(context: HostContext) -> bool:
        config = json.loads(os.environ["TF_CONFIG"])
        addresses = config["cluster"]["worker"]
        port = int(addresses[context.host].rpartition(":")[2])
        with socket.create_server(("", port)) as server:
            if context.host == 0:
                server.accept()[0].send(b"hello")
                return True
            while True:
                try:
                    with socket.create_connection(("127.0.0.1", int(addresses[0].rpartition(":")[2]))) as peer:
                        return peer.recv(5) == b"hello"
                except ConnectionRefusedError:
                    pass

    clusters = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        clusters.append(launch("2x1", entry, directory=tmp_path / str(number)))
    for cluster in clusters:
        with cluster:
            events_until(cluster, lambda _, cluster=cluster: cluster.is_over)
            assert [outcome.value for outcome in cluster.outcomes] == [True, True]


@needs_network
def test_a_network_of_its_own_reaches_nothing_outside_and_the_users_is_left_alone(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def reaches(context: HostContext) -> bool:
            with socket.socket() as sock:
                return sock.connect_ex(("127.0.0.1", port)) == 0

        assert run("2x1", reaches).values == [False, False]
        assert run("2x1", reaches, network="host").values == [True, True]
        assert run("1x2", reaches).values == [True]


def test_a_held_port_goes_to_its_host_and_to_nobody_else() -> None:
    [held] = hold_ports(1)
    port = held.getsockname()[1]
    with held:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.socket(socket.AF_INET6) as server:  # as gRPC binds
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("::", port))
            server.listen()


@needs_network
@needs_views
def test_it_works_for_somebody_without_rights(users: Path) -> None:
    before = content(users)
    said = supervise(UNPRIVILEGED, users, "2x1")
    assert [status for status, _, _ in said["values"]] == ["returned", "returned"], said
    assert said["isolation"] == "own network, copy-on-write view"
    assert said["notes"] == []
    assert said["left"] == ["host-0", "host-1"]
    assert content(users) == before


def test_where_namespaces_are_refused_runs_share_the_network_and_work_on_copies(users: Path) -> None:
    before = content(users)
    said = supervise(REFUSED, users, "2x1")
    assert [status for status, _, _ in said["values"]] == ["returned", "returned"], said
    assert said["isolation"] == "host network, working copy"
    network, copy = said["notes"]
    assert network.startswith("The hosts share this machine's network: the system refuses them one of their own (")
    assert copy.startswith(f"Each run works on a copy of {users}: a view of it is refused (")
    assert said["values"][0][1]["cwd"] != str(users)
    assert said["left"] == ["host-0", "host-1"]
    assert content(users) == before


def test_a_folder_too_large_for_a_copy_is_an_error_that_says_what_to_do(users: Path) -> None:
    with (users / "large").open("wb") as file:
        file.truncate((1 << 30) + 1)
    process = start_python(REFUSED, SUPERVISOR, "1x1", cwd=users, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, err = process.communicate()
    message = err.decode().splitlines()[-1]
    assert message.startswith(
        "emulate.errors.Unavailable: A folder in which a program writes must be viewed by an overlay mount"
    )
    assert f"Received: folder={str(users)!r}, which is larger. Start from an empty working directory" in message


def test_what_lies_beside_and_above_a_copied_folder_is_found_from_its_copy(tmp_path: Path) -> None:
    for name in ("data", "scripts", "work", "run"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    views = Views(tmp_path / "run")
    assert len(views.show([tmp_path / "scripts", tmp_path / "work"], "refused")) == 2
    script = views.path(tmp_path / "scripts" / "train.py")
    assert script != tmp_path / "scripts" / "train.py"
    assert (script.resolve().parents[1] / "data" / "file").read_text() == "data"
    assert (script.parent / "../work/file").resolve() == views.path(tmp_path / "work" / "file")  # the copy, not the user's
    assert str(script) == f"{views.copies_root}{tmp_path / 'scripts' / 'train.py'}"
    views.remove()
    assert {file.read_text() for file in tmp_path.glob("*/file")} == {"data", "scripts", "work", "run"}


def test_a_copy_has_nothing_of_the_runs_beside_this_one(tmp_path: Path) -> None:
    """They write there, and remove it, while it is copied."""
    for name in ("kept/own", "kept/beside/host-0", "kept/beside/views/copy", "kept/of the user's"):
        (tmp_path / "work" / name).mkdir(parents=True)
        (tmp_path / "work" / name / "file").write_text(name)
    views = Views(tmp_path / "work" / "kept" / "own")
    assert len(views.show([tmp_path / "work"], "refused")) == 1
    copy = views.path(tmp_path / "work")
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("file")) == ["kept/of the user's/file"]
    views.remove()
