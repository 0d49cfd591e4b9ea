"""Record a program on one host of a real cluster: `python -m emulate.launch.record`, which `gpudist launch --record` starts."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emulate.errors import GpudistError
from emulate.topology import Topology

_REACHED = "reached-"
_PATIENCE = 60.0
"""Seconds for which a host waits for the others after its last step: who leaves first takes their connections along."""


@dataclass
class RealHost:
    """Be the context of a recorded program, as a host of the emulator is.

    Attributes:
        topology: The job's topology.
        host: This host's number.
        trace: The folder of the trace, which all hosts see.
        role: Always `worker`.
    """

    topology: Topology
    host: int
    trace: Path
    role: str = "worker"
    _leave: Any = field(default=os._exit, repr=False)  # the probe replaces os._exit by one that waits for its own thread

    def send(self, event: Mapping[str, Any]) -> None:
        """Do what a supervisor does with an event: end the run at its last step, and show notes and failures."""
        if event["event"] == "reached":
            self._end(0 if self._meet() else 1)
        elif event["event"] == "fault":
            print(f"gpudist could not record: {event['text']}", file=sys.stderr)
            self._end(GpudistError.exit_code)
        elif event["event"] == "note":
            print(f"gpudist: {event['text']}", file=sys.stderr)

    def note(self, code: str, text: str) -> None:
        """Show a note."""
        self.send({"event": "note", "code": code, "text": text})

    def receive(self) -> bytes:
        """Raise EOFError: nobody answers questions here."""
        raise EOFError

    def path(self, path: Path) -> Path:
        """Return the path unchanged: there are no views."""
        return path

    def is_private(self, path: str) -> bool:
        """Return True: only this run writes here."""
        return True

    def _meet(self) -> bool:
        """Wait until each host has its last step on disk. TensorFlow's complaints about hosts that leave are not shown."""
        sys.stderr.flush()
        errors = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        (self.trace / f"{_REACHED}{self.host}").touch()
        until = time.monotonic() + _PATIENCE
        while len(list(self.trace.glob(f"{_REACHED}*"))) < self.topology.num_hosts:
            if time.monotonic() > until:
                text = f"gpudist: not every host made its last step within {_PATIENCE:g} s, or {self.trace} is not shared.\n"
                os.write(errors, text.encode())
                return False
            time.sleep(0.1)
        return True

    def _end(self, code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._leave(code)


def main(args: Sequence[str] | None = None) -> int:
    """Record the program on this host.

    Args:
        args: The arguments. Default: those of the process.

    Returns:
        The exit code, if the program ends before the last step.
    """
    words = list(sys.argv[1:] if args is None else args)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="python -m emulate.launch.record")
    parser.add_argument("--topology", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "gpu"), required=True)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-m", dest="module")
    parser.add_argument("program", nargs="?")
    try:
        return _record(parser.parse_args(words[:at]), words[at + 1 :])
    except GpudistError as error:
        print(f"gpudist: {error}", file=sys.stderr)
        return error.exit_code


def _record(given: argparse.Namespace, own: list[str]) -> int:
    from emulate.devices import DevicePlan, install
    from emulate.program import Program, own_traceback, shorten_traceback
    from emulate.recorder import ProbePlan
    from emulate.trace import Trace
    from emulate.verify.api import versions
    from emulate.verify.host import COMPARABLE_ON_GPUS, RecordedProgram
    from gpudist_core.environments import find_tasks

    topology, tasks = Topology.parse(given.topology), find_tasks()
    host = RealHost(topology, tasks.host if tasks else 0, Path(given.trace))
    program = Program.find(f"-m {given.module}" if given.module else given.program, own)
    if host.host == 0:
        description = {"topology": str(topology), "program": program.name, "role": "topology", "label": str(topology)}
        description |= {"seed": given.seed, "steps": given.steps, "precision": "float32", "device": given.device}
        Trace.describe(host.trace, description | {"versions": versions()})
    if given.device == "gpu":
        os.environ.update(COMPARABLE_ON_GPUS)
    else:
        install(DevicePlan(topology.num_devices, topology.num_hosts), host.note)
    plan = ProbePlan(host.trace, steps=given.steps, looks_from=given.steps, seed=given.seed, leads=True)
    try:
        RecordedProgram(program, plan, given.seed, "float32", given.device)(host)
    except SystemExit as leave:
        if isinstance(leave.code, str):
            print(leave.code, file=sys.stderr)
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except GpudistError:
        raise
    except Exception as error:
        print(shorten_traceback(own_traceback(error)), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    leave, code = os._exit, main()
    sys.stdout.flush()
    sys.stderr.flush()
    leave(code)  # the program has ended as Python ends it; threads of TensorFlow could keep the process
