"""Compose programs whose right answer is known by construction: each bug is a switch, beside harmless company.

`python -m benchmarks.scorecard.generated` draws the programs of the scorecard anew, into drawn.json.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.scorecard.cells import KEPT
from benchmarks.scorecard.corpus import Answer, Entry
from fixtures.corpus.index import MARK, marked_lines

DRAWN = Path(__file__).resolve().parent / "drawn.json"
DRAWS = 100
FOLDER = KEPT / "generated"
GLOBAL_BATCH = 24
STEPS = 8
REMAINDER = 7  # of two, three or four replicas not all have the same number of these, and each has some


@dataclass(frozen=True)
class Spec:
    """One composed program.

    Attributes:
        topology: Where it is judged.
        style: `loop` (compiled), `eager`, `fit`, or `train_step`.
        bugs: The codes of the bugs that are switched on.
        model: `dense`, `conv` or `embedding`.
        optimizer: A line of Python.
        weights: Whether each example has a weight of 0 or 1, and the loss is divided by the sum of the weights.
        l2: Whether the loss has an L2 term, which is right where `regularization-per-replica` is off.
        clip: Whether gradients are clipped, which is after the sum where `clip-before-reduce` is off.
        micro: Whether each replica takes its share in two micro-batches.
        remainder: Whether the last batch is smaller, and the replicas share it unevenly.
        dropout: Whether the model drops units: all replicas draw the same mask then, by design.
    """

    topology: str = "1x2"
    style: str = "loop"
    bugs: tuple[str, ...] = ()
    model: str = "dense"
    optimizer: str = "SGD(0.1)"
    weights: bool = False
    l2: bool = False
    clip: bool = False
    micro: bool = False
    remainder: bool = False
    dropout: bool = False

    @property
    def name(self) -> str:
        """Return a name that is the same for equal programs alone."""
        return "generated-" + hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]

    @property
    def answer(self) -> Answer:
        """Return the right answer."""
        good = ("by-design", "equivalent") if self.dropout else ("equivalent",)
        return Answer(("divergent",) if self.bugs else good, self.bugs, marked_lines(self.text), any_first=True)

    @property
    def text(self) -> str:
        """Return the program."""
        return "\n".join(_fit(self) if self.style == "fit" else _loop(self)) + "\n"

    def entry(self, folder: Path = FOLDER) -> Entry:
        """Write the program into a folder and return it as one of the scorecard."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.py"
        path.write_text(self.text)
        return Entry(self.name, path, (self.topology,), self.answer, source=json.dumps(asdict(self)), group="generated")


