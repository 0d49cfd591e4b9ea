"""Keep the functions of a run's steps, and evaluate them at any state on any examples without the program."""

from emulate.probe.functions.costs import count_operations
from emulate.probe.functions.evaluate import evaluate
from emulate.probe.functions.kept import Functions
from emulate.probe.functions.parts import counts_the_batch, fixed_batches, is_eager, refusal

__all__ = ["Functions", "count_operations", "counts_the_batch", "evaluate", "fixed_batches", "is_eager", "refusal"]
