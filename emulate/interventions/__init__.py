"""Change what a run computes, in one order: its examples, draws, gradients, numbers of replicas, layers."""

from emulate.interventions.gradients import Pairs
from emulate.interventions.in_order import Interventions, are_variables
from emulate.interventions.numbers import see_counts, see_numbers, tell_numbers
from emulate.interventions.rows import assign_initial, common_input, permuted, put_back
from emulate.interventions.switches import by_share, enlarge_rates, permutation, rows_of_shares, splits_of, switch_layers

__all__ = [
    "Interventions",
    "Pairs",
    "are_variables",
    "assign_initial",
    "by_share",
    "common_input",
    "enlarge_rates",
    "permutation",
    "permuted",
    "put_back",
    "rows_of_shares",
    "see_counts",
    "see_numbers",
    "splits_of",
    "switch_layers",
    "tell_numbers",
]
