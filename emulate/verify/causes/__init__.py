"""Find out why a program does not train the same model: one module for each kind of cause, and the catalogue of all."""

from emulate.verify.causes.catalogue import all_causes, find_causes, get
from emulate.verify.causes.cause import Cause, Group, Sign

__all__ = ["Cause", "Group", "Sign", "all_causes", "find_causes", "get"]
