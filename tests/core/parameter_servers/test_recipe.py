"""The recipe for parameter servers gives there what it gives on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fixtures.manifest import ALSO_ASKED
from tests.core.conftest import OnHosts

RECIPE = next(recipe for recipe in ALSO_ASKED if recipe.name == "parameter_servers")


def _run(path: Path) -> Any:
    import runpy
    import sys

    sys.argv = [str(path)]
    found = runpy.run_path(str(path), run_name="__main__")
    return float(found["losses"][-1]), int(found["optimizer"].iterations.numpy()), found["model"].get_weights()


def test_the_recipe_gives_the_result_of_one_device(on_hosts: OnHosts) -> None:
    (loss, updates, weights), (its_loss, its_updates, its_weights) = (
        on_hosts(t, _run, RECIPE.path)[0] for t in ("2x1+1ps", "1x1")
    )
    assert (loss, updates) == (pytest.approx(its_loss, abs=1e-5), its_updates)
    for ours, theirs in zip(weights, its_weights, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
