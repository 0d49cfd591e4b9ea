"""Trains a small network in numpy on one device or on replicas, right or with a planted bug, and writes the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulate.verify.made_traces import Made

Array = NDArray[Any]
Weights = dict[str, Array]


@dataclass
class Sgd:
    rate: float = 0.1

    def __call__(self, weights: Weights, gradients: Weights) -> Weights:
        return {n: (w - (self.rate * gradients[n]).astype(w.dtype)).astype(w.dtype) for n, w in weights.items()}


@dataclass
class Adam:
    rate: float = 1e-2
    m: Weights = field(default_factory=dict)
    v: Weights = field(default_factory=dict)
    t: int = 0

    def __call__(self, weights: Weights, gradients: Weights) -> Weights:
        self.t += 1
        done = {}
        for n, w in weights.items():
            g = gradients[n]
            self.m[n] = (0.9 * self.m.get(n, np.zeros_like(w)) + 0.1 * g).astype(w.dtype)
            self.v[n] = (0.999 * self.v.get(n, np.zeros_like(w)) + 0.001 * g * g).astype(w.dtype)
            rate = self.rate * np.sqrt(1 - 0.999**self.t) / (1 - 0.9**self.t)
            done[n] = (w - (rate * self.m[n] / (np.sqrt(self.v[n]) + 1e-7)).astype(w.dtype)).astype(w.dtype)
        return done


Local = Callable[[Weights, Array, Array, int, int], tuple[Weights, float]]
Combine = Callable[[list[Weights]], Weights]


@dataclass
class Problem:
    """Rows, labels and the network.

    Attributes:
        local: (weights, x, y, global batch, replicas) -> local gradient and objective.
        combine: The gradient that is applied, from the local ones.
        shards: (rows of the batch, replicas) -> rows of each replica.
        kink: Units are on from here on: as if rounding had taken a hair's breadth from each, where it is not 0.
    """

    seed: int = 0
    sizes: Sequence[int] = (20, 32, 32, 5)
    num_rows: int = 480
    batch: int = 48
    steps: int = 10
    dtype: str = "f4"
    l2: float = 0.0
    activation: str = "relu"
    optimizer: Callable[[], Any] = Sgd
    reg_times: Callable[[int], float] = lambda n: 1.0 / n
    scale: Callable[[int, int, int], float] = lambda b, whole, n: 1.0 / whole
    combine: Combine | None = None
    clip: float | None = None
    clip_first: bool = False
    reported: Callable[[list[float], int], float] = lambda losses, n: float(np.sum(losses))
    shards: Callable[[Array, int], list[Array]] = lambda rows, n: list(np.array_split(rows, n))
    kink: float = 0.0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.x = rng.normal(size=(self.num_rows, self.sizes[0])).astype(self.dtype)
        teacher = rng.normal(size=(self.sizes[0], self.sizes[-1]))
        self.y = np.argmax(self.x @ teacher + rng.normal(size=(self.num_rows, self.sizes[-1])), axis=1)
        self.initial: Weights = {}
        for i, (a, b) in enumerate(zip(self.sizes, self.sizes[1:], strict=False)):
            self.initial[f"dense_{i}/kernel"] = (rng.normal(size=(a, b)) * np.sqrt(2 / a)).astype(self.dtype)
            self.initial[f"dense_{i}/bias"] = np.zeros(b, self.dtype)

    def rows(self, k: int) -> Array:
        """The global batch of a step: the last of an epoch may be partial."""
        per_epoch = -(-self.num_rows // self.batch)
        at = (k % per_epoch) * self.batch
        return np.arange(at, min(at + self.batch, self.num_rows))

    def gradient(self, weights: Weights, rows: Array, scale: float, reg: float) -> tuple[Weights, float]:
        """Gradient of scale * sum of losses + reg * l2 * sum of squared kernels."""
        layers = len(self.sizes) - 1
        inputs, h = [], self.x[rows]
        for i in range(layers):
            inputs.append(h)
            z = h @ weights[f"dense_{i}/kernel"] + weights[f"dense_{i}/bias"]
            h = self.activate(z) if i < layers - 1 else z
        p = np.exp(h - h.max(axis=1, keepdims=True)) if len(rows) else h
        p = p / p.sum(axis=1, keepdims=True)
        at = np.arange(len(rows))
        loss = float(scale * -np.log(p[at, self.y[rows]]).sum(dtype=self.dtype)) if len(rows) else 0.0
        d = p.copy()
        d[at, self.y[rows]] -= 1
        d = (d * np.array(scale, self.dtype)).astype(self.dtype)
        found: Weights = {}
        for i in reversed(range(layers)):
            kernel = weights[f"dense_{i}/kernel"]
            decay = (2 * self.l2 * reg * kernel).astype(self.dtype)
            loss += float(self.l2 * reg * (kernel**2).sum())
            found[f"dense_{i}/kernel"] = inputs[i].T @ d + decay
            found[f"dense_{i}/bias"] = d.sum(axis=0)
            if i:
                d = ((d @ kernel.T) * self._slope(inputs[i])).astype(self.dtype)
        return {name: found[name] for name in weights}, loss

    def activate(self, z: Array) -> Array:
        """What a hidden layer makes of its sums."""
        return np.where(z > self.kink, z, np.zeros_like(z)) if self.activation == "relu" else np.tanh(z)

    def _slope(self, h: Array) -> Array:
        return (h > 0).astype(self.dtype) if self.activation == "relu" else 1 - h * h


def clipped(gradients: Weights, norm: float) -> Weights:
    """Scaled down to a global norm."""
    whole = float(np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values())))
    factor = min(1.0, norm / whole) if whole else 1.0
    return {n: (g * np.array(factor, g.dtype)).astype(g.dtype) for n, g in gradients.items()}


def train(problem: Problem, made: Made, replicas: int, *, noise: int | None = None, perturbation: float = 0.0) -> Made:
    """Train and write the trace. `noise` permutes rows and disturbs gradients by one unit in the last place (or more)."""
    rng = np.random.default_rng(noise or 0)
    weights, optimizer = dict(problem.initial), problem.optimizer()
    made.event({"event": "strategy", "name": "MirroredStrategy", "replicas": replicas, "local": replicas})
    for r in range(replicas):
        made.initial(weights, replica=r)
    for k in range(problem.steps):
        rows = problem.rows(k)
        if noise is not None:
            rows = rng.permutation(rows)
        shards = problem.shards(rows, replicas) if replicas > 1 else [rows]
        found = [_local(problem, weights, shard, len(rows), replicas) for shard in shards]
        locals_ = [one for one, _ in found]
        weights = _apply(problem, weights, locals_, optimizer, replicas, rng if noise is not None else None, perturbation)
        for r, (gradients, loss) in enumerate(found):
            names = [f"row-{row}" for row in shards[r]]
            made.step(k, gradients, weights, replica=r, rows=names, objective=loss, keep=r == 0)
        made.report("loss", "loss", k, problem.reported([loss for _, loss in found], replicas))
    return made


def _local(problem: Problem, weights: Weights, rows: Array, whole: int, replicas: int) -> tuple[Weights, float]:
    scale = problem.scale(len(rows), whole, replicas) if len(rows) else 0.0
    return problem.gradient(weights, rows, scale, problem.reg_times(replicas))


def _apply(
    problem: Problem, weights: Weights, locals_: list[Weights], optimizer: Any, replicas: int, rng: Any, perturbation: float
) -> Weights:
    if problem.clip is not None and problem.clip_first:
        locals_ = [clipped(one, problem.clip / (replicas if problem.clip_first == "share" else 1)) for one in locals_]
    applied = problem.combine(locals_) if problem.combine else _sum(locals_)
    if rng is not None:
        eps = perturbation or float(np.finfo(problem.dtype).eps)
        applied = {n: (g * (1 + eps * rng.choice([-1, 0, 1], g.shape))).astype(g.dtype) for n, g in applied.items()}
    if problem.clip is not None and not problem.clip_first:
        applied = clipped(applied, problem.clip)
    done: Weights = optimizer(weights, applied)
    return done


def _sum(locals_: list[Weights]) -> Weights:
    whole = dict(locals_[0])
    for one in locals_[1:]:
        whole = {n: whole[n] + one[n] for n in whole}
    return whole
