"""The command `gpudist`."""

from emulate.cli.app import app, main

__all__ = ["app", "main"]
