"""Measure how well gpudist plans: predict published throughputs from their one-GPU row, and compare."""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from emulate.errors import UsageError
from emulate.plan import ALL_REDUCE, LOCAL_SERVERS, SERVERS, StepModel, Work, machine_of

DATA = Path(__file__).parent / "data" / "public_throughput.csv"
LATER_DATA = DATA.with_name("later_throughput.csv")
"""Sources that came when the model and its constants were there."""
PAGE = Path(__file__).parents[1] / "docs" / "plan_accuracy.md"
GROUP = ("machine", "gpu", "gpus_per_host", "link_inside", "link_between", "model", "dtype", "update", "batch_per_gpu")
VALUES = ("params_millions", "num_gpus", "examples_per_second")
USUAL_BATCH = 256.0
"""Where a row does not say its batch: what NVIDIA's examples take for images."""
GRADIENT_BYTES = {"fp16": 2, "float16": 2}
"""Bytes of a gradient's element, 4 for all else: mixed precision (amp, bf16) and TF32 keep variables and gradients in 32 bits.

tf_cnn_benchmarks sends gradients in 16 bits with --use_fp16 (--compact_gradient_transfer, on by default)."""

Row = Mapping[str, str]
Groups = Sequence[Sequence[Row]]


@dataclass(frozen=True)
class Prediction:
    """One row beside what was predicted for it, in examples a second."""

    row: Row
    num_gpus: int
    measured: float
    low: float
    middle: float
    high: float

    @property
    def error(self) -> float:
        return abs(self.middle / self.measured - 1)

    @property
    def held(self) -> bool:
        return self.low <= self.measured <= self.high


