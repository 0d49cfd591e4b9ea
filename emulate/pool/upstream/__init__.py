"""The one place of this package that touches private names of TensorFlow (2.21) and Keras (3.15); tests guard each."""

from emulate.pool.upstream import functions, runtime, settings, state

__all__ = ["functions", "runtime", "settings", "state"]
