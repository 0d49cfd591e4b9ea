"""Run the command `gpudist` as `python -m emulate`."""

import sys

from emulate.cli import main

if __name__ == "__main__":
    sys.exit(main())
