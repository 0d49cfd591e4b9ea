"""Where a pipeline is: what the training loop has had, whatever has been made ahead of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpudist_core.errors import WrongUse
from gpudist_core.pipelines.plan import Plan
from gpudist_core.values import is_whole

_FORMAT = "gpudist.pipeline/1"


@dataclass
class Position:
    """Where a pipeline is.

    Attributes:
        epoch: The number of the epoch, from 0.
        batch: How many of its global batches have been handed out.
        turn: Grows with each iteration and each restore: an iterator of an earlier turn is over.
        is_apart: Whether the other hosts may have had a batch that this one could not make.
    """

    epoch: int = 0
    batch: int = 0
    turn: int = 0
    is_apart: bool = False


def check_together(position: Position) -> None:
    """Refuse to go on where hosts may be at different batches.

    Args:
        position: Where the pipeline is on this host.

    Raises:
        WrongUse: A batch could not be made here.
    """
    if position.is_apart:
        raise WrongUse(
            "Hosts go on from one position: after an error on one of them the others may have had the batch that it lacks",
            "Restore a position that was saved, on all hosts, or make the pipeline anew.",
            epoch=position.epoch,
            batch=position.batch,
        )


def state_of(plan: Plan, position: Position) -> dict[str, Any]:
    """The position as plain values, with what tells the data and their order from others."""
    # After the last batch of an epoch the next one is meant, also while the loop is still in the body for that batch.
    over = plan.num_batches is not None and position.batch >= plan.num_batches
    epoch, batch = (position.epoch + 1, 0) if over else (position.epoch, position.batch)
    return {"format": _FORMAT, "epoch": epoch, "batch": batch, **identity_of(plan)}


def identity_of(plan: Plan) -> dict[str, Any]:
    """What tells the rows of a pipeline and their order from others."""
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
    """The epoch and the batch of a state.

    Args:
        plan: What the pipeline does.
        state: What `state_of` made of a pipeline over the same data.

    Returns:
        Epoch and batch.

    Raises:
        WrongUse: It is no such state, or one of other data, another order or other batches.
    """
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise WrongUse("A state is what Pipeline.state() returned", "Give that.", state=state)
    for name, value in identity_of(plan).items():
        found = state.get(name)
        if not _is(value, found):
            raise WrongUse(
                f"A state is restored over the same data in the same order: `{name}` is what it was",
                "Make the pipeline as it was when the state was saved, or begin anew without restoring.",
                **{name: value, "saved": found},
            )
    epoch, batch = state.get("epoch"), state.get("batch")
    most = plan.num_batches
    if not is_whole(epoch, 0) or not is_whole(batch, 0) or (most is not None and int(batch) > most):
        raise WrongUse(
            f"A state counts epochs and batches from 0{'' if most is None else f', of {most} batches an epoch'}",
            "Give what Pipeline.state() returned.",
            epoch=epoch,
            batch=batch,
        )
    return int(epoch), int(batch)


def _is(value: Any, found: Any) -> bool:
    """Whether a value that was kept somewhere, as a number of another type perhaps, is the same."""
    try:
        return found is not None and bool(type(value)(found) == value)
    except (TypeError, ValueError):
        return False