LOOP_BUGS = (
    "loss-scaling",
    "clip-before-reduce",
    "regularization-per-replica",
    "local-normalization",
    "uneven-batch",
    "loss-report",
    "missing-all-reduce",
    "samples-missing",
    "samples-repeated",
)
FIT_BUGS = ("clip-before-reduce", "uneven-batch")
_OF_THE_DIVISOR = {"loss-scaling", "local-normalization", "uneven-batch"}
"""Each says what the loss is divided by, so that one alone can hold."""
_HIDDEN_BY_NO_SUM = {"loss-scaling", "local-normalization", "uneven-batch", "regularization-per-replica", "clip-before-reduce"}
"""Where gradients are not summed each replica trains a model of its own, and these cannot be told apart from it."""


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Draw a program that is well defined: what the bugs need is there, and none hides another."""
    style = draw(st.sampled_from(["loop", "eager", "fit", "train_step"]))
    topology = draw(
        st.sampled_from(["1x2", "1x3", "1x4"] if style in ("fit", "train_step") else ["1x2", "1x3", "1x4", "2x1", "2x2"])
    )
    possible = [bug for bug in (FIT_BUGS if style == "fit" else LOOP_BUGS) if _applies(bug, topology, style)]
    number = min(draw(st.sampled_from([1, 0, 2, 3])), len(possible))
    bugs = _compatible(draw(st.lists(st.sampled_from(possible), min_size=number, max_size=number, unique=True)), topology)
    company = {name: draw(st.booleans()) for name in ("weights", "l2", "clip", "micro", "remainder", "dropout")}
    for name, needed_by, not_with in (
        ("weights", {"local-normalization"}, {"loss-scaling", "uneven-batch"}),
        ("l2", {"regularization-per-replica"}, set()),
        ("clip", {"clip-before-reduce"}, set()),
        ("remainder", {"uneven-batch"}, {"loss-scaling", "samples-missing", "samples-repeated", "local-normalization"}),
        ("micro", set(), {"local-normalization", "loss-scaling", "uneven-batch", "missing-all-reduce"}),
        ("dropout", set(), {"missing-all-reduce"}),
    ):
        company[name] = bool(needed_by & set(bugs)) or (company[name] and not not_with & set(bugs))
    if style == "fit":
        company |= {"micro": False, "weights": False, "remainder": "uneven-batch" in bugs, "clip": "clip-before-reduce" in bugs}
    model = draw(st.sampled_from(["dense", "conv", "embedding"]))
    optimizers = ["SGD(0.1)", "SGD(0.1, momentum=0.9)", "Adam(0.01)"]
    optimizer = "SGD(0.1)" if "missing-all-reduce" in bugs else draw(st.sampled_from(optimizers))
    return Spec(topology, style, tuple(sorted(bugs)), model, optimizer, **company)


def _applies(bug: str, topology: str, style: str) -> bool:
    if bug == "samples-repeated":
        return topology.startswith("2x")
    if style == "train_step":
        return bug not in ("loss-report", "missing-all-reduce", "samples-missing")
    return True


def _compatible(bugs: list[str], topology: str) -> list[str]:
    """Return the bugs, in their order, without those that an earlier one excludes."""
    kept: list[str] = []
    for bug in bugs:
        others = set(kept)
        excluded = (bug in _OF_THE_DIVISOR and others & _OF_THE_DIVISOR) or {bug, *others} >= {
            "samples-missing",
            "samples-repeated",
        }
        # Replicas that all have the same examples divide by the same count, and need no sum to stay alike.
        own = {"local-normalization", "missing-all-reduce"}
        are_alike = topology == "2x1" and "samples-repeated" in {bug, *others} and bool(own & {bug, *others})
        hidden = {bug, *others} & _HIDDEN_BY_NO_SUM if "missing-all-reduce" in {bug, *others} else set()
        if not (excluded or are_alike or hidden):
            kept.append(bug)
    return kept


def drawn() -> list[Entry]:
    """Return the programs that belong to the scorecard."""
    return [_spec(fields).entry() for fields in json.loads(DRAWN.read_text())]


def _spec(fields: dict[str, object]) -> Spec:
    return Spec(**{**fields, "bugs": tuple(fields["bugs"])})  # type: ignore[arg-type]


def _head(spec: Spec) -> Iterator[str]:
    several = spec.topology.startswith("2x")
    examples = GLOBAL_BATCH * STEPS + (REMAINDER if spec.remainder else 0)
    yield f'"""Composed: {spec.style}, {spec.model}; {", ".join(spec.bugs) or "right"}."""'
    yield "import keras, numpy as np, tensorflow as tf"
    yield f"strategy = tf.distribute.{'MultiWorkerMirroredStrategy' if several else 'MirroredStrategy'}()"
    yield "n = strategy.num_replicas_in_sync"
    yield "keras.utils.set_random_seed(1)"
    yield f"rng = np.random.default_rng(1); examples = {examples}"
    yield {
        "dense": 'x = rng.normal(size=(examples, 10)).astype("float32"); y = (np.abs(x[:, 0]) * 2).astype(int) % 4',
        "conv": 'x = rng.normal(size=(examples, 6, 6, 1)).astype("float32"); y = (np.abs(x[:, 0, 0, 0]) * 2).astype(int) % 4',
        "embedding": 'x = rng.integers(0, 20, size=(examples, 5)).astype("int32"); y = x[:, 0].astype(int) % 4',
    }[spec.model]
    yield "with strategy.scope():"
    yield f"    model = keras.Sequential([{', '.join(_layers(spec))}])"


def _layers(spec: Spec) -> Iterator[str]:
    regular = ", kernel_regularizer=keras.regularizers.L2(0.01)" if spec.l2 and spec.style == "fit" else ""
    yield {
        "dense": f'keras.Input((10,)), keras.layers.Dense(8, "tanh"{regular})',
        "conv": f'keras.Input((6, 6, 1)), keras.layers.Conv2D(3, 3, activation="relu"{regular}), keras.layers.Flatten()',
        "embedding": "keras.Input((5,), dtype='int32'), keras.layers.Embedding(20, 4), keras.layers.Flatten()",
    }[spec.model]
    if spec.dropout:
        yield "keras.layers.Dropout(0.3, seed=2)"
    yield f"keras.layers.Dense(4{regular})"


def _fit(spec: Spec) -> Iterator[str]:
    yield from _head(spec)
    clip = f", clipnorm=0.05)  {MARK}" if "clip-before-reduce" in spec.bugs else ")"
    yield f"    optimizer = keras.optimizers.{spec.optimizer[:-1]}{clip}"
    yield "    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))"
    mark = f"  {MARK}" if "uneven-batch" in spec.bugs else ""
    yield f"model.fit(x, y, batch_size={GLOBAL_BATCH}, epochs=1, shuffle=False, verbose=0){mark}"


def _loop(spec: Spec) -> Iterator[str]:
    yield from _head(spec)
    yield f"    optimizer = keras.optimizers.{spec.optimizer}"
    yield "    optimizer.build(model.trainable_variables)"
    arrays = "(x, y)"
    if spec.weights:
        arrays = "(x, y, w)"
        yield 'w = (rng.random(examples) < 0.6).astype("float32")'
    yield ""
    if spec.style == "train_step":
        yield from _train_step(spec)
    else:
        yield from _own_loop(spec, arrays)


def _step(spec: Spec) -> Iterator[str]:
    """Yield the lines that make a loss and apply its gradients, without indentation."""
    if spec.weights and "local-normalization" not in spec.bugs:
        yield 'total = context.all_reduce("SUM", tf.reduce_sum(w))'
    yield "with tf.GradientTape() as tape:"
    yield "    ce = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))"
    yield f"    loss = {_loss(spec)}"
    if spec.l2:
        divided = f"  {MARK}" if "regularization-per-replica" in spec.bugs else " / n"
        yield f"    loss += 0.02 * tf.add_n([tf.nn.l2_loss(v) for v in model.trainable_variables]){divided}"
    yield "grads = tape.gradient(loss, model.trainable_variables)"
    if spec.model == "embedding":
        yield "grads = [tf.convert_to_tensor(g) for g in grads]"


def _loss(spec: Spec) -> str:
    if "loss-scaling" in spec.bugs:
        return f"tf.reduce_mean(ce)  {MARK}"
    if "uneven-batch" in spec.bugs:
        return f"tf.reduce_mean(ce) / n  {MARK}"
    if "local-normalization" in spec.bugs:
        return f"tf.reduce_sum(ce * w) / tf.maximum(tf.reduce_sum(w), 1.0) / n  {MARK}"
    return "tf.reduce_sum(ce * w) / total" if spec.weights else f"tf.reduce_sum(ce) / {GLOBAL_BATCH}"


def _apply(spec: Spec) -> Iterator[str]:
    """Yield the lines that clip and apply `grads`, which the optimizer sums over the replicas."""
    if "clip-before-reduce" in spec.bugs:
        yield f"grads, _ = tf.clip_by_global_norm(grads, 0.05)  {MARK}"
    elif spec.clip and "missing-all-reduce" in spec.bugs:
        yield "grads, _ = tf.clip_by_global_norm(grads, 0.05)"  # with a sum nothing would be missing
    elif spec.clip:
        yield 'grads, _ = tf.clip_by_global_norm(context.all_reduce("SUM", grads), 0.05)'
        yield "grads = [g / n for g in grads]  # the optimizer sums them again"
    if "missing-all-reduce" in spec.bugs:
        yield "for g, v in zip(grads, model.trainable_variables):"
        yield f"    v.assign_sub(0.1 * g)  {MARK}"
    else:
        yield "optimizer.apply_gradients(zip(grads, model.trainable_variables))"


def _body(spec: Spec) -> Iterator[str]:
    if spec.clip or spec.weights:
        yield "context = tf.distribute.get_replica_context()"
    if not spec.micro:
        yield from _step(spec)
    else:
        names = "x, y, w" if spec.weights else "x, y"
        yield f"whole, half = ({names}), tf.shape(y)[0] // 2"
        lines = list(_step(spec))
        if spec.weights:
            yield lines.pop(0)
        yield "parts, losses = [], []"
        yield "for part in ([v[:half] for v in whole], [v[half:] for v in whole]):"
        yield f"    {names} = part"
        l2_once = [line + "  # half in each micro-batch" if "l2_loss" in line else line for line in lines]
        yield from ("    " + line.replace("0.02 *", "0.01 *") for line in l2_once)
        yield "    parts.append(grads); losses.append(loss)"
        yield "grads, loss = [a + b for a, b in zip(*parts)], losses[0] + losses[1]"
    yield from _apply(spec)
    yield "return loss"


def _own_loop(spec: Spec, arrays: str) -> Iterator[str]:
    names = arrays[1:-1]
    if spec.style == "loop":
        yield "@tf.function"
    yield "def train(batch):"
    yield f"    def step({names}):"
    yield from ("        " + line for line in _body(spec))
    operation = f'"MEAN", losses, axis=None)  {MARK}' if "loss-report" in spec.bugs else '"SUM", losses, axis=None)'
    yield "    losses = strategy.run(step, args=batch)"
    yield f"    return strategy.reduce({operation}"
    yield ""
    yield f"data = tf.data.Dataset.from_tensor_slices({arrays})"
    if "samples-missing" in spec.bugs:
        yield f"data = data.shard(n, 0)  {MARK}"
    if "samples-repeated" in spec.bugs:
        yield f"data = data.batch({GLOBAL_BATCH} // n)"
        yield f"data = strategy.distribute_datasets_from_function(lambda context, data=data: data)  {MARK}"
    else:
        yield f"data = strategy.experimental_distribute_dataset(data.batch({GLOBAL_BATCH}))"
    yield "for batch in data:"
    yield "    loss = train(batch)"
    yield "    print(float(loss))"


def _train_step(spec: Spec) -> Iterator[str]:
    names, unpacked = ("x, y, w", "data") if spec.weights else ("x, y", "data")
    yield "class Model(keras.Model):"
    yield "    def call(self, x, training=False):"
    yield "        return model(x, training=training)"
    yield ""
    yield "    def train_step(self, data):"
    yield f"        {names} = {unpacked}"
    yield from ("        " + line for line in list(_body(spec))[:-1])
    yield '        return {"sum_of_losses": context_sum(loss)}'
    yield ""
    yield "def context_sum(loss):"
    yield '    return tf.distribute.get_replica_context().all_reduce("SUM", loss)'
    yield ""
    yield "with strategy.scope():"
    yield "    trained = Model()"
    yield "    trained.compile(optimizer)"
    arrays = "(x, y, w)" if spec.weights else "(x, y)"
    yield f"data = tf.data.Dataset.from_tensor_slices({arrays}).batch({GLOBAL_BATCH})"
    yield "trained.fit(data, epochs=1, verbose=0)"


def draw_all(number: int = DRAWS, seeded: int = 0) -> list[Spec]:
    """Draw so many different programs, the same ones for the same seed and version of hypothesis."""
    found: dict[str, Spec] = {}

    @seed(seeded)
    @settings(
        max_examples=20 * number, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(specs())
    def collect(spec: Spec) -> None:
        found.setdefault(spec.name, spec)

    collect()
    return _spread(list(found.values()), number)


def _spread(found: list[Spec], number: int) -> list[Spec]:
    """Return programs from all of what was drawn: the first ones that hypothesis draws are much alike."""
    return [found[k * len(found) // number] for k in range(number)]


if __name__ == "__main__":
    DRAWN.write_text(json.dumps([asdict(spec) for spec in draw_all()], indent=0) + "\n")
    drawn()
