"""All trainings, run one after the other in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.core.keras_model import of_data, of_layers, of_models, of_reports, of_updates
from tests.core.keras_model.run import Run, strategy

CASES: dict[str, Callable[[Run], dict[str, Any]]] = {
    name: case
    for module in (of_data, of_layers, of_models, of_updates, of_reports)
    for name, case in vars(module).items()
    if getattr(case, "__module__", "") == module.__name__ and not name.startswith("_")
}


def train_all(ours: bool, names: list[str] | None = None) -> dict[str, Any]:
    """What each training gives: with gpudist_core, or of Keras alone on one device."""
    import keras

    where = strategy() if ours else None
    results: dict[str, Any] = {}
    for name in names or CASES:
        keras.utils.set_random_seed(3)
        results[name] = CASES[name](Run(where))
    return results