def read(path: Path) -> list[list[Row]]:
    """Read the rows in groups, each with its numbers of GPUs in increasing order."""
    if not path.is_file():
        raise UsageError(f"DATA must name a file. Received: DATA={str(path)!r}.")
    groups: dict[tuple[str, ...], list[Row]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if missing := [name for name in (*GROUP, *VALUES) if name not in (reader.fieldnames or ())]:
            raise UsageError(
                f"DATA must have the columns of benchmarks/data/README.md. Received: DATA={str(path)!r} without {missing}."
            )
        for row in reader:
            groups.setdefault(tuple(row[name] for name in GROUP), []).append(row)
    return [sorted(group, key=lambda row: int(row["num_gpus"])) for group in groups.values()]


def name_of(group: Sequence[Row]) -> str:
    """Return the name of a group's source: its text without what stands in parentheses."""
    return group[0]["source"].partition(" (")[0]


def exchange_of(update: str) -> str:
    """Return how gradients are exchanged, from the word that the benchmark used for it."""
    words = update.lower()
    if "server" in words and "cpu" in words:
        return LOCAL_SERVERS
    is_served = "server" in words or words == "ps" or (words.startswith("distributed") and "reduce" not in words)
    return SERVERS if is_served else ALL_REDUCE


def model_of(row: Row) -> StepModel:
    """Return the model that a group's row of one GPU gives."""
    named = {"gpu": row["gpu"], "gpus_per_host": int(row["gpus_per_host"])}
    links = {name: row[name] for name in ("link_inside", "link_between") if row[name]}
    batch = float(row["batch_per_gpu"] or USUAL_BATCH)
    size = float(row["params_millions"]) * 1e6 * GRADIENT_BYTES.get(row["dtype"].lower(), 4)
    # TensorFlow's own strategies pack all gradients into one message. Others send one for each variable, or nobody knows.
    work = Work(
        step_seconds=batch / float(row["examples_per_second"]),
        batch=batch,
        gradient_bytes=size,
        exchange=exchange_of(row["update"]),
        collectives=1 if re.search("mirrored|collective", row["update"].lower()) else None,
        sends_early="horovod" in row["update"].lower(),
    )
    return StepModel(machine_of(row["machine"], {**named, **links}), work)


def has_one_gpu(group: Sequence[Row]) -> bool:
    """Return whether a group has the row that all its others are predicted from."""
    return int(group[0]["num_gpus"]) == 1


def predict(group: Sequence[Row], points: int) -> list[Prediction]:
    """Predict a group's rows from its first ones.

    Args:
        group: Rows of one program on one machine, the first of one GPU.
        points: 1: from that row alone. 2: from the next besides.
    """
    if not has_one_gpu(group):
        return []
    model = model_of(group[0])
    batch = model.work.batch
    for row in group[1:points]:
        model = model.learn(int(row["num_gpus"]), batch * int(row["num_gpus"]) / float(row["examples_per_second"]))
    return [predict_row(model, row) for row in group[points:]]


def predict_row(model: StepModel, row: Row) -> Prediction:
    """Predict the throughput of a row."""
    count = int(row["num_gpus"])
    rate = model.step_seconds(count).inverse(model.work.batch * count)
    return Prediction(row, count, float(row["examples_per_second"]), rate.low, rate.middle, rate.high)


Rule = Callable[[Sequence[Row], int], list[Prediction]]


def plain_rule(group: Sequence[Row], points: int) -> list[Prediction]:
    """Predict N times one GPU, to compare with."""
    one = float(group[0]["examples_per_second"])
    rates = [(row, int(row["num_gpus"]), float(row["examples_per_second"])) for row in group[points:]]
    return [Prediction(row, count, rate, one * count, one * count, one * count) for row, count, rate in rates]


def figures(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Return the errors and how often the interval held, in percent."""
    if not predictions:
        raise UsageError(
            "DATA must have groups with a row of one GPU and others. Received: none. See benchmarks/data/README.md."
        )
    errors = 100 * np.array([one.error for one in predictions])
    held = 100 * float(np.mean([one.held for one in predictions]))
    found = {"median": np.median(errors), "p90": np.percentile(errors, 90, method="higher"), "max": errors.max(), "held": held}
    return {name: round(float(value), 2) for name, value in found.items()}


def of_groups(
    groups: Iterable[Sequence[Row]], points: int, rule: Callable[..., list[Prediction]] = predict
) -> list[Prediction]:
    """Predict all groups."""
    return [one for group in groups for one in rule(group, points)]


def usable(groups: Iterable[Sequence[Row]]) -> tuple[list[Sequence[Row]], list[str]]:
    """Return the groups that can be predicted, and of each other one why not."""
    good: list[Sequence[Row]] = []
    refused: list[str] = []
    for group in groups:
        name = f"{group[0]['machine']} {group[0]['model']} {group[0]['dtype']} {group[0]['batch_per_gpu']}"
        try:
            if not has_one_gpu(group):
                raise UsageError("it has no row of one GPU")
            of_groups([group], 1)
            good.append(group)
        except UsageError as error:
            refused.append(f"NOT predicted ({len(group)} rows): {name}: {error}")
    return good, refused


def line_of(name: str, predictions: Sequence[Prediction], *, has_interval: bool = True) -> str:
    """Return a line of a table."""
    found = figures(predictions)
    held = f"{found['held']:.0f} %" if has_interval else ""
    errors = f"{found['median']:.1f} % | {found['p90']:.1f} % | {found['max']:.0f} %"
    return f"| {name} | {len(predictions)} | {errors} | {held} |"


def table(groups: Groups) -> str:
    """Return the table of a file, with the constants as they are."""
    one, two = of_groups(groups, 1), of_groups(groups, 2)
    reduced = [prediction for prediction in one if exchange_of(prediction.row["update"]) == ALL_REDUCE]
    lines = [line_of("N times one GPU", of_groups(groups, 1, plain_rule), has_interval=False), line_of("from one GPU", one)]
    lines += [line_of("from one GPU, rows with all-reduce", reduced)] if reduced else []
    lines += [line_of("from one GPU and the smallest N", two)] if two else []
    for machine in sorted({prediction.row["machine"] for prediction in one}):
        lines.append(line_of(f"from one GPU, {machine}", [p for p in one if p.row["machine"] == machine]))
    head = "| prediction | predictions | median error | 90th percentile | maximum | interval held |"
    return "\n".join([head, "|---|---:|---:|---:|---:|---:|", *lines]) + "\n"


def main() -> None:
    """Print each row's prediction, the figures, and last a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=DATA, help="a CSV file with the columns of benchmarks/data/public_throughput.csv"
    )
    options = parser.parse_args()
    groups, refused = usable(read(options.data))
    one, two = of_groups(groups, 1), of_groups(groups, 2)
    for prediction in sorted(one, key=lambda each: each.error):
        row, rate = prediction.row, f"{prediction.middle:.0f} [{prediction.low:.0f}, {prediction.high:.0f}]"
        name = f"{row['machine']} {row['model']} {row['dtype']} {row['batch_per_gpu']} x {prediction.num_gpus}"
        print(f"{100 * prediction.error:6.1f} %  {name}: {rate} predicted, {prediction.measured:g} measured")
    print("\n".join(["", *refused, table(groups)]))
    print(json.dumps({"from": "one GPU and the smallest N", **(figures(two) if two else {})}))
    print(json.dumps(figures(one)))


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(f"plan-accuracy: {error}")
