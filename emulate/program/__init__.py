"""Find the program to verify (a script, a module, a function of one of them, or a callable), and start it in a host."""

from emulate.program.lines import (
    described,
    innermost,
    lines_of_traceback,
    lines_that_change_state,
    lines_that_return,
    name_originals,
    original,
    users,
)
from emulate.program.notebook import cells_of, code_cells, is_notebook
from emulate.program.program import Program, pickle_by_value
from emulate.program.tracebacks import hint_for, is_ours, own_traceback, shorten_traceback, trim_traceback, working_directory

__all__ = [
    "Program",
    "cells_of",
    "code_cells",
    "described",
    "hint_for",
    "innermost",
    "is_notebook",
    "is_ours",
    "lines_of_traceback",
    "lines_that_change_state",
    "lines_that_return",
    "name_originals",
    "original",
    "own_traceback",
    "pickle_by_value",
    "shorten_traceback",
    "trim_traceback",
    "users",
    "working_directory",
]
