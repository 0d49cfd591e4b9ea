"""Say why gradients differ: one group of causes for each way to explain them, by what its answer costs.

A difference of gradients may be explained in six ways, from the cheapest to the dearest:

1. By what the program is known to do with gradients: it adds up several batches, it sums sparse values, it clips, for which
   runs without clipping are made. That must be out of the way first, because what is clipped has none of the forms below.
2. By closed forms of what was recorded, with one fitted number at most: a factor, the replicas' shares of the rows, a
   multiple of the weights. They cost nothing.
3. By experiments on the reference's step: the smallest set of tensors that must see the whole batch (`case.joins`). They cost
   evaluations of one step, fit no number, and their answer leaves nothing beyond the noise floor.
4. By a count: one weight for each replica, which together are one. Experiments come first, as they know the count by its line.
5. By a sequential replay, where a step cannot be cut for experiments. It costs evaluations of all steps, or starts.
6. Where examples depend on each other, the reference does all that a replica does with its own from then on, so that it hides
   what else a replica does with them.

In one way the rows of the table do not exclude each other: one answer may name several causes. A later way sees only what the
earlier ones have left. What an answer changes (a switch, another reference) is looked at from the beginning: a second cause may
have been hidden behind the first. The kinds of replays have a group each, as each costs runs of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from emulate.verify.case import Case
from emulate.verify.causes import changed_gradients, closed_forms, experiments, replays, tensors
from emulate.verify.causes.cause import Cause, Group, Sign
from emulate.verify.lines import between, changes_of_state, made, operations

ACCUMULATION = Cause(
    "accumulation",
    blame=(operations("given", "norm"), operations("sum", "norm"), operations("loss", "mean", "scale"), between("given")),
)
# What examples look up comes as often on one device; what they share comes once for each replica.
SPARSE_GRADIENT = Cause("sparse-gradient", blame=(operations("loss", "looks-up-the-same", "looks-up"),))
CLIP_BEFORE_REDUCE = Cause(
    "clip-before-reduce",
    blame=(operations("given", "norm"), made("given", "optimizer", clips=True), between("given")),
)
DOUBLE_ALL_REDUCE = Cause("double-all-reduce", blame=(operations("sum", "all_reduce"), operations("assigned", "assign")))
LOSS_SCALING = Cause("loss-scaling", unless=("accumulation",), blame=(operations("loss", "mean", "scale"),))
UNEVEN_BATCH = Cause("uneven-batch", blame=(operations("loss", "mean", "scale", "ratio"), made("examples", "batch")))
REGULARIZATION = Cause(
    "regularization-per-replica",
    unless=("accumulation",),
    blame=(operations("loss", "penalty"), operations("given", "penalty"), between("given")),
)
LOCAL_NORMALIZATION = Cause("local-normalization", blame=(operations("loss", "count", "mean", "ratio"),))
IN_BATCH_NEGATIVES = Cause(
    "in-batch-negatives",
    unless=("static-tensor-split",),
    blame=(operations("loss", "contracts", "mixes", "ratio", "mixes-data"), operations("loss", "moves")),
)
DEPENDS_ON_REPLICAS = Cause(
    "depends-on-replicas", blame=(made("loss", "num_replicas", in_step=True), made("start", "num_replicas"))
)
PYTHON_STATE = Cause("python-state", blame=(changes_of_state("loss"), between("loss")))


def _way(*rows: tuple[Cause, Callable[[Case], Sign | None]], applies: Callable[[Case], bool] = lambda case: True) -> Group:
    """Return what one way to explain gradients may name, with who looks for it."""
    return Group([replace(cause, search=search) for cause, search in rows], applies)


WAYS = (
    _way(
        (ACCUMULATION, changed_gradients.of_several_batches),
        (SPARSE_GRADIENT, changed_gradients.of_sparse_gradients),
    ),
    _way(
        (DEPENDS_ON_REPLICAS, replays.of_clipped_parts),
        (CLIP_BEFORE_REDUCE, changed_gradients.of_clipping),
        (CLIP_BEFORE_REDUCE, changed_gradients.of_dropped_gradients),
    ),
    _way(
        (DOUBLE_ALL_REDUCE, closed_forms.of_equal_gradients),
        (LOSS_SCALING, closed_forms.of_a_factor),
        (UNEVEN_BATCH, closed_forms.of_shares_of_rows),
        (REGULARIZATION, closed_forms.of_multiples_of_weights),
    ),
    _way(
        (LOSS_SCALING, experiments.of_a_factor),
        (DEPENDS_ON_REPLICAS, experiments.of_constants),
        (LOSS_SCALING, experiments.of_numbers),
        (REGULARIZATION, experiments.of_terms),
        (LOCAL_NORMALIZATION, experiments.of_normalizers),
        (IN_BATCH_NEGATIVES, experiments.of_meetings),
        applies=lambda case: case.joins is not None,
    ),
    _way((LOCAL_NORMALIZATION, closed_forms.of_a_count), applies=lambda case: case.joins is None),
    *(
        _way((cause, search), applies=lambda case: case.joins is None)
        for cause, search in (
            (PYTHON_STATE, replays.of_turns),
            (CLIP_BEFORE_REDUCE, replays.of_changed_gradients),
            (DEPENDS_ON_REPLICAS, replays.of_what_a_step_gets),
            (LOSS_SCALING, replays.of_a_part),
            (REGULARIZATION, replays.of_each_replica),
            (LOCAL_NORMALIZATION, closed_forms.of_own_losses),
            (IN_BATCH_NEGATIVES, replays.of_meetings),
            (LOSS_SCALING, replays.of_losses_alone),
        )
    ),
    _way(
        (CLIP_BEFORE_REDUCE, changed_gradients.of_clipping_behind),
        (tensors.STATIC_SPLIT, tensors.of_split_of_batch),
        applies=lambda case: case.has(IN_BATCH_NEGATIVES.code),
    ),
)
