"""Checkpoints that hosts take from each other."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, names_in_words, numbers


def _search(case: Case) -> Sign | None:
    shared = {path: sorted(hosts) for path, hosts in case.outcome.saved.items() if len(hosts) > 1}
    if not shared:
        return None
    paths = sorted(shared)
    failed = ""
    if case.outcome.failure and any(word in case.outcome.failure for word in ("checkpoint", "Checkpoint", *paths)):
        failed = "; the program raised while it saved"
    return Sign(
        f"Several hosts write the same checkpoint: {names_in_words(paths, 1)}.",
        f"{paths[0]} was written by hosts {numbers(shared[paths[0]])}"
        + (f", {len(paths)} such paths in all" if len(paths) > 1 else "")
        + failed,
        _OF_A_MODEL if all(path.endswith((".keras", ".h5")) for path in paths) else None,
    )


_OF_A_MODEL = (
    "Let the first host write, and the others where nobody looks (all must save: variables are gathered):\n"
    "    folder = 'models' if task_index == 0 else tempfile.mkdtemp()\n"
    "    os.makedirs(folder, exist_ok=True)\n"
    "    model.save(os.path.join(folder, 'model.keras'))  # or keras.callbacks.ModelCheckpoint of this path\n"
    "or gpudist_core.Checkpoints, which has one writer for each file."
)

CHECKPOINT_CONFLICT = Cause(
    code="checkpoint-conflict",
    title="several hosts write one checkpoint",
    meaning="Each host saves under the same path. On a file system that they share they write into each other's files and "
    "remove each other's temporary folders: the save raises on some host, sometimes, or leaves a checkpoint of mixed parts. "
    "(On disks of their own nothing happens; then restore what the first host wrote on all.)",
    evidence="The paths of the checkpoints and models that each host wrote.",
    fix="Let the first host write, and the others save where nobody looks (all must save: variables are gathered):\n"
    "    folder = 'ckpts' if task_index == 0 else tempfile.mkdtemp()\n"
    "    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=3)\n"
    "or gpudist_core.Checkpoints, which has one writer for each file.",
    search=_search,
    runs_that_ended=True,
    advice=True,
)
