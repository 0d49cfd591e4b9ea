"""Every program of the manifest on the first topology it names; `make compat` runs this with each pair of versions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import emulate
from emulate.cluster import Preload
from emulate.errors import UsageError
from emulate.report import render
from emulate.verify import Run
from fixtures.manifest import ALSO_ASKED, BUGS, HERE, PROGRAMS, RECIPES
from tests.versions import since

# TensorFlow 2.15 has Keras 2 under the name keras.
HAS_KERAS_3 = since("keras", "3.0")
IS_LEGACY = os.environ.get("GPUDIST_COMPAT_LEGACY_KERAS") == "1"


@dataclass(frozen=True)
class Item:
    """One program, where it runs, and what gpudist must say of it."""

    path: Path
    topology: str
    verdicts: tuple[str, ...] = ("equivalent",)
    cause: str | None = None

    @property
    def name(self) -> str:
        """The path below `fixtures`."""
        return str(self.path.relative_to(HERE).with_suffix(""))


# With Keras 2 these are other programs, or none.
NOT_IN_KERAS_2 = {
    "programs/ragged_dictionary": "Embedding.build() without a shape is Keras 3's",
    "programs/train_step_override": "Optimizer.apply is Keras 3's",
    "bugs/batchnorm_local_statistics": "Optimizer.apply is Keras 3's",
    "bugs/clip_before_reduce": "Keras 2's optimizers clip the sum",
    "bugs/cross_replica_tensor": "Optimizer.apply is Keras 3's",
    "bugs/framework_limit_accumulation": "gradient_accumulation_steps is Keras 3's",
    "bugs/framework_limit_first_batch": "Keras 2 builds a model from such a batch",
    "bugs/framework_limit_multiworker_fit": "Keras 2 can fit there",
    "bugs/identical_dropout": "Keras 2's Dropout draws other numbers on each replica",
    "bugs/loss_report_train_step": "Optimizer.apply is Keras 3's",
    "bugs/replicas_disagree": "the property Variable.value is Keras 3's",
    "bugs/sparse_gradient": "keras.ops is Keras 3's",
    "recipes/as_asked/d1_own_loop": "Keras 2 refuses a loss object without a reduction in an own loop",
    "recipes/as_asked/k2_fit_on_several_machines": "Keras 2 can fit there",
    "recipes/as_asked/o1_named_gpus": "Keras 2 can train on some of the GPUs",
    "recipes/as_asked/o3_host_memory": "Keras 2 sums the gradients of CentralStorageStrategy",
}

ITEMS = (
    *(Item(one.path, one.topologies[0], one.verdicts, one.cause) for one in (*PROGRAMS, *BUGS)),
    *(Item(one.as_asked, said.topologies[0], said.verdicts, said.cause) for one in RECIPES for said in one.expected[:1]),
    *(Item(one.as_it_should_be, one.topologies[0]) for one in RECIPES if not IS_LEGACY),  # gpudist_core works with Keras 3
    *(Item(one.path, one.topologies[0]) for one in ALSO_ASKED if not IS_LEGACY),
)


@pytest.fixture(scope="module")
def parent() -> Iterator[Preload]:
    """A parent that imported the Keras of this pair."""
    with Preload(environment={"TF_USE_LEGACY_KERAS": str(int(IS_LEGACY and HAS_KERAS_3))}, modules=("emulate.verify",)) as made:
        yield made


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.name)
def test_gpudist_says_of_a_program_what_the_manifest_says(item: Item, parent: Preload, tmp_path: Path) -> None:
    if IS_LEGACY and item.name in NOT_IN_KERAS_2:
        pytest.skip(NOT_IN_KERAS_2[item.name])
    path = _with_legacy_keras(item.path, tmp_path) if IS_LEGACY and HAS_KERAS_3 else item.path
    if item.verdicts == ("wrong-use",):
        with pytest.raises(UsageError):
            emulate.verify(path, item.topology, preload=parent)
        return
    timeout = 60 if item.verdicts == ("hung",) else 900  # the first is waited for to its end
    verdict = emulate.verify(path, item.topology, timeout=timeout, preload=parent)
    (run,) = verdict.runs
    first = run.causes[0].code if run.causes else None
    if item.verdicts in (("equivalent",), ("by-design",)) and _differs_by_old_metrics(run, item.cause):
        assert item.cause in (None, *(cause.code for cause in run.causes)), render(verdict)
        return
    assert run.verdict in item.verdicts, render(verdict)
    assert first == item.cause or (item.cause is None and item.verdicts != ("equivalent",)), render(verdict)


def _differs_by_old_metrics(run: Run, named: str | None) -> bool:
    """Return whether only logs of `fit` differ besides: Keras before 3.10 counts them wrongly on several replicas."""
    fixes = [cause.fix for cause in run.causes if cause.code in run.deciding and cause.code != named]
    return bool(fixes) and not since("keras", "3.10") and all("Install Keras 3.10 or newer" in fix for fix in fixes)


def _with_legacy_keras(path: Path, folder: Path) -> Path:
    """Return a copy of the program that imports tf_keras by the name keras; its data lie where they did."""
    copy = folder / path.relative_to(HERE)
    copy.parent.mkdir(parents=True)
    (folder / "data").symlink_to(HERE / "data")
    copy.write_text(re.sub(r"^import keras$", "import tf_keras as keras", path.read_text(), flags=re.MULTILINE))
    return copy
