"""A Slurm of two nodes in namespaces: slurmctld and two slurmd of Debian's packages, unpacked into a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

PACKAGES = ["libhwloc15", "liblua5.1-0", "libmunge2", "slurm-wlm-basic-plugins", "slurm-client", "slurmctld", "slurmd"]
LIBRARIES = "usr/lib/x86_64-linux-gnu"
CONFIGURATION = """
ClusterName=test
SlurmctldHost=ctl(10.78.0.3)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
PluginDir={slurm}/{libraries}/slurm-wlm
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctl.pid
SlurmdPidFile={folder}/d-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=3
SchedulerParameters=sched_interval=1,sched_min_interval=0,requeue_delay=1
NodeName=n1 NodeAddr=10.78.0.1 NodeHostname=n1 Port=6821 CPUs=2 RealMemory=4000
NodeName=n2 NodeAddr=10.78.0.2 NodeHostname=n2 Port=6822 CPUs=2 RealMemory=4000
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
START = """
import fcntl, os, socket, struct, subprocess, sys
end = socket.socket()
request = struct.pack("16sh", b"lo", 0).ljust(40, b"\\0")
flags = struct.unpack_from("16sh", fcntl.ioctl(end, 0x8913, request))[1]
fcntl.ioctl(end, 0x8914, struct.pack("16sh", b"lo", flags | 1).ljust(40, b"\\0"))
for number in (1, 2, 3):  # getaddrinfo resolves nothing where there are loopback addresses alone
    address = struct.pack("16sHH4s16x", b"lo:%d" % number, 2, 0, socket.inet_aton(f"10.78.0.{number}"))
    fcntl.ioctl(end, 0x8916, address)
socket.sethostname("ctl")
subprocess.run(["mount", "--bind", sys.argv[1] + "/hosts", "/etc/hosts"], check=True)
daemons = [["slurmctld", "-D", "-c"], *(["slurmd", "-D", "-N", node, "-d", sys.argv[3]] for node in ("n1", "n2"))]
for name, *options in daemons:
    with open(f"{sys.argv[1]}/{name}-{options[-3] if name == 'slurmd' else ''}.log", "wb") as log:
        subprocess.Popen([f"{sys.argv[2]}/{name}-wlm", *options], stdout=log, stderr=log)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


class SlurmCluster:
    """Two idle nodes, n1 and n2."""

    def __init__(self, folder: Path, slurm: Path, init: int) -> None:
        self.folder = folder
        self.init = init
        libraries = f"{slurm}/{LIBRARIES}:{slurm}/{LIBRARIES}/slurm-wlm"
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "LD_LIBRARY_PATH": libraries,
            "PATH": f"{slurm}/usr/bin:{os.environ['PATH']}",
        }

    def _inside(self, command: Sequence[str], cwd: Path) -> list[str]:
        kinds = ["--mount", "--net", "--uts", "--pid", *([] if os.geteuid() == 0 else ["--user", "--preserve-credentials"])]
        return ["nsenter", f"--target={self.init}", *kinds, f"--wdns={cwd}", *command]

    def popen(self, command: Sequence[str], cwd: Path) -> subprocess.Popen[str]:
        """Start a command in the cluster's namespaces."""
        return subprocess.Popen(
            self._inside(command, cwd), env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command in the cluster's namespaces."""
        process = self.popen(command, cwd or self.folder)
        said, _ = process.communicate(timeout=300)
        return subprocess.CompletedProcess(command, process.returncode, said)

    def gpudist(self, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run gpudist there."""
        return self.run(sys.executable, "-m", "emulate", *args, cwd=cwd)

    def job_processes(self) -> list[str]:
        """Return the commands of the programs of jobs that run."""
        inside = psutil.Process(self.init).children(recursive=True)
        lines = [" ".join(one.cmdline()) for one in inside if one.status() != psutil.STATUS_ZOMBIE]
        return [line for line in lines if "train.py" in line or "host.sh" in line]

    def wait_for(self, text: str, times: int, folder: Path) -> None:
        """Wait until the hosts of a job have written a text so often."""
        until = time.monotonic() + 60
        while sum(log.read_text().count(text) for log in folder.glob("host-*.log")) < times:
            if time.monotonic() > until:
                raise TimeoutError(text)
            time.sleep(0.2)

    def start_requeued_jobs_at_once(self, process: subprocess.Popen[str]) -> None:
        """Let jobs that are queued again start now, while a process runs: Slurm gives them a start two minutes later."""
        while process.poll() is None:
            for line in self.run("squeue", "--noheader", "--format=%i %r").stdout.splitlines():
                if "BeginTime" in line:
                    self.run("scontrol", "update", f"JobId={line.split()[0]}", "StartTime=now")
            time.sleep(1)

    def wait_until_idle(self) -> None:
        """Wait until both nodes are idle."""
        until = time.monotonic() + 60
        while (said := self.run("sinfo", "--noheader", "--format=%T %D").stdout.strip()) != "idle 2":
            if time.monotonic() > until:
                raise TimeoutError(said)
            time.sleep(0.5)


def unpacked(folder: Path) -> Path:
    """Return a folder with Debian's packages. Skip the test where they cannot be had."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        pytest.skip("slurmctld is not here: it is taken from Debian's packages, and this machine has no apt-get")
    done = subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"slurmctld is not here: {done.stderr.strip().splitlines()[-1]}")
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, folder / "slurm"], check=True)
    return folder / "slurm"


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Start the daemons, and end all that runs in their namespaces."""
    slurm = unpacked(folder)
    (folder / "state").mkdir()
    (folder / "hosts").write_text("127.0.0.1 localhost\n10.78.0.3 ctl\n10.78.0.1 n1\n10.78.0.2 n2\n")
    (folder / "slurm.conf").write_text(CONFIGURATION.format(slurm=slurm, libraries=LIBRARIES, folder=folder))
    binaries = slurm / "usr/sbin"
    environment = SlurmCluster(folder, slurm, 0).environment
    kinds = ["--mount", "--net", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    tried = subprocess.run([binaries / "slurmctld-wlm", "-V"], env=environment, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"slurmctld does not run here: {(tried.stderr or tried.stdout).strip()}")
    start = [sys.executable, "-c", START, str(folder), str(binaries), str(binaries / "slurmstepd-wlm")]
    outer = subprocess.Popen(
        ["setpriv", "--pdeathsig=KILL", "unshare", *root, *kinds, *start], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        time.sleep(1)
        if outer.poll() is not None:
            pytest.skip(f"Slurm's nodes need namespaces: {outer.communicate()[1].strip()}")
        [init] = psutil.Process(outer.pid).children()
        cluster = SlurmCluster(folder, slurm, init.pid)
        cluster.wait_until_idle()
        yield cluster
    finally:
        outer.kill()  # --kill-child ends the first process of the namespace, and with it all others
        outer.communicate()
