"""Define `gpudist faults`: list the faults and their syntax."""

from __future__ import annotations

from emulate.cli.command import exits_properly
from emulate.faults import EXAMPLES as FAULTS
from emulate.faults import KINDS, PHASES

EXAMPLES = """Examples:

gpudist faults"""


@exits_properly
def faults() -> int:
    """List the faults for `--fault`, and their syntax."""
    width = max(len(example) for example in FAULTS.values())
    for kind, fault in KINDS.items():
        print(f"{FAULTS[kind]:{width}}  {fault.meaning}")
    print(f"\nphases of a step: {', '.join(PHASES)} (default: input). Steps count from 1.")
    return 0
