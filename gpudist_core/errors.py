"""Define the errors that gpudist_core raises on purpose. Each text names the rule, the received value and the fix."""

from __future__ import annotations


class UsageError(ValueError):
    """Report an argument, a setting or a call that is not valid.

    The text has the form `<rule>. Received: <name>=<value>. <advice>`.

    Args:
        rule: What must hold, without its full stop. A rule alone is the whole text (Keras and pickle copy errors that way).
        advice: What to do, as a full sentence. Leave it out if the rule says it.
        **received: The values that break the rule, under the names that the user gave them.

    Example:
        >>> str(UsageError("keep must be a positive integer", keep=0))
        'keep must be a positive integer. Received: keep=0.'
    """

    def __init__(self, rule: str, advice: str = "", /, **received: object) -> None:
        values = ", ".join(f"{name}={value!r}" for name, value in received.items())
        super().__init__(f"{rule}. Received: {values}. {advice}".rstrip() if advice or received else rule)


WrongUse = UsageError  # the name in 0.1


class Unavailable(RuntimeError):
    """Report something that this machine, or this version of TensorFlow, cannot provide. The text says why and what works."""
