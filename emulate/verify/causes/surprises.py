"""Name what Keras computes otherwise than a program seems to say, on one device too: advice, which decides nothing.

Each was found by running Keras (`findings/`). Its text in `framework-limit.md` has the version, the source and the way round.
"""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, names_in_words
from emulate.verify.lines import made

_STEPS = (
    "With gradient_accumulation_steps Keras's learning rate schedule and its average (use_ema) count small batches, not updates"
)
_MASKS = "A merging layer of Keras 3 gives no mask on if one of its inputs has none, so padding counts"
_LOST_BATCHES = "Keras's fit never trains on some batches of a Python generator under a strategy"


def _seen(case: Case) -> dict[str, str]:
    """Return the evidence of each surprise that a program meets, by its heading."""
    seen = {}
    for name, about in case.facts.optimizers.items():
        settings = about.get("settings", {})
        number = settings.get("gradient_accumulation_steps", 0)
        if number > 1 and (about.get("scheduled") or settings.get("use_ema")):
            seen[_STEPS] = f"{name} accumulates {number:g} batches, with a schedule or use_ema"
    if case.facts.unmasked:
        seen[_MASKS] = f"{names_in_words(case.facts.unmasked)} has an input with a mask and one without"
    if case.facts.distributes_generator and not case.facts.distributed and not case.has("framework-limit"):
        seen[_LOST_BATCHES] = "fit distributes a Python generator. How many batches are lost depends on time"
    return seen


def _search(case: Case) -> Sign | None:
    seen = _seen(case)
    summary = " ".join([*(f"{heading}." for heading in seen), "One device does the same."])
    return Sign(summary, "; ".join(seen.values()), [*seen]) if seen else None


def _search_lost_batches(case: Case) -> Sign | None:
    evidence, ledger = _seen(case).get(_LOST_BATCHES), case.ledger
    if evidence is None or ledger is None or ledger.first_apart is None:
        return None
    return Sign(f"{_LOST_BATCHES}.", f"{evidence}; from step {ledger.first_apart} on the examples differ", _LOST_BATCHES)


LOST_BATCHES = Cause("framework-limit", _search_lost_batches, blame=(made("examples", "distribute"),))
SURPRISING = Cause("framework-limit", _search, advice=True)
