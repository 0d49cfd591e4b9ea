"""Hosts as they are without the emulator: no GPUs, and the CPU in one piece until the program splits it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from emulate.cluster import ClusterPlan, Preload
from emulate.topology import Topology

Plain = Callable[..., Any]


@pytest.fixture
def plain(preload: Preload, tmp_path: Path) -> Plain:
    """`plain(function, *args)`: what it returned in a process of its own that has imported TensorFlow."""

    def run(function: Callable[..., Any], *args: Any) -> Any:
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        plan = ClusterPlan(Topology.parse("1x1"), lambda _: function(*args), directory=tmp_path, emulated=False)
        with preload.launch(plan) as cluster:
            while not cluster.is_over:
                list(cluster.events(1.0))
        outcome = cluster.outcomes[0]
        assert outcome.status == "returned", (outcome.error and outcome.error.traceback_text, _errors(tmp_path))
        return outcome.value

    return run


def _errors(folder: Path) -> str:
    return (folder / "host-0" / "stderr").read_text(encoding="utf-8")[-4000:]
