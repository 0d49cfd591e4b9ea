"""The parent of all hosts keeps no memory that the hosts do not share."""

from __future__ import annotations

import subprocess
import sys

LOOK = """
import numpy, psutil
from emulate.cluster import system
before = psutil.Process().memory_info().rss
system.release_clean_file_pages()
after = psutil.Process().memory_info().rss
print(before - after > 5_000_000, float((numpy.ones((64, 64)) @ numpy.ones((64, 64))).sum()))
"""


def test_pages_of_files_are_given_back_and_the_process_goes_on() -> None:
    result = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", str(64.0**3)]
