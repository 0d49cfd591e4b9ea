"""What a step replaces is put back: after errors, from several threads, and beside others who wrap the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from gpudist_core.upstream.patches import Patches

Number = Callable[[Any], int]


def _original(self: Any) -> int:
    return 1


def _plus(number: int) -> Callable[[Number, Any], int]:
    return lambda original, self: original(self) + number


def _around(number: Number) -> Number:
    return lambda self: number(self) + 100


@pytest.fixture
def owner() -> Any:
    class Owner:
        number = _original

    return Owner


def _patches(owner: Any, *wraps: Any) -> Patches:
    return Patches(lambda: [(owner, "number", wrap) for wrap in wraps or [_plus(10)]])


def test_an_attribute_is_replaced_in_a_block_and_put_back_after_the_outermost(owner: Any) -> None:
    patches = _patches(owner)
    with patches:
        with patches:
            assert owner().number() == 11
        assert owner().number() == 11
    assert owner.number is _original


def test_an_attribute_is_put_back_after_an_error(owner: Any) -> None:
    with pytest.raises(KeyError), _patches(owner):
        raise KeyError
    assert owner.number is _original


def test_the_last_of_several_replacements_is_outermost(owner: Any) -> None:
    with _patches(owner, _plus(10), lambda original, self: original(self) * 2):
        assert owner().number() == 22
    assert owner.number is _original


def test_an_inherited_method_is_inherited_again(owner: Any) -> None:
    child = type("Child", (owner,), {})
    with _patches(child):
        assert (child().number(), owner().number()) == (11, 1)
    assert "number" not in vars(child)


def test_a_block_of_another_thread_keeps_what_this_one_has_replaced(owner: Any) -> None:
    patches = _patches(owner)
    entered, may_leave = threading.Event(), threading.Event()

    def other() -> None:
        with patches:
            entered.set()
            may_leave.wait(10)

    thread = threading.Thread(target=other)
    with patches:
        thread.start()
        assert entered.wait(10)
    assert owner().number() == 11
    may_leave.set()
    thread.join()
    assert owner.number is _original


def test_a_wrapper_that_others_put_around_a_replacement_stays_and_counts_it_once(owner: Any) -> None:
    patches = _patches(owner)
    with patches:
        ours = owner.number
        theirs = _around(ours)
        owner.number = theirs
        assert owner().number() == 111
    assert owner.number is theirs
    with patches:
        assert owner().number() == 111
    owner.number = ours  # what they had found: ours may stay until the next step
    with patches:
        assert owner().number() == 11
    assert owner.number is _original


def test_what_others_wrap_between_blocks_is_put_back_as_theirs(owner: Any) -> None:
    patches = _patches(owner)
    with patches:
        pass
    owner.number = theirs = _around(owner.number)
    with patches:
        assert owner().number() == 111
    assert owner.number is theirs


def test_an_original_that_others_restore_in_a_block_is_replaced_in_the_next(owner: Any) -> None:
    patches = _patches(owner)
    with patches:
        owner.number = _original
    assert owner.number is _original
    with patches:
        assert owner().number() == 11
    assert owner.number is _original
