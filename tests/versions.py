"""From which version on TensorFlow or Keras behaves otherwise, for tests that notice when it does."""

from __future__ import annotations

from gpudist_core.installed import installed_version, release


def since(module: str, version: str) -> bool:
    """Return whether the installed `module` is of this version or newer; `since("keras", "3.9")`."""
    return release(installed_version(module) or "") >= release(version)
