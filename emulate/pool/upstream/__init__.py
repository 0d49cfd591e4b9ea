"""Collect the private names of TensorFlow 2.21 and Keras 3.15 for this package. Tests cover each."""

from emulate.pool.upstream import functions, runtime, settings, state

__all__ = ["functions", "runtime", "settings", "state"]
