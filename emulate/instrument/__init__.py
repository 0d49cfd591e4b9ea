"""Wrap each point of TensorFlow, Keras, NumPy and gpudist_core at which a program shows what it does."""

from emulate.instrument.files import Paths
from emulate.instrument.progress import Pulse

__all__ = ["Paths", "Pulse"]
