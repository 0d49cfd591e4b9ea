"""One pre-loaded parent for all verifications of a test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulate.cluster import Preload


@pytest.fixture(scope="session")
def preload() -> Iterator[Preload]:
    with Preload() as parent:
        yield parent
