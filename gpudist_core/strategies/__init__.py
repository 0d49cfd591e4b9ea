"""Make the matching `tf.distribute.Strategy` for where the program runs, in one call."""

from gpudist_core.strategies.make import make_strategy

__all__ = ["make_strategy"]
