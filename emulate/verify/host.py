"""Run a program in a host: seed everything, install the probe, start the program."""

from __future__ import annotations

import json
import math
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from emulate import devices
from emulate.imports import when_imported
from emulate.probe import Paths, Probe, ProbePlan, count_operations, evaluate
from emulate.program import Program
from emulate.verify.listing import list_in_another_order
from emulate.verify.seeding import Seeding

COMPARABLE_ON_GPUS = {
    name: os.environ.get(name, value)
    for name, value in {
        # float32 means float32: TF32 rounds products to 10 bits, far above any noise floor of float32.
        "NVIDIA_TF32_OVERRIDE": "0",
        # Kernels that add in whatever order threads arrive would make every run differ from its own repeat. An operation
        # that has no deterministic kernel raises then: who needs it sets this to 0 and gets a wider noise floor.
        "TF_DETERMINISTIC_OPS": "1",
        "TF_CUDNN_DETERMINISTIC": "1",
        # cuDNN may take Winograd's transforms for one batch size and not for another: coarser than what permuted rows show.
        "TF_ENABLE_WINOGRAD_NONFUSED": "0",
    }.items()
}
"""Environment variables of hosts on GPUs when runs are compared. Variables that the user has set stay."""


@dataclass(frozen=True)
class RecordedProgram:
    """Run a recorded program, as the entry of a host in a verification.

    Attributes:
        program: What to run.
        plan: How to record it; None runs it unprobed.
        seed: Seeds Python, NumPy, TensorFlow and Keras; None leaves them alone.
        precision: Keras's float type.
        device: `cpu` or `gpu`; on GPUs TF32 is off.
        since: When the verification began, in seconds since the epoch.
    """

    program: Program
    plan: ProbePlan | None
    seed: int | None
    precision: str = "float32"
    device: str = "cpu"
    since: float = math.inf

    def __call__(self, context: Any) -> None:
        """Run on this host."""
        if self.device == "gpu":
            when_imported("tensorflow", _without_tf32)
        paths = Paths(
            context.is_private,
            lambda path, was_there: context.send({"event": "wrote", "path": path, "was_there": was_there}),
            lambda path, is_own: context.send({"event": "read", "path": path, "is_own": is_own}),
            lambda path: context.send({"event": "saved", "path": path}),
            self.since,
        )
        paths.install()
        if self.plan is None:
            if self.seed is not None:
                Seeding(self.seed, self.precision).install()
            self.program.start(context.path)
            return
        when_imported("tensorflow", _without_graph_optimization)
        has_servers = context.topology.num_ps > 0
        if has_servers and context.role != "chief":  # it serves: the chief records what it does
            if self.seed is not None:
                Seeding(self.seed, self.precision).install()
            self.program.start(context.path)
            return
        probe = Probe(
            self.plan,
            host=context.host,
            send=context.send,
            several_hosts=context.topology.num_stepping_hosts > 1,
            has_servers=has_servers,
            all_reduce=devices.all_reduce_in_use,
            receive=context.receive,
        )
        if self.seed is not None:
            host = context.host if self.plan.own_seeds else None
            Seeding(self.seed, self.precision, host=host, told=probe.seeded).install()
        if self.plan.own_listing and context.host:
            list_in_another_order()
        probe.install()
        _finish_at_exit(probe)
        try:
            self.program.start(context.path)
        except BaseException as error:
            if isinstance(error, SystemExit):
                probe.exits([(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)])
            probe.finish("returned" if isinstance(error, SystemExit) and not error.code else "raised")
            raise
        probe.finish("returned")


@dataclass(frozen=True)
class Evaluation:
    """Evaluate the functions of a recorded run, as the entry of a host.

    Attributes:
        source: The folder of the run's trace.
        plan: How the evaluated run differs.
        device: `cpu` or `gpu`; on GPUs TF32 is off.
    """

    source: Path
    plan: ProbePlan
    device: str = "cpu"

    def __call__(self, context: Any) -> None:
        """Run on this host."""
        if self.device == "gpu":
            when_imported("tensorflow", _without_tf32)
        when_imported("tensorflow", _without_graph_optimization)
        evaluate(self.source, self.plan)


@dataclass(frozen=True)
class Counting:
    """Count the floating-point operations of a recorded run, as the entry of a host.

    Attributes:
        source: The folder of the run's trace.
        half: That of a run with half the batch, if there is one.
        target: The file for what was counted.
    """

    source: Path
    half: Path | None
    target: Path

    def __call__(self, context: Any) -> None:
        """Run on this host."""
        self.target.write_text(json.dumps(count_operations(self.source, self.half)), encoding="utf-8")


def _finish_at_exit(probe: Probe) -> None:
    """Write the pending records before `os._exit` ends the process."""
    leave, pid = os._exit, os.getpid()

    def exit_at_once(status: int) -> NoReturn:
        try:
            if os.getpid() == pid:  # and no child of it
                probe.exits()
                probe.finish("raised" if status else "returned")
        finally:
            leave(status)

    os._exit = exit_at_once


def _without_graph_optimization() -> None:
    """Leave graphs as they were traced.

    Grappler's rewrites take most of the time of a short run (a retraced step on eight replicas 75 s, without them 1 s;
    TensorFlow 2.21) and change nothing but rounding. A program that asks for one of them itself gets all of them.
    """
    import tensorflow as tf

    original = tf.config.optimizer.set_experimental_options
    original({"disable_meta_optimizer": True})

    def set_experimental_options(options: Any) -> None:
        original({"disable_meta_optimizer": False, **options})

    tf.config.optimizer.set_experimental_options = set_experimental_options


def _without_tf32() -> None:
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)
