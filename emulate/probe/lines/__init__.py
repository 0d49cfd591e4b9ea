"""Record the user's lines: of the operations of a step, and of the calls that make what it uses."""

from emulate.probe.lines.call_lines import install, install_keras, note
from emulate.probe.lines.step import Lines, StepLines

__all__ = ["Lines", "StepLines", "install", "install_keras", "note"]
