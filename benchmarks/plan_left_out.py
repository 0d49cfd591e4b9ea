"""Predict each source of measurements with constants that were chosen on all other sources."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np

from benchmarks.plan_accuracy import (
    DATA,
    LATER_DATA,
    PAGE,
    Groups,
    Prediction,
    exchange_of,
    figures,
    line_of,
    name_of,
    of_groups,
    plain_rule,
    read,
)
from benchmarks.plan_constants import put
from emulate.plan import ALL_REDUCE, model

COLLECTIVES = (20, 40, 80, 160, 320)
TAILS = (0.05, 0.04, 0.03, 0.02, 0.01)
WANTED = 90.0
"""Of 100 intervals of each source that is not left out so many must hold."""
HEAD = (
    "| source that is left out | predictions | median error | 90th percentile | maximum | interval held |\n"
    "|---|---:|---:|---:|---:|---:|"
)
Predictions = Mapping[str, Sequence[Prediction]]
Predictor = Callable[[int, float, int], Predictions]


def sources_of(groups: Groups) -> dict[str, Groups]:
    """Return the groups of each source. A file of a repository, an issue and an article are sources."""
    names = dict.fromkeys(name_of(group) for group in groups)
    return {name: [group for group in groups if name_of(group) == name] for name in names}


def predictor_of(sources: Mapping[str, Groups]) -> Predictor:
    """Return a function that predicts all sources with given constants."""

    @cache
    def predict_all(collectives: int, tail: float, points: int) -> Predictions:
        put("USUAL_COLLECTIVES", collectives)
        put("TAIL", tail)
        return {name: of_groups(groups, points) for name, groups in sources.items()}

    return predict_all


def with_all_reduce(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the predictions of the kind that `gpudist plan` makes."""
    return [each for each in predictions if exchange_of(each.row["update"]) == ALL_REDUCE]


def choose(names: Sequence[str], predict_all: Predictor) -> tuple[int, float]:
    """Choose the constants on these sources.

    Args:
        names: The sources. Only their measurements with all-reduce count, and each source counts the same.
        predict_all: Predicts all sources with given constants.

    Returns:
        The number of collectives with the smallest error, and the largest tail with which 90 of 100 intervals hold in each
        source; the smallest of `TAILS` where none does.
    """

    def found(collectives: int, tail: float) -> list[dict[str, float]]:
        kept = [with_all_reduce(predict_all(collectives, tail, 1)[name]) for name in names]
        return [figures(predictions) for predictions in kept if predictions]

    collectives = min(COLLECTIVES, key=lambda count: float(np.mean([each["median"] for each in found(count, TAILS[0])])))
    enough = [tail for tail in TAILS if all(each["held"] >= WANTED for each in found(collectives, tail))]
    return collectives, max(enough, default=min(TAILS))


def predict_left_out(groups: Groups, points: int = 1) -> tuple[dict[str, list[Prediction]], set[tuple[int, float]]]:
    """Predict each source with the constants that all others choose.

    Args:
        groups: The groups of all sources.
        points: 1: from the row of one GPU alone. 2: from the next besides.

    Returns:
        The predictions of each source that has some, and the constants that were chosen.
    """
    before = model.USUAL_COLLECTIVES, model.TAIL
    sources = sources_of(groups)
    predict_all = predictor_of(sources)
    try:
        chosen = {name: choose([other for other in sources if other != name], predict_all) for name in sources}
        predicted = {name: list(predict_all(*chosen[name], points)[name]) for name in sources}
        return {name: predictions for name, predictions in predicted.items() if predictions}, set(chosen.values())
    finally:
        put("USUAL_COLLECTIVES", before[0])
        put("TAIL", before[1])


def page() -> str:
    """Return the page of the documentation: the table, each source left out in turn."""
    groups = [*read(DATA), *read(LATER_DATA)]
    by_source, chosen = predict_left_out(groups)
    every = [each for predictions in by_source.values() for each in predictions]
    second = [each for predictions in predict_left_out(groups, 2)[0].values() for each in predictions]
    served = [each for each in every if exchange_of(each.row["update"]) != ALL_REDUCE]
    lines = [
        line_of("**all sources**", every),
        line_of("all-reduce, which `gpudist plan` plans", with_all_reduce(every)),
        line_of("parameter servers, which it refuses", served),
        line_of("from one GPU and the smallest N", second),
        line_of("N times one GPU", of_groups(groups, 1, plain_rule), has_interval=False),
        *(line_of(name, predictions) for name, predictions in by_source.items()),
    ]
    held = np.mean([figures(predictions)["held"] for predictions in by_source.values()])
    counts = " or ".join(str(count) for count in sorted({collectives for collectives, _ in chosen}))
    tails = " or ".join(f"{tail:.0%}" for tail in sorted({tail for _, tail in chosen}))
    return (
        "\n".join([HEAD, *lines])
        + f"\n\nIn the mean of the {len(by_source)} sources {held:.0f} % of the intervals hold. The sources that were not left "
        f"out chose {counts} collectives and tails of {tails}. gpudist has {model.USUAL_COLLECTIVES} and {model.TAIL:.0%}.\n"
    )


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", action="store_true", help="write the table of the documentation")
    text = page()
    if parser.parse_args().store:
        PAGE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
