"""What the tests of the pool share: one parent to fork from, jobs sent by value."""

from __future__ import annotations

from collections.abc import Iterator

import cloudpickle
import pytest

from emulate.cluster import Pool, Preload


@pytest.fixture
def pool(preload: Preload) -> Iterator[Pool]:
    """A pool of its own for each test."""
    with Pool(preload=preload) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """A host needs neither pytest nor the module of the test."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)
