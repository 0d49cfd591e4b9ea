"""The errors that gpudist_core raises on purpose; the text of each says what must hold, what was received, what to do."""

from __future__ import annotations


class WrongUse(ValueError):
    """What was asked for cannot be meant.

    Args:
        rule: What must hold, a sentence without its full stop; alone it is the whole text (Keras and pickle make a copy by it).
        advice: What to do, a sentence.
        **received: The values that break the rule, by the names the user gave them.
    """

    def __init__(self, rule: str, advice: str = "", **received: object) -> None:
        values = ", ".join(f"{name}={value!r}" for name, value in received.items())
        super().__init__(f"{rule}. Received: {values}. {advice}" if advice else rule)


class Unavailable(RuntimeError):
    """This machine or this version of TensorFlow cannot provide what was asked for; the text says why, and what does."""
