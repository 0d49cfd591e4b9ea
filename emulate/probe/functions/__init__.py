"""Keep the functions of a run's steps, and evaluate them at any state on any examples without the program."""

from emulate.probe.functions.evaluate import evaluate
from emulate.probe.functions.files import counts_the_batch, fixed_batches, is_eager, refusal
from emulate.probe.functions.kept import Functions
from emulate.probe.functions.operations import count_operations

__all__ = ["Functions", "count_operations", "counts_the_batch", "evaluate", "fixed_batches", "is_eager", "refusal"]
