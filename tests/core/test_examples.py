"""The examples in the public docstrings run as they stand."""

from __future__ import annotations

from tests.core.conftest import OnHosts


def _examples() -> dict[str, str]:
    """What failed, by the name of the class or function."""
    import doctest
    import io

    import keras
    import numpy as np
    import tensorflow as tf

    import gpudist_core as gd

    failed = {}
    names = {name: getattr(gd, name) for name in gd.__all__}
    finder, ran = doctest.DocTestFinder(), 0
    for name, thing in names.items():
        for test in finder.find(thing, name, globs={**names, "gd": gd, "keras": keras, "np": np, "tf": tf}):
            said = io.StringIO()
            result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.write)
            ran += result.attempted
            if result.failed:
                failed[test.name] = said.getvalue()
    assert ran > 10, ran
    return failed


def test_the_examples_of_what_is_public_run(on_hosts: OnHosts) -> None:
    (failed,) = on_hosts("1x1", _examples)
    assert not failed, "\n".join(failed.values())
