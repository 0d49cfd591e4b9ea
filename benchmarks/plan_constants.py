"""Check the constants of the planner: halve and double each, and choose all without the source that is then predicted."""

from __future__ import annotations

from benchmarks.plan_accuracy import DATA, LATER_DATA, Groups, figures, name_of, of_groups, read
from emulate.plan import model

PLACES = {
    "STRAGGLING_MEDIAN": model,
    "STRAGGLING_SPREAD": model,
    "BANDWIDTH_SPREAD": model,
    "RING_SPREAD": model,
    "LATENCY_SPREAD": model,
    "OVERLAP_MAX": model,
    "NOISE": model,
    "NETWORK_SPREAD": model,
    "ALWAYS_WAITED": model,
    "USUAL_COLLECTIVES": model,
    "TAIL": model,
}
FACTORS = (0.5, 0.75, 1.5, 2.0)


def put(name: str, value: float) -> None:
    """Set a constant."""
    setattr(PLACES[name], name, value)
    model.draws.cache_clear()


def score(groups: Groups) -> float:
    """Return how bad the predictions are: the median, a fifth of the 90th percentile, and what intervals lack to 90 %."""
    found = figures(of_groups(groups, 1))
    return found["median"] + found["p90"] / 5 + max(0.0, 90 - found["held"]) / 5


def choose(groups: Groups, start: dict[str, float]) -> dict[str, float]:
    """Choose each constant in turn for these groups, from its value and four others."""
    best = score(groups)
    chosen = dict(start)
    for name, value in start.items():
        for factor in FACTORS:
            put(name, value * factor)
            if (now := score(groups)) < best:
                best, chosen[name] = now, value * factor
            put(name, chosen[name])
    return chosen


def main() -> None:
    """Print both checks."""
    groups = [*read(DATA), *read(LATER_DATA)]
    start = {name: float(getattr(place, name)) for name, place in PLACES.items()}
    print("from one GPU, as it is", figures(of_groups(groups, 1)))
    for name, value in start.items():
        for factor in (0.5, 2.0):
            put(name, value * factor)
            print(f"{name} x {factor}", figures(of_groups(groups, 1)), figures(of_groups(groups, 2)))
        put(name, value)
    every = []
    for source in dict.fromkeys(name_of(group) for group in groups):
        left = [group for group in groups if name_of(group) == source]
        as_it_is = figures(of_groups(left, 1))
        chosen = choose([group for group in groups if name_of(group) != source], start)
        predictions = of_groups(left, 1)
        every += predictions
        changed = {name: f"x {value / start[name]:g}" for name, value in chosen.items() if value != start[name]}
        print(f"{source}: as it is {as_it_is}; constants chosen on the others {figures(predictions)} {changed}")
        for name, value in start.items():
            put(name, value)
    print("all sources, each predicted with constants chosen on the others:", figures(every))


if __name__ == "__main__":
    main()
