"""An optimizer that sees a row of a table once for each replica that looked it up, not the sum of what they say of it."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.measure import complete


def _search(case: Case) -> Sign | None:
    """Gradients agree, and of the weights only those whose gradients are sparse do not, from their first step on."""
    apart, before = case.base.first_step("weight"), case.base.first_step("gradient")
    if apart is None or (before is not None and before <= apart):
        return None
    out = [p for p in case.base.exceeding if p.step == apart and p.measure.key.kind == "weight"]
    optimizer = out[0].measure.key.optimizer
    steps = complete(case.base.runs.topology, optimizer)
    if apart >= len(steps):
        return None
    sparse = {name for one in steps[apart].values() for name, array in one.gradients.items() if array.rows is not None}
    tensors = sorted({point.measure.key.tensor for point in out})
    if not set(tensors) <= sparse:
        return None
    agreeing = {p.measure.key.tensor for p in case.base.points if p.step == apart and p.measure.key.kind == "weight"}
    case.explain(lambda point: point.step > apart or (point.step == apart and point.measure.key.kind == "weight"))
    worst = max(out, key=lambda point: point.ratio)
    return Sign(
        f"The optimizer updates {tensors[0]} by its sparse gradient, in which a row stands once for each replica that looked "
        "it up.",
        f"in step {apart} all gradients agree; of {len(agreeing)} weights only {len(tensors)} with a sparse gradient "
        f"(tf.IndexedSlices) differ: {', '.join(tensors[:3])}, {worst.ratio:.0f} times the noise floor",
    )


SPARSE_GRADIENT = Cause(
    code="sparse-gradient",
    title="rows of a sparse gradient that are not added up",
    meaning="The gradient of a lookup (Embedding, tf.gather) is tf.IndexedSlices: row numbers and values, a number more than "
    "once where a row was looked up more than once. Replicas' gradients are put behind each other. Keras 3 does not add the "
    "values of a row up before it squares them (Adam, Adagrad, RMSprop) or takes their sign (Lion), so what is looked up once "
    "on one device and once on each of N replicas (positions, a constant) makes another update there.",
    evidence="The gradients, rows added up, agree; only weights with sparse gradients differ after the step.",
    fix="Make the gradient dense before it is applied:\n"
    "    gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]\n"
    "or do not look up what all rows of a batch share: positions are the table itself (layer.embeddings), added to each row. "
    "gpudist_core's fit and TrainStep add rows up.",
    search=_search,
)
