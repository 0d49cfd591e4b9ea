"""Explain gradients: find the arithmetic that turns the replicas' local gradients into the reference's.

Only steps whose weights were still the reference's can be judged this way; in such a step both runs computed gradients of the
same loss at the same weights, so a wrong factor, a wrong weight of a replica or a term added too often is exact up to rounding.
The simplest model that leaves nothing beyond the noise floor is taken:

    the sum of the local gradients, divided by one constant           loss-scaling
    the sum weighted by each replica's share of the rows              uneven-batch
    the sum less a multiple of the weights on some tensors            regularization-per-replica
    two of these together
    the sum with any other weight for each replica                    local-normalization
    replicas' weights and a multiple of the weights together
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from emulate.trace import StoredArray
from emulate.verify.compare import SELDOM, SMALL, Comparison
from emulate.verify.compared_runs import complete, have_equal_rows
from emulate.verify.gradients import Floats, GradientView, StepOfAll, aligned, largest, norm, total
from emulate.verify.noise import FACTOR

INFORMATIVE = 4
"""Smallest number of elements above the noise floor from which a fitted parameter is accepted."""
_NEAR = 0.05
"""So far a fitted factor may be off where rounding is amplified, and be the number of replicas all the same."""
ROUND = 1e-3
"""Relative tolerance for reporting a factor as a round number."""
_OFF, _OFF_IN_16_BITS = 3e-4, 1e-2
"""Tolerance of a sum of fitted weights, for rounding."""

Decay = tuple[float, float]
"""A multiple of the weights, and one of their signs."""


@dataclass(frozen=True)
class Fit:
    """Hold the model that explains one step's gradients.

    Attributes:
        scale: The sum of the local gradients is this many times too large.
        shares: The weight each replica's gradient would have needed; empty where all weigh 1.
        uneven: Whether these are the replicas' shares of the rows.
        decay: Of each tensor what multiple of its weights (and of their signs) it has too much.
        before: Largest relative L2 difference before, after the model: `after`, in units of the noise floor.
        replicated: Every replica's local gradient already was the sum.
        taped: It explains what the tapes gave, which the program sums itself.
        elements: How many elements beyond the noise floor say so, of a factor.
    """

    optimizer: str
    step: int
    scale: float = 1.0
    shares: Mapping[int, float] = field(default_factory=dict)
    uneven: bool = False
    decay: Mapping[str, Decay] = field(default_factory=dict)
    before: float = 0.0
    after: float = 0.0
    replicated: bool = False
    taped: bool = False
    elements: int = 0

    @property
    def factor(self) -> float:
        """Return by what the replicas' gradients are multiplied in the mean."""
        return (sum(self.shares.values()) / len(self.shares) if self.shares else 1.0) / self.scale

    @property
    def is_tiny(self) -> bool:
        """Return whether few elements support the factor: only the number of replicas or its inverse is accepted."""
        return 0 < self.elements < INFORMATIVE

    def are_counts(self, *, in_16_bits: bool) -> bool:
        """Return whether the shares are parts of one count.

        Args:
            in_16_bits: Whether anything was rounded to 16 bits.

        Returns:
            Whether they add up to the replicas' number, or to 1 where nothing divides by it.
        """
        whole, off = sum(self.shares.values()), _OFF_IN_16_BITS if in_16_bits else _OFF
        return any(abs(whole / count - 1) < off for count in (1.0, float(len(self.shares))))


@dataclass(frozen=True)
class Explanation:
    """Hold the fits of all judged steps; `unexplained` lists the (optimizer, step) that no model fits."""

    fits: tuple[Fit, ...]
    unexplained: tuple[tuple[str, int], ...]

    @cached_property
    def scaled(self) -> tuple[Fit, ...]:
        """Return the steps with one wrong factor."""
        return tuple(fit for fit in self.fits if fit.scale != 1.0)

    @cached_property
    def uneven(self) -> tuple[Fit, ...]:
        """Return the steps in which replicas with fewer examples had the same weight as the others."""
        return tuple(fit for fit in self.fits if fit.uneven)

    @cached_property
    def weighted(self) -> tuple[Fit, ...]:
        """Return the steps in which replicas had a wrong weight for another reason."""
        return tuple(fit for fit in self.fits if fit.shares and not fit.uneven)


