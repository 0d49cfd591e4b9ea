"""Run training steps whose result does not depend on the topology."""

from gpudist_core.steps.train import TrainStep

__all__ = ["TrainStep"]
