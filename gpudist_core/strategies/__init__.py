"""One call that gives the right `tf.distribute.Strategy` for where the program runs."""

from gpudist_core.strategies.make import make_strategy

__all__ = ["make_strategy"]
