"""Describe what explains the gradients of steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

INFORMATIVE = 4
"""Smallest number of elements above the noise floor from which a fitted parameter is accepted."""
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

    @cached_property
    def decayed(self) -> tuple[Fit, ...]:
        """Return the steps with a multiple of the weights too much."""
        return tuple(fit for fit in self.fits if fit.decay)
