"""Define the command `gpudist`. `main` imports what is slow, so that Ctrl-C gives no traceback."""

from __future__ import annotations

from collections.abc import Sequence

from emulate.errors import Interrupted


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: The arguments. Default: those of the process.

    Returns:
        The exit code.
    """
    try:
        from emulate.cli import app
    except KeyboardInterrupt:
        return Interrupted.exit_code
    return app.main(args)
