"""Propose edits for the causes of a verdict, prove them by verifying the edited program, and write them."""

from emulate.fix.loop import FixReport, fix
from emulate.fix.patch import check_editable, write_edits
from emulate.verify import Fix

__all__ = ["Fix", "FixReport", "check_editable", "fix", "write_edits"]
