"""A regularization term that every replica adds in full."""

from __future__ import annotations

from emulate.verify.arithmetic import Fit
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, names_in_words, steps_in_words
from emulate.verify.causes.replicas_apart import rebase_on_replicas_apart

_SCALED = "tf.nn.scale_regularization_loss(tf.add_n(model.losses))"
_FIXES = (
    "A term that depends on no row (a regularization): scale it for the number of replicas,\n"
    f"    loss += {_SCALED}\n"
    "A mean over the rows of a replica (a part of a loss of your own): divide its sum by the rows of the global batch,\n"
    "    loss += tf.reduce_sum(per_example) / GLOBAL_BATCH_SIZE\n"
    "What a layer adds in Keras's fit (add_loss), divided by the number of replicas: the mean over its rows, not the sum.\n"
    "What is added to the gradients of each replica (noise): add it once, after they are added up."
)


def _search(case: Case) -> Sign | None:
    fits = tuple(fit for fit in case.explanation.decayed if not stands_apart(fit))
    if case.has("accumulation"):
        return None
    if not fits or not _is_steady(fits) or not _is_known(case, fits[0]):
        return _of_each_replica(case)
    case.explain_fits(fits)
    first = fits[0]
    tensors = list(first.decay)
    l2, l1 = first.decay[tensors[0]]
    size = l2 or l1
    return Sign(
        f"A regularization term of {names_in_words(tensors)} counts too {'often' if size > 0 else 'little'}: "
        f"every replica adds it {'in full, and the optimizer adds up the replicas' if size > 0 else 'divided too far'}.",
        f"{steps_in_words(fits)}: what the gradients have too much is {_term(l2, l1)} ({tensors[0]}), "
        f"on {'1 tensor' if len(tensors) == 1 else f'{len(tensors)} tensors'}, the others agree; without it what is left is "
        f"{max(fit.after for fit in fits):.1f} times the noise floor" + _coefficient(l2, case.num_replicas),
    )


def _of_each_replica(case: Case) -> Sign | None:
    """A term of any form that comes once for each replica, or is divided by their number."""
    first = case.base.first_step("gradient")
    if first is None or not any(step == first for _, step in case.explanation.unexplained):
        return None
    agrees = rebase_on_replicas_apart(case, first, grouping_matters=False)
    if agrees is None:
        return None
    return Sign(
        "A part of the loss counts once for each replica, or is divided by their number: what every replica adds whatever its "
        "rows, or what is a mean over its own rows, or, where Keras divides the losses, a sum over rows.",
        f"The gradients differ from step {first} on; {agrees}",
        _FIXES,
    )


def stands_apart(fit: Fit) -> bool:
    """Whether the loss is scaled wrong and the regularization term, right as it is, merely was not scaled with it."""
    return fit.scale != 1.0 and all((l2 or l1) * (1 / fit.scale - 1) > 0 for l2, l1 in fit.decay.values())


def _term(l2: float, l1: float) -> str:
    terms = [f"{l2:.4g} * w" if l2 else "", f"{l1:.4g} * sign(w)" if l1 else ""]
    return " + ".join(term for term in terms if term)


def _coefficient(l2: float, replicas: int) -> str:
    """What L2 coefficient it would be if each of N replicas adds all of it: N - 1 too many of 2 * l2 * w."""
    return (
        f". That is L2 with a coefficient of {l2 / 2 / (replicas - 1):.3g}, {replicas} times instead of once" if l2 > 0 else ""
    )


def _is_steady(fits: tuple[Fit, ...]) -> bool:
    """Whether a term has the same size in every step."""
    sizes = [dict(fit.decay) for fit in fits]
    first = sizes[0]
    return all(
        abs(a - b) <= 0.01 * max(abs(a), abs(b), 1e-30)
        for one in sizes
        for name, pair in one.items()
        if name in first
        for a, b in zip(pair, first[name], strict=True)
    )


def _is_known(case: Case, fit: Fit) -> bool:
    """Where the layers have regularizers, at least one of the tensors is theirs."""
    return not case.facts.regularized or bool(set(case.facts.regularized) & set(fit.decay))


REGULARIZATION = Cause(
    code="regularization-per-replica",
    title="regularization once per replica",
    meaning="Every replica adds the whole regularization term to its loss, and the optimizer adds up the replicas' "
    "gradients: the "
    "term counts as often as there are replicas.",
    evidence="What the gradients have too much is a multiple of the weights (L2) or of their signs (L1), on some tensors "
    "only, with one factor in every step; or, for a term of another form, one device on the rows of one replica after the "
    "other has it too, whichever rows are together.",
    fix=f"Scale it for the number of replicas:\n    loss += {_SCALED}",
    search=_search,
)
