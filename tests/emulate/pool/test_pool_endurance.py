"""Clusters by the dozen, one after the other and several at a time, leave nothing on this machine."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.endurance import measure, own_temporary_folder, run_clusters, run_pool


@pytest.mark.slow
@pytest.mark.parametrize(("run", "at_once"), [(run_clusters, 4), (run_pool, 2)])
def test_clusters_leave_no_process_port_descriptor_file_or_namespace(run: Any, at_once: int) -> None:
    with own_temporary_folder():
        problems, line = measure(run, ["2x1", "1x2"], 6, at_once)
    assert not problems, line
