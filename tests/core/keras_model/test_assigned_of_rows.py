"""What a step of one's own assigns of its rows is another number on each replica, and that is said."""

from __future__ import annotations

import pytest

from tests.core.conftest import OnHosts
from tests.core.keras_model.assigned_of_rows import KINDS, assigned


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_made_of_the_rows_of_one_replica_alone_is_warned_of(on_hosts: OnHosts, kind: str) -> None:
    ((copies, warned),) = on_hosts("1x2", assigned, kind)
    if kind == "mean":
        assert copies[0] != copies[1]
        (text,) = warned
        assert "Received: variable='model/kept', computed from each replica's own examples." in text
        assert "all_reduce('MEAN', value)" in text
        return
    assert warned == []
    if kind != "gradients":  # an accumulator: it has each replica's part
        assert copies[0] == copies[1]


def test_one_device_is_never_warned(on_hosts: OnHosts) -> None:
    assert on_hosts("1x1", assigned, "mean")[0][1] == []
