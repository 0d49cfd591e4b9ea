"""Evaluate the functions of the steps that a run has made, without the program."""

from emulate.evaluate.costs import count_operations
from emulate.evaluate.evaluation import evaluate
from emulate.evaluate.joins import find_joins
from emulate.evaluate.parts import counts_the_batch, fixed_batches, is_eager, refusal

__all__ = ["count_operations", "counts_the_batch", "evaluate", "find_joins", "fixed_batches", "is_eager", "refusal"]
