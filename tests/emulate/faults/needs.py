"""What faults need of the machine."""

from __future__ import annotations

import pytest

from emulate.cluster import describe_isolation

_LINKS = describe_isolation()["faults_of_links"]
needs_links = pytest.mark.skipif(not _LINKS["available"], reason=f"no faults of links here: {_LINKS['why']}")
