"""Track the position of a pipeline: the batches that the training loop has taken, without those made ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpudist_core.errors import UsageError
from gpudist_core.pipelines.plan import Plan
from gpudist_core.values import is_whole

_FORMAT = "gpudist.pipeline/1"


@dataclass
class Position:
    """Hold the position of a pipeline.

    Attributes:
        epoch: The number of the epoch, from 0.
        batch: The number of its global batches that were taken.
        turn: A counter of iterations and restores: an iterator with an earlier number is over.
        is_apart: Whether the other hosts may have had a batch that this host could not make.
    """

    epoch: int = 0
    batch: int = 0
    turn: int = 0
    is_apart: bool = False


def check_together(position: Position) -> None:
    """Refuse to continue if the hosts may be at different batches.

    Args:
        position: The position on this host.

    Raises:
        UsageError: If a batch could not be made here.
    """
    if position.is_apart:
        raise UsageError(
            "All hosts must continue from one position: after an error on one host, the others may have had the missing batch",
            "Restore a saved position on all hosts, or make the pipeline again.",
            epoch=position.epoch,
            batch=position.batch,
        )


def state_of(plan: Plan, position: Position) -> dict[str, Any]:
    """Return the position as plain values, with a fingerprint of the data and their order."""
    # After the last batch of an epoch the next one is meant, also while the loop is still in the body for that batch.
    over = plan.num_batches is not None and position.batch >= plan.num_batches
    epoch, batch = (position.epoch + 1, 0) if over else (position.epoch, position.batch)
    return {"format": _FORMAT, "epoch": epoch, "batch": batch, **identity_of(plan)}


def identity_of(plan: Plan) -> dict[str, Any]:
    """Return a fingerprint of a pipeline's examples and their order."""
    return {
        "data": plan.source.fingerprint,
        "rows": -1 if plan.num_rows is None else plan.num_rows,
        "global_batch_size": plan.global_batch_size,
        "order": _order(plan),
        "seed": plan.seed,
        "remainder": plan.remainder,
    }


def _order(plan: Plan) -> str:
    if plan.labels is not None:
        return "balanced"
    return "shuffled" if plan.shuffle else f"buffer {plan.buffer}" if plan.buffer else "as it stands"


def restored(plan: Plan, state: Any) -> tuple[int, int]:
    """Return the epoch and the batch of a state.

    Args:
        plan: What the pipeline does.
        state: The result of `state_of` for a pipeline over the same data.

    Returns:
        Epoch and batch.

    Raises:
        UsageError: If it is not such a state, or belongs to other data, another order or other batches.
    """
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise UsageError("state must be a result of Pipeline.state()", state=state)
    for name, value in identity_of(plan).items():
        saved = state.get(name)
        if not _is(value, saved):
            raise UsageError(
                f"A state must be restored over the same data in the same order: `{name}` must be what it was",
                "Make the pipeline as it was when the state was saved, or start again without restoring.",
                **{name: value, "saved": saved},
            )
    epoch, batch = state.get("epoch"), state.get("batch")
    most = plan.num_batches
    if not is_whole(epoch, 0) or not is_whole(batch, 0) or (most is not None and int(batch) > most):
        raise UsageError(
            f"A state must count epochs and batches from 0{'' if most is None else f', with {most} batches in an epoch'}",
            "Pass the result of Pipeline.state().",
            epoch=epoch,
            batch=batch,
        )
    return int(epoch), int(batch)


def _is(value: Any, saved: Any) -> bool:
    """Return whether a saved value, perhaps with another number type, is equal."""
    try:
        return saved is not None and bool(type(value)(saved) == value)
    except (TypeError, ValueError):
        return False
