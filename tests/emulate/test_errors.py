"""Each error of the tree ends the command with the exit code of the contract."""

import pytest

import emulate.errors
import gpudist_core
from emulate.errors import GpudistError, Hung, ProgramFailed, Unavailable, UsageError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GpudistError("x"), 70),
        (UsageError("x"), 2),
        (Unavailable("x"), 5),
        (ProgramFailed("x", host=1, traceback_text="t"), 3),
        (Hung("x", reason="timeout", stacks={0: "s"}), 4),
    ],
)
def test_an_error_carries_its_exit_code(error, code):
    assert error.exit_code == code
    assert isinstance(error, GpudistError)
    assert str(error) == "x"


def test_a_usage_error_is_a_value_error_for_python_callers():
    assert issubclass(UsageError, ValueError)


@pytest.mark.parametrize("package", [emulate.errors, gpudist_core])
def test_the_earlier_name_of_a_usage_error_still_catches_it(package):
    assert package.WrongUse is package.UsageError


def test_a_failed_program_names_host_and_traceback():
    error = ProgramFailed("x", host=2, traceback_text="ValueError: no")
    assert (error.host, error.traceback_text) == (2, "ValueError: no")


def test_a_hang_carries_why_and_the_stacks():
    error = Hung("x", reason="hang", stacks={1: "here"})
    assert (error.reason, error.stacks) == ("hang", {1: "here"})
