"""The catalogue of causes: every one is explained, and unknown ones are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emulate.errors import WrongUse
from emulate.verify import causes
from emulate.verify.causes import clipping


def test_every_cause_says_what_it_means_what_it_looks_at_and_what_to_do() -> None:
    found = causes.all_causes()
    assert len({cause.code for cause in found}) == len(found)
    for cause in found:
        assert cause.code == cause.code.lower().replace("_", "-")
        for text in (cause.title, cause.meaning, cause.evidence, cause.fix):
            assert len(text) > 10
            assert "  " not in text.replace("\n    ", "\n").replace("  #", " #")


def test_a_cause_that_is_unknown_is_refused_with_the_nearest_one() -> None:
    assert causes.get("loss-scaling").code == "loss-scaling"
    with pytest.raises(WrongUse) as refused:
        causes.get("loss-scalling")
    assert str(refused.value) == (
        "A cause must be one of the catalogue. Received: code='loss-scalling'. "
        "Did you mean 'loss-scaling'? `gpudist causes` lists all."
    )


@pytest.mark.parametrize(
    ("option", "cure"),
    [("clipnorm", "clip_by_norm"), ("clipvalue", "clip_by_value"), ("global_clipnorm", "clip_by_global_norm")],
)
def test_the_cure_of_clipping_clips_in_the_way_of_the_option(option: str, cure: str) -> None:
    assert clipping.cure(option).count(f"tf.{cure}(") == 1


def test_no_cure_sums_a_count_of_32_bits_which_collectives_of_gpus_refuse() -> None:
    for path in sorted(Path(causes.__file__).parent.glob("*.py")):
        assert not re.search(r"ReduceOp\.\w+, tf\.(shape|size)\(", path.read_text()), path.name
