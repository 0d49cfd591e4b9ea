"""`python -m emulate` is the command `gpudist`."""

import sys

from emulate.cli import main

if __name__ == "__main__":
    sys.exit(main())