_ELEMENTS = 1_000_000
"""Largest number of elements that a fit uses. The fit is checked on all elements."""


def explain(comparison: Comparison) -> Explanation:
    """Find the model of every step that differs and can be judged."""
    fits: list[Fit] = []
    unexplained: list[tuple[str, int]] = []
    for optimizer, step in dirty_steps(comparison):
        of_optimizer = (fit for fit in reversed(fits) if fit.optimizer == optimizer)
        earlier = (fit for fit in of_optimizer if fit.scale != 1.0 and not fit.shares and not fit.decay)
        fit = fit_step(comparison, optimizer, step, next(earlier, None))
        if fit is None:
            unexplained.append((optimizer, step))
        else:
            fits.append(fit)
    if comparison.runs.reference.follows:
        of_kinks = [fit for place in unexplained if (fit := _of_kink(comparison, place, fits, unexplained)) is not None]
        fits = sorted((*fits, *of_kinks), key=lambda fit: fit.step)
        unexplained = [place for place in unexplained if place not in {(fit.optimizer, fit.step) for fit in of_kinks}]
    of_tapes = (_fit_taped(comparison, optimizer, step) for optimizer, step in _clipped_alike(comparison))
    return Explanation((*fits, *(fit for fit in of_tapes if fit is not None)), tuple(unexplained))


def _of_kink(comparison: Comparison, place: tuple[str, int], fits: Sequence[Fit], unexplained: Sequence[object]) -> Fit | None:
    """Return the factor of the other steps for one that it leaves a little of: a unit fell on the other side of its kink.

    Such steps are seldom, and the factor comes back after them. Each begins at the other run's weights.
    """
    optimizer, step = place
    scaled = [fit for fit in fits if fit.optimizer == optimizer and fit.scale != 1.0 and not fit.shares and not fit.decay]
    around = [next((f for f in reversed(scaled) if f.step < step), None), next((f for f in scaled if f.step > step), None)]
    if None in around or len({fit.scale for fit in scaled}) > 1 or len(unexplained) > SELDOM * len(fits):
        return None
    views = _finite(comparison.views(optimizer, step))
    left = sum(norm(view.total / scaled[0].scale - view.reference) ** 2 for view in views)
    size = sum(norm(view.reference) ** 2 for view in views)
    return replace(scaled[0], step=step) if left < SMALL**2 * size else None


def one_factor(changes: Sequence[tuple[Floats, Floats]]) -> float | None:
    """Return the one factor by which all changes are larger than the reference's, or None.

    Args:
        changes: Of each tensor by what it changed, and by what in the reference.

    Returns:
        The factor, None where there is none.
    """
    if not all(np.isfinite(change).all() for pair in changes for change in pair):
        return None
    size = sum(float(np.dot(b, b)) for _, b in changes)
    factor = sum(float(np.dot(a, b)) for a, b in changes) / size if size else 0.0
    left = sum(norm(a - factor * b) ** 2 for a, b in changes)
    return factor if factor and left < (ROUND * factor) ** 2 * size else None


def factor_of_updates(variables: Iterable[Sequence[StoredArray | None]]) -> float | None:
    """Return the one factor by which an update is larger than another, or None.

    Args:
        variables: Of each its value before, after the one and after the other; what was not kept in full is passed over.

    Returns:
        The factor, None where there is none.
    """
    changes: list[tuple[Floats, Floats]] = []
    for values in variables:
        recorded = [array for array in values if array is not None]
        if len(recorded) == len(values):
            before, after, other = aligned(recorded)
            changes.append((after - before, other - before))
    return one_factor(changes)


def are_equal(arrays: Mapping[int, Floats]) -> bool:
    """Return whether all replicas have the same array."""
    first, *rest = arrays.values()
    return all(np.array_equal(first, array) for array in rest)


