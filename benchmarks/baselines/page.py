"""The page docs/baselines.md, from what was judged."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.baselines.alternatives import ALTERNATIVES, Alternative
from benchmarks.baselines.runs import ROOT
from fixtures.corpus.index import Program

STORED = ROOT / "benchmarks" / "scorecard" / "stored.json"
LEAD = """# What other checks find

How do people check a distributed program without gpudist? `make baselines` runs each program of [the collection](corpus.md)
with plain TensorFlow, on one device and on its topologies, and asks other checks. Replicas are logical CPUs. Hosts are
processes with one replica. Each right program that a check accuses is a false alarm. A program that a check cannot be asked
of counts as not accused.
"""
NOTES = """
## What the checks compare

- The last loss is the last one that the program prints.
- Weights are the trained variables at the end, compared as `np.testing.assert_allclose` does it.
- D3 trains models of its own for one step of SGD with the learning rate 10, on a batch that the devices share evenly. It
  compares predictions with rtol=1e-4 and atol=5e-4. Here the programs are given. So the optimizer of the program makes one
  such step on the program's first batch, and no later one. In all programs the devices share the first batch evenly.
  Clipping, sums over the replicas and weight decay stay as the program has them. The check compares the weights after the
  step, with the same tolerances: programs without a Keras model have weights, too. It cannot be asked of a program that has
  no Keras optimizer.
- arXiv 2602.14462 watches three values of each step before the sum over the replicas: how far the replicas' losses and
  gradient norms lie apart (standard deviations), and whether the gradients point in one direction (cosines). It names no
  limit. Here each value is the mean over all steps, the deviations are divided by the mean of the replicas, and the limit is
  the best one for these programs. The check cannot be asked of a program that uses `tf.gradients` instead of a tape.
- The row of gpudist is from [the scorecard](scorecard.md), for the same programs. gpudist names the cause and the line. No
  other check does.

`seconds` is the median over the programs of the runs that a check needs for one topology. gpudist's are those of the
scorecard, where TensorFlow is imported once for all programs. The other runs import it each time.
"""
COLUMNS = ("wrong programs found", "right programs accused", "cause named", "line named", "cannot be asked", "seconds")


@dataclass(frozen=True)
class Judged:
    """What the runs of a program gave.

    Attributes:
        program: The program.
        has_ended: Whether all of its runs did: then there is something to compare.
        scores: Of each alternative by its name the highest score of a topology; None where it cannot be asked.
        seconds: Of each script the seconds for one topology.
    """

    program: Program
    has_ended: bool
    scores: Mapping[str, float | None]
    seconds: Mapping[str, float]

    def is_accused(self, by: Alternative, limit: float) -> bool:
        """Return whether a check accuses the program, with this limit."""
        score = self.scores[by.name]
        return score is not None and score > limit


def page(judged: Sequence[Judged], number: int) -> str:
    """Return the page.

    Args:
        judged: The programs that were run.
        number: How many there are.
    """
    ended = [one for one in judged if one.has_ended]
    wrong, right = ([one for one in ended if one.program.is_wrong is kind] for kind in (True, False))
    fails = ", ".join(f"`{one.program.id}`" for one in judged if not one.has_ended)
    lines = [LEAD, *_table(wrong, right), ""]
    lines += [f"Not counted, because a run of them does not end or fails: {fails}.", ""] if fails else []
    lines += [f"{number - len(judged)} of {number} programs have not been run yet.", ""] if len(judged) < number else []
    lines += ["With these limits a check judges most programs rightly:", "", *_limits(wrong, right), NOTES.rstrip("\n")]
    return "\n".join(lines) + "\n"


def _table(wrong: Sequence[Judged], right: Sequence[Judged]) -> Iterator[str]:
    yield f"| check | after | {' | '.join(COLUMNS)} |"
    yield f"|---|---|{'---:|' * len(COLUMNS)}"
    for one in ALTERNATIVES:
        limit = best(one, wrong, right) if one.limit is None else one.limit
        found, accused = (sum(its.is_accused(one, limit) for its in group) for group in (wrong, right))
        mute = sum(its.scores[one.name] is None for its in (*wrong, *right))
        seconds = statistics.median(its.seconds[one.script] for its in (*wrong, *right))
        counts = f"{found} of {len(wrong)} | {accused} of {len(right)}"
        yield f"| {one.name} | {one.origin} | {counts} | no | no | {mute} | {seconds:.1f} |"
    yield _of_gpudist({one.program.id for one in (*wrong, *right)})


def _limits(wrong: Sequence[Judged], right: Sequence[Judged]) -> Iterator[str]:
    for one in {one.measure: one for one in ALTERNATIVES if one.measure != "copies"}.values():
        limit = best(one, wrong, right)
        found, accused = (sum(its.is_accused(one, limit) for its in group) for group in (wrong, right))
        yield f"- {one.measure}: {limit:.2g} finds {found} of {len(wrong)} and accuses {accused} of {len(right)}"


def best(by: Alternative, wrong: Sequence[Judged], right: Sequence[Judged]) -> float:
    """Return the limit with which a check finds most wrong programs, less those right ones that it accuses."""
    scores = {score for one in (*wrong, *right) if (score := one.scores[by.name]) is not None}

    def gain(limit: float) -> int:
        return sum(one.is_accused(by, limit) for one in wrong) - sum(one.is_accused(by, limit) for one in right)

    return max(sorted({0.0, *scores}, reverse=True), key=gain)


def _of_gpudist(names: set[str]) -> str:
    """Return gpudist's own line, from the stored scorecard."""
    cells = [cell for cell in json.loads(STORED.read_text())["cells"] if cell["group"] == "corpus"]
    by_program: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        if (name := cell["name"].partition(" ")[0]) in names:
            by_program.setdefault(name, []).append(cell)
    wrong, right = ([its for its in by_program.values() if its[0]["is_right"] is kind] for kind in (False, True))
    found = sum(all(cell["detected"] for cell in its) for its in wrong)
    accused = sum(any(cell["false_alarm"] for cell in its) for its in right)
    first = sum(all(cell["named_first"] for cell in its) for its in wrong)
    lines = [its for its in wrong if its[0]["line_right"] is not None]
    named = sum(all(cell["line_right"] for cell in its) for its in lines)
    seconds = statistics.median(cell["seconds"] for its in by_program.values() for cell in its)
    counts = f"{found} of {len(wrong)} | {accused} of {len(right)} | {first} of {len(wrong)} | {named} of {len(lines)}"
    return f"| **gpudist** | `make scorecard` | {counts} | 0 | {seconds:.1f} |"
