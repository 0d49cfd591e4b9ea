"""What an ordinary program chooses, which choices go together, and programs in which each pair of choices occurs."""

from __future__ import annotations

import hashlib
import inspect
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations

GLOBAL_BATCH = 24
"""Each number of replicas that is judged divides it, so that a batch is even where the program does not choose otherwise."""
STEPS = 8
REMAINDER = 19
"""Examples of an uneven last batch: two, three or four replicas get other numbers of them, and each gets some."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "way": ("plain", "core", "core-row", "core-step"),
    "style": ("fit", "train_step", "on_batch", "loop", "eager"),
    "topology": ("1x2", "1x3", "1x4", "2x1", "2x2"),
    "data": ("arrays", "slices", "generator", "tfrecord", "filter", "pydataset", "directory", "ragged", "dictionary"),
    "pipe": ("as-is", "shuffle", "cache", "prefetch", "repeat", "drop_remainder", "shuffle-cache-prefetch"),
    "last": ("even", "uneven"),
    "epochs": ("1", "2", "3"),
    "model": ("dense", "cnn", "lstm", "transformer", "embedding", "two_outputs", "subclassed"),
    "noise": ("none", "dropout", "gaussian", "augmentation"),
    "normalization": ("none", "batch", "synchronized", "layer"),
    "optimizer": (
        *("SGD", "Momentum", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Adafactor", "Lion", "Lamb"),
        *("Ftrl", "Muon", "LossScale", "Schedule", "AdamSchedule"),
    ),
    "option": ("none", "clipnorm", "global_clipnorm", "clipvalue", "weight_decay", "use_ema"),
    "loss": ("plain", "class_weight", "sample_weight", "l2", "label_smoothing"),
    "metrics": ("none", "accuracy", "auc", "f1", "top_k", "weighted"),
    "callback": ("none", "early_stopping", "checkpoint", "plateau", "scheduler", "tensorboard", "own"),
    "validation": ("none", "data", "evaluate"),
    "compile": ("none", "steps_per_execution", "run_eagerly", "no_jit"),
    "verify": ("none", "all", "one", "sixty-one", "float64", "virtual", "two", "no-namespaces"),
}
"""The simplest choice of each comes first: what is shrunk ends there."""

_CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")
_FIT = ("fit", "train_step")
_UNKNOWN_LENGTH = ("filter", "tfrecord")
_OWN = ("loop", "eager")
_OF_LOOPS = (
    *("loss-scaling", "clip-before-reduce", "regularization-per-replica", "local-normalization", "uneven-batch", "loss-report"),
    "samples-missing",
)
BUGS = {"fit": ("clip-before-reduce", "uneven-batch"), "loop": _OF_LOOPS, "eager": _OF_LOOPS}
"""By style the bugs that can be switched on in a program of plain tf.distribute, of those of `make fuzz`."""


@dataclass(frozen=True)
class Program:
    """The choices of one program: one of CHOICES in each field, and the bug that is switched on."""

    way: str = "plain"
    style: str = "fit"
    topology: str = "1x2"
    data: str = "arrays"
    pipe: str = "as-is"
    last: str = "even"
    epochs: str = "1"
    model: str = "dense"
    noise: str = "none"
    normalization: str = "none"
    optimizer: str = "SGD"
    option: str = "none"
    loss: str = "plain"
    metrics: str = "none"
    callback: str = "none"
    validation: str = "none"
    compile: str = "none"
    verify: str = "none"
    bug: str = ""

    @property
    def name(self) -> str:
        """Return a name that is the same for equal programs alone."""
        return "everyday-" + hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]

    @property
    def chosen(self) -> str:
        """Return the choices that are not the simplest ones, for tables."""
        simplest = Program()
        return " ".join(
            f"{field.name}={value}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != getattr(simplest, field.name)
        )

    @property
    def by_design(self) -> tuple[str, ...]:
        """Return the codes of what this program does by design: others accuse it."""
        if self.way.startswith("core"):
            return ()
        codes = ("identical-dropout",) * (self.noise != "none") + ("batchnorm-local-statistics",) * (
            self.normalization == "batch"
        )
        return codes + ("loss-report", "metric-aggregation") * (self.style in _FIT)  # of Keras's logs within an epoch


def go_together(chosen: Mapping[str, str]) -> bool:
    """Return whether choices can stand in one program."""
    return all(rule(*map(chosen.__getitem__, _bound_by(rule))) for rule in RULES)


def _bound_by(rule: Callable[..., bool]) -> list[str]:
    return list(inspect.signature(rule).parameters)


RULES: tuple[Callable[..., bool], ...] = (
    # Keras's fit of several hosts raises (keras#20585). An uneven batch and clipping are wrong there on several replicas.
    lambda way, style, topology: not (way == "plain" and style in _FIT and topology.startswith("2x")),
    lambda way, style, last, bug: not (way == "plain" and style in _FIT and last == "uneven" and not bug),
    lambda way, style, option: not (way == "plain" and style in _FIT and option in _CLIPPING),
    # At the end of an epoch of unknown length replicas of Keras's fit may count a step more, and its loss a batch more.
    lambda way, style, data, epochs, pipe: (
        way != "plain" or style not in _FIT or data not in _UNKNOWN_LENGTH or (epochs == "1" and pipe != "drop_remainder")
    ),
    lambda way, style: not (way == "plain" and style == "on_batch"),  # it gives each replica the whole batch
    lambda way, style: not (way in ("core", "core-row") and style in _OWN),
    lambda way, style: way != "core-step" or style == "loop",
    # What only fit has.
    lambda style, callback: style in _FIT or callback == "none",
    lambda style, validation: style in _FIT or validation == "none",
    lambda style, compile: style in _FIT or (style == "on_batch" and compile != "steps_per_execution") or compile == "none",  # noqa: A006
    lambda style, metrics: style in (*_FIT, "on_batch") or metrics in ("none", "accuracy"),
    # What a source can do. Keras itself makes batches of arrays, of a PyDataset and of a generator.
    lambda style, data: style in _FIT or data not in ("pydataset", "generator"),
    lambda way, data: (
        way != "plain" or data != "generator"
    ),  # on several replicas Keras 3.15 loses the batches that it builds with
    lambda data, pipe: data not in ("pydataset", "generator") or pipe == "as-is",
    lambda style, data, pipe: not (data == "arrays" and style in _FIT) or pipe == "as-is",
    lambda style, pipe: style in _FIT or pipe != "repeat",
    lambda last, pipe: last == "even" or pipe != "repeat",
    lambda way, pipe: way != "core-step" or pipe in ("as-is", "prefetch"),  # Pipeline.shuffle shuffles
    lambda way, data: way != "core-step" or data in ("arrays", "slices", "filter", "tfrecord", "dictionary"),
    # What a model can read.
    lambda data, model: data != "directory" or model == "cnn",
    lambda data, model: data != "dictionary" or model in ("dense", "two_outputs"),
    lambda data, model: data != "ragged" or model in ("lstm", "embedding"),
    lambda data, model: data != "tfrecord" or model != "two_outputs",
    lambda model, noise: model == "cnn" or noise != "augmentation",
    lambda model, normalization: model in ("dense", "cnn", "two_outputs", "subclassed") or normalization in ("none", "layer"),
    # Examples have weights where there is one output; the metric `weighted` needs them.
    lambda model, loss: model != "two_outputs" or loss in ("plain", "l2"),
    lambda model, metrics: model != "two_outputs" or metrics in ("none", "accuracy"),
    lambda data, loss: loss != "sample_weight" or data in ("arrays", "slices", "filter", "generator", "pydataset"),
    lambda loss, metrics: metrics != "weighted" or loss == "sample_weight",
    lambda style, loss: loss != "class_weight" or style in ("fit", *_OWN),
    lambda way, loss: way != "core-step" or loss != "class_weight",
    lambda data, style, loss: data != "generator" or style != "fit" or loss != "class_weight",  # Keras refuses it
    # Keras 3 does not add up the rows of a sparse gradient before it squares them. Own loops make it dense.
    lambda way, style, model, optimizer: not (way == "plain" and style in _FIT and model == "embedding") or optimizer == "SGD",
    lambda optimizer, callback: optimizer not in ("Schedule", "AdamSchedule") or callback not in ("plateau", "scheduler"),
    lambda optimizer, option: optimizer not in ("Ftrl", "Muon") or option != "weight_decay",
    lambda optimizer, option: optimizer != "LossScale" or option == "none",
    lambda model, optimizer: optimizer != "Muon" or model in ("dense", "subclassed", "two_outputs"),
    # Options of verify.
    lambda topology, verify: verify != "two" or topology != "1x2",
    lambda optimizer, verify: verify != "float64" or optimizer != "LossScale",
    lambda style, verify: verify != "virtual" or style != "eager",
    # Refused (docs/limits.md): a loop whose gradient is taken after a sum over the replicas.
    lambda way, style, last, model, verify: (
        verify != "virtual" or model != "lstm" or (way == "plain" and not (style in _OWN and last == "uneven"))
    ),
    lambda way, topology, verify: verify != "virtual" or way == "plain" or topology.startswith("1x"),  # refused: docs/limits.md
    lambda metrics, verify: verify != "float64" or metrics != "top_k",  # Keras's top-k metrics take float32 alone
    # One bug: it is there, it is alone, and nothing hides it.
    lambda way, bug: not bug or way == "plain",
    lambda style, bug: not bug or bug in BUGS.get(style, ()),
    lambda last, bug: not bug or (last == "uneven") == (bug == "uneven-batch"),
    lambda loss, bug: not bug or (loss == "l2") == (bug == "regularization-per-replica"),
    lambda loss, bug: not bug or (loss == "sample_weight") == (bug == "local-normalization"),
    lambda option, bug: not bug or option in ("none", "weight_decay"),
    lambda optimizer, bug: not bug or optimizer not in ("Lion", "Adafactor", "LossScale", "Ftrl"),
    lambda noise, bug: not bug or noise == "none",
    lambda normalization, bug: not bug or normalization != "batch",
    lambda pipe, bug: not bug or pipe != "drop_remainder",
    lambda verify, bug: not bug or verify in ("none", "all", "two", "no-namespaces"),
    lambda model, bug: bug != "local-normalization" or model != "two_outputs",
)
"""Each binds the choices that its parameters name, and says whether they can stand in one right program, or with one bug."""
_RULES_OF = {name: [(rule, _bound_by(rule)) for rule in RULES if name in _bound_by(rule)] for name in (*CHOICES, "bug")}
_CANDIDATES = 24
"""Of so many random programs the one with the most new pairs is taken: more would hardly cover the pairs in fewer programs."""


def draw(number: int, seed: int, bugs: bool = False) -> list[Program]:
    """Draw programs one after the other, each for the pairs of choices that no earlier one has.

    That is the covering of AETG (Cohen et al., IEEE TSE 1997). Libraries for it (allpairspy 2.5, covertable 3.2) do not end
    within minutes on choices with so many rules.

    Args:
        number: How many different programs.
        seed: Other programs for each seed.
        bugs: Whether one bug is switched on in each; else all are right.

    Returns:
        The programs; any first part of them covers as many pairs as so few can.
    """
    randomness = random.Random(seed)
    choices = {**CHOICES, "bug": tuple(sorted({bug for some in BUGS.values() for bug in some})) if bugs else ("",)}
    found: dict[str, Program] = {}
    covered: set[tuple[tuple[str, str], ...]] = set()
    while len(found) < number:
        candidates = [_random_program(randomness, choices) for _ in range(_CANDIDATES)]
        best = max(candidates, key=lambda one: len(pairs(one) - covered))
        covered |= pairs(best)
        found.setdefault(best.name, best)
    return list(found.values())


def pairs(program: Program) -> set[tuple[tuple[str, str], ...]]:
    """Return the pairs of choices that a program holds."""
    return set(combinations(asdict(program).items(), 2))


def _random_program(randomness: random.Random, choices: Mapping[str, Sequence[str]]) -> Program:
    while True:
        chosen: dict[str, str] = {}
        for name in randomness.sample(list(choices), len(choices)):
            possible = [value for value in choices[name] if _is_allowed({**chosen, name: value}, name)]
            if not possible:
                break  # the rules bind more than two choices: begin again
            chosen[name] = randomness.choice(possible)
        else:
            return Program(**chosen)


def _is_allowed(chosen: Mapping[str, str], name: str) -> bool:
    """Return whether the rules that bind a choice hold, of those whose other choices are made."""
    return all(rule(*map(chosen.__getitem__, bound)) for rule, bound in _RULES_OF[name] if chosen.keys() >= set(bound))


def simpler(program: Program) -> Iterator[Program]:
    """Yield the programs that differ by one choice, which is the simplest one that the rest allows; the largest steps first."""
    for name, values in CHOICES.items():
        for value in values[: values.index(getattr(program, name))]:
            changed = {**asdict(program), name: value}
            if go_together(changed):
                yield Program(**changed)
                break
