"""Find the folders of a program: the working directory, which may be gone, and the folder of its package."""

from __future__ import annotations

from pathlib import Path

from emulate.errors import UsageError


def working_directory() -> Path:
    """Return the working directory of this process and of the hosts.

    Returns:
        The folder.

    Raises:
        UsageError: When it was deleted, or cannot be seen.
    """
    try:
        return Path.cwd()
    except OSError as error:
        raise UsageError(
            f"The working directory must be there. Received: one that was deleted or cannot be seen ({error.strerror}). "
            "Change to a folder that exists."
        ) from None


def package_of(file: Path) -> tuple[Path, str | None]:
    """Return where a file is imported from: in a package by its dotted name (relative imports work), else by itself."""
    root, parts = file.parent, [file.stem]
    while (root / "__init__.py").exists() and root.name.isidentifier():
        root, parts = root.parent, [root.name, *parts]
    return root, ".".join(parts) if len(parts) > 1 else None
