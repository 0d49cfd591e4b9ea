"""Judge every feature (or those named) on every topology, ours and plain Keras; write features.json and docs/features.md.

Usage: python -m benchmarks.features [FEATURE...] [--side ours|keras]
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks.features import table
from benchmarks.features.feature import FEATURES
from benchmarks.features.judge import SIDES, cells
from emulate.cluster import Preload


def main() -> int:
    """Exit code 1 where a cell of ours is not equivalent."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", nargs="*", choices=[[], *FEATURES], metavar="FEATURE")
    parser.add_argument("--side", choices=SIDES, action="append")
    wanted = parser.parse_args()
    results = table.read()
    with Preload() as preload:
        for name in wanted.features or FEATURES:
            for side in wanted.side or SIDES:
                results.setdefault(name, {})[side] = found = cells(name, side, preload)
                said = ", ".join(f"{column} {cell['verdict']}" for column, cell in found.items())
                print(f"{name}, {side}: {said}", file=sys.stderr, flush=True)
                table.write(results)
    table.show(results)
    return 0 if all(table.is_right(cell) for row in results.values() for cell in row.get("ours", {}).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
