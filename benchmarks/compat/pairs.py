"""The versions of TensorFlow and Keras that are tried, each with a Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    """One environment and how the programs use it.

    Attributes:
        name: Its name on the command line.
        python: The Python, `3.12` say.
        requirements: What pip installs before gpudist.
        environment: The name of its folder; two pairs may share one.
        is_legacy: Whether the programs run with Keras 2.
        is_scheduled: Whether only the scheduled workflow tries it: what it installs changes every day.
    """

    name: str
    python: str
    requirements: tuple[str, ...]
    environment: str
    is_legacy: bool = False
    is_scheduled: bool = False

    @property
    def keras(self) -> str:
        """The module that the programs run with: Keras 2 is called keras in TensorFlow 2.15 alone."""
        return "tf_keras" if self.is_legacy and self.name != "tf2.15" else "keras"


_NEWEST = ("tensorflow", "keras", "tf_keras")
PAIRS = {
    pair.name: pair
    for pair in (
        Pair("tf2.15", "3.11", ("tensorflow==2.15.*", "tf_keras==2.15.*"), "tf2.15", is_legacy=True),
        Pair("tf2.16", "3.11", ("tensorflow==2.16.*", "keras==3.8.*", "tf_keras==2.16.*"), "tf2.16"),
        Pair("tf_keras2.16", "3.11", ("tensorflow==2.16.*", "keras==3.8.*", "tf_keras==2.16.*"), "tf2.16", is_legacy=True),
        Pair("tf2.17", "3.11", ("tensorflow==2.17.*", "keras==3.12.*", "tf_keras==2.17.*"), "tf2.17"),
        Pair("tf2.18", "3.10", ("tensorflow==2.18.*", "keras==3.8.*", "tf_keras==2.18.*"), "tf2.18"),
        Pair("tf2.19", "3.12", ("tensorflow==2.19.*", "keras==3.10.*", "tf_keras==2.19.*"), "tf2.19"),
        Pair("tf2.20", "3.11", ("tensorflow==2.20.*", "tf_keras==2.20.*"), "tf2.20"),
        Pair("newest", "3.13", _NEWEST, "newest"),
        Pair("tf_keras", "3.13", _NEWEST, "newest", is_legacy=True),
        Pair("nightly", "3.12", ("tf-nightly", "keras-nightly", "tf_keras-nightly"), "nightly", is_scheduled=True),
    )
}
RELEASED = tuple(name for name, pair in PAIRS.items() if not pair.is_scheduled)
