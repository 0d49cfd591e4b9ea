"""The working directory, which can be gone."""

from __future__ import annotations

from pathlib import Path

from emulate.errors import WrongUse


def working_directory() -> Path:
    """Where this process is, and hosts will be.

    Returns:
        The folder.

    Raises:
        WrongUse: When it was deleted, or cannot be seen.
    """
    try:
        return Path.cwd()
    except OSError as error:
        raise WrongUse(
            f"The working directory must be there. Received: one that was deleted or cannot be seen ({error.strerror}). "
            "Change to a folder that exists."
        ) from None
