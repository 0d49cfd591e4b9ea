"""Code that a host imports from a copy of the user's folder has the names of the user's files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

IMPORT = """
import json, os, sys, traceback
from emulate.program import innermost, name_originals, original, users
root, folder = sys.argv[1:]
name_originals(root)
os.chdir(root + folder)
sys.path.insert(0, root + folder)
said = []
for again in (False, True):  # compiled, then read from __pycache__
    import losses
    try:
        losses.fail()
    except ValueError as error:
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        text = "".join(traceback.format_exception(error))
    said.append([users(frames)[-1], innermost([(folder + "/losses.py", 2), ("/elsewhere/x.py", 1)]), text, losses.__file__])
    del sys.modules["losses"]
print(json.dumps([said, original(f"cannot open {root}{folder}/data")]))
"""


def test_imported_code_and_tracebacks_name_the_originals_and_files_are_found_in_the_copy(tmp_path: Path) -> None:
    for folder in (tmp_path / "work", Path(f"{tmp_path}/views/copy{tmp_path}/work")):
        folder.mkdir(parents=True)
        (folder / "losses.py").write_text("def fail():\n    raise ValueError('no')\n")
    arguments = [f"{tmp_path}/views/copy", f"{tmp_path}/work"]
    done = subprocess.run([sys.executable, "-c", IMPORT, *arguments], capture_output=True, text=True, check=True)
    said, text = json.loads(done.stdout)
    own = f"{tmp_path}/work/losses.py"
    for line, inner, traceback_text, place in said:
        assert line == inner == [own, 2]
        assert f'File "{own}", line 2, in fail' in traceback_text
        assert "/views/" not in traceback_text
        assert place == f"{tmp_path}/views/copy{own}"
    assert text == f"cannot open {tmp_path}/work/data"