def dirty_steps(comparison: Comparison) -> list[tuple[str, int]]:
    """Return the steps with gradients beyond the noise floor, at weights that equaled the reference's."""
    last = comparison.weights_apart
    points = [p.measure for p in comparison.exceeding if p.measure.key.kind == "gradient" and not p.measure.non_finite]
    return _in_order({(m.key.optimizer, m.step) for m in points if last is None or m.step <= last})


def _clipped_alike(comparison: Comparison) -> list[tuple[str, int]]:
    """Return the steps whose objectives differ and whose gradients agree: what is clipped after the sum has lost its factor."""
    apart = {(p.measure.key.optimizer, p.step) for p in comparison.objectives if p.exceeds}
    clean = {(p.measure.key.optimizer, p.step) for p in comparison.points if p.measure.key.kind == "gradient"}
    last = comparison.weights_apart
    steps = apart & clean - {*dirty_steps(comparison)}
    return _in_order(place for place in steps if last is None or place[1] <= last)


def _in_order(places: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(places, key=lambda place: (place[1], place[0]))


def fit_step(comparison: Comparison, optimizer: str, step: int, earlier: Fit | None = None) -> Fit | None:
    """Return the simplest model that explains one step; the factor of an earlier step if that does."""
    views = _finite(comparison.views(optimizer, step))
    if not views:
        return None
    blank, shares = _blank(comparison, optimizer, step, views)
    # What is wrong already before the program itself sums gradients, and gives all replicas the same, explains the rest.
    fit = _fit_taped(comparison, optimizer, step, earlier) if blank.replicated else None
    return fit if fit is not None else _simplest(views, blank, shares, earlier)


def _fit_taped(comparison: Comparison, optimizer: str, step: int, earlier: Fit | None = None) -> Fit | None:
    """Return what explains the gradients of a step's tapes, where the program sums them itself."""
    views = _finite(comparison.taped_views(optimizer, step))
    if all(_ratio(view.residual, view, 1.0) <= FACTOR for view in views):
        return None
    blank, shares = _blank(comparison, optimizer, step, views)
    return _simplest(views, replace(blank, replicated=False, taped=True), shares, earlier)


def _finite(views: Sequence[GradientView]) -> list[GradientView]:
    return [view for view in views if np.isfinite(view.total).all() and np.isfinite(view.reference).all()]


def _blank(comparison: Comparison, optimizer: str, step: int, views: Sequence[GradientView]) -> tuple[Fit, dict[int, float]]:
    """Return a model that explains nothing, and each replica's share of the rows where they are uneven."""
    of_all = complete(comparison.runs.topology, optimizer)[step]
    # Gradients of pure rounding (the bias of an attention's keys) are off by any ratio.
    beyond_noise = [view for view in views if _ratio(view.residual, view, 1.0) > FACTOR] or views
    before = max(norm(v.residual) / (norm(v.reference) or 1.0) for v in beyond_noise)
    is_summed = not have_equal_rows(of_all) or all(local.taped for local in of_all.values())
    replicated = is_summed and all(are_equal(view.locals) for view in views)
    return Fit(optimizer, step, before=before, replicated=replicated), _row_shares(of_all)


def _simplest(views: Sequence[GradientView], blank: Fit, shares: Mapping[int, float], earlier: Fit | None) -> Fit | None:
    models: list[Callable[[], Fit | None]] = [
        lambda: _uneven(views, blank, shares),  # with one row in all it is a factor too
        lambda: _scale(views, blank),
        # The factor of an earlier step: later the noise may be too large to measure it.
        lambda: earlier and _checked(views, replace(earlier, step=blank.step, before=blank.before)),
        lambda: _decay(views, blank),
        lambda: _uneven(views, blank, shares, scaled=True),
        lambda: _decay(views, blank, scaled=True),
        lambda: _weighted(views, blank),
        lambda: _uneven(views, blank, shares, decays=True),
        lambda: _weighted(views, blank, decays=True),
    ]
    return next((fit for model in models if (fit := model()) is not None), None)


def _row_shares(step: StepOfAll) -> dict[int, float]:
    """Return b_r * N / B of each replica; empty if row counts are unknown or equal."""
    counts = {replica: len(local.rows) for replica, local in step.items() if local.rows is not None}
    whole = sum(counts.values())
    if len(counts) < len(step) or len(set(counts.values())) < 2 or not whole:
        return {}
    return {replica: count * len(counts) / whole for replica, count in counts.items()}


def _scale(views: Sequence[GradientView], blank: Fit) -> Fit | None:
    """Return the factor that explains the gradients: the number of replicas or its inverse rather than one that is fitted.

    Any factor fits few elements of a tiny model. That it is one of these two to four digits and more is no accident.
    """
    found, elements, replicas = _best_scale(views, [view.total for view in views]), _informative(views), len(views[0].locals)
    of_replicas = [float(replicas), 1 / replicas] if replicas > 1 else []
    if found is None:
        near = of_replicas if elements and all(_is_clear(view) for view in views) else []
    else:
        near = [factor for factor in of_replicas if abs(found / factor - 1) < _NEAR]
    for scale in [*near, *([found] if found and abs(found - 1) >= 1e-6 else [])]:
        if (fit := _checked(views, replace(blank, scale=scale, elements=elements))) is not None:
            return fit
    return None


def _is_clear(view: GradientView) -> bool:
    """Return whether rounding is too small to confuse two factors for a tensor."""
    return largest(view.reference) * ROUND > FACTOR * view.noise or not largest(view.residual) > FACTOR * view.noise


def _uneven(
    views: Sequence[GradientView], blank: Fit, shares: Mapping[int, float], *, scaled: bool = False, decays: bool = False
) -> Fit | None:
    if not shares:
        return None
    scale = _best_scale(views, [_weigh(view, shares) for view in views]) if scaled else 1.0
    return _checked(views, replace(blank, scale=scale, shares=dict(shares), uneven=True), decays=decays) if scale else None


def _weigh(view: GradientView, shares: Mapping[int, float]) -> Floats:
    return total([shares.get(replica, 1.0) * local for replica, local in view.locals.items()], view.how)


def _decay(views: Sequence[GradientView], blank: Fit, *, scaled: bool = False) -> Fit | None:
    """Return the tensors that agree (after one factor for all) and those with a multiple of their weights too much."""
    scale = _own_scale(views) if scaled else 1.0
    if scale is None or (scaled and abs(scale - 1) < 1e-6):
        return None
    return _checked(views, replace(blank, scale=scale), decays=True)


def _checked(views: Sequence[GradientView], fit: Fit, *, decays: bool = False) -> Fit | None:
    """Complete a model by what it leaves.

    Args:
        views: The gradients of a step.
        fit: The factor and the weights of the replicas.
        decays: Whether tensors may have a multiple of their weights too much; then at least one has.

    Returns:
        The model; None if it leaves more than rounding.
    """
    decay: dict[str, Decay] = {}
    after = 0.0
    left = [(view, _weigh(view, fit.shares) / fit.scale - view.reference) for view in views]
    for find in (lambda *_: (0.0, 0.0), *((_fit_weights, _like_others) if decays else ())):
        open_ones = []
        for view, residual in left:
            fitted = find(view, residual, decay)
            ratio = _ratio(residual - _terms(view, fitted), view, fit.scale) if fitted is not None else float("inf")
            if fitted is None or ratio > FACTOR:
                open_ones.append((view, residual))
                continue
            after = max(after, ratio)
            decay |= {view.tensor: fitted} if any(fitted) else {}
        left = open_ones
    return replace(fit, decay=decay, after=after) if not left and (decay or not decays) else None


def _terms(view: GradientView, decay: Decay) -> Floats | float:
    return decay[0] * view.weight + decay[1] * np.sign(view.weight) if view.weight is not None and any(decay) else 0.0


def _like_others(view: GradientView, residual: Floats, decays: Mapping[str, Decay]) -> Decay | None:
    """Return what the other tensors have too much: a bias of few elements cannot be fitted by itself."""
    is_known = view.weight is not None and view.weight.size == residual.size
    return min(decays.values(), key=lambda decay: norm(residual - _terms(view, decay)), default=None) if is_known else None


def _fit_weights(view: GradientView, residual: Floats, decays: Mapping[str, Decay]) -> Decay | None:
    """Fit residual = a * w + b * sign(w), with one term if it is enough."""
    weight = view.weight
    if weight is None or weight.size != residual.size or int((np.abs(residual) > view.noise).sum()) < INFORMATIVE:
        return None
    thin = max(1, len(residual) // _ELEMENTS)
    for places in ([0], [1], [0, 1]):
        basis = np.stack([weight, np.sign(weight)], axis=1)[:, places]
        factors, *_ = np.linalg.lstsq(basis[::thin], residual[::thin], rcond=None)
        if largest(residual - basis @ factors) <= FACTOR * view.noise:
            both = dict(zip(places, map(float, factors), strict=True))
            return both.get(0, 0.0), both.get(1, 0.0)
    return None


def _weighted(views: Sequence[GradientView], blank: Fit, *, decays: bool = False) -> Fit | None:
    """Fit one weight for each replica over all tensors, each in units of its noise, or over what is no multiple of weights."""
    replicas = sorted(views[0].locals)
    whole = [view for view in views if sorted(view.locals) == replicas]
    if len(replicas) < 2 or _informative(whole) < INFORMATIVE * len(replicas):
        return None
    thin = max(1, sum(view.reference.size for view in whole) * len(replicas) // _ELEMENTS)

    def part(view: GradientView, values: Floats) -> Floats:
        """Return every thin-th element in units of the tensor's noise."""
        return (_without_weights(values, view.weight) if decays else values)[::thin] / (view.noise or 1.0)

    basis = np.concatenate([np.stack([part(v, v.locals[r]) for r in replicas], axis=1) for v in whole])
    target = np.concatenate([part(v, v.reference) for v in whole])
    weights, *_ = np.linalg.lstsq(basis / (len(replicas) if whole[0].how == "mean" else 1), target, rcond=None)
    shares = {replica: float(weight) for replica, weight in zip(replicas, weights, strict=True)}
    return _checked(views, replace(blank, shares=shares), decays=decays) if min(shares.values()) > 0 else None


def _informative(views: Sequence[GradientView]) -> int:
    return sum(int((np.abs(view.reference) > FACTOR * view.noise).sum()) for view in views)


def _best_scale(views: Sequence[GradientView], totals: Sequence[Floats]) -> float | None:
    """Return the scale of least squares over all tensors, each in units of its noise."""
    if _informative(views) < INFORMATIVE:
        return None
    units = [1.0 / (view.noise or 1.0) for view in views]
    above = sum(float(np.dot(t * u, v.reference * u)) for v, t, u in zip(views, totals, units, strict=True))
    below = sum(float(np.dot(v.reference * u, v.reference * u)) for v, u in zip(views, units, strict=True))
    return above / below if below and above else None


def _own_scale(views: Sequence[GradientView]) -> float | None:
    """Return the factor of least squares of what is no multiple of the weights or of their signs, in units of the noise."""
    above = below = 0.0
    for view in views:
        unit = 1.0 / (view.noise or 1.0)
        whole, reference = (_without_weights(values, view.weight) * unit for values in (view.total, view.reference))
        above += float(np.dot(whole, reference))
        below += float(np.dot(reference, reference))
    return above / below if above and below > len(views) * FACTOR**2 else None


def _without_weights(values: Floats, weight: Floats | None) -> Floats:
    if weight is None or weight.size != values.size or not weight.any():
        return values
    basis, _ = np.linalg.qr(np.stack([weight, np.sign(weight)], axis=1))
    return np.asarray(values - basis @ (basis.T @ values))


def _ratio(residual: Floats, view: GradientView, scale: float) -> float:
    # The noise floor is at the scale of what was recorded: a gradient that is divided by c has its noise divided too, but
    # one that is multiplied (c < 1) has it multiplied.
    allowed = view.noise * max(1.0, 1.0 / abs(scale))
    left = largest(residual)
    return left / allowed if allowed else (float("inf") if left else 0.0)
