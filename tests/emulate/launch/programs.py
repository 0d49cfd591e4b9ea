"""Programs for jobs: what each host is told, and how it ends."""

TELLS = """
import json, os, signal, socket, sys, time
from pathlib import Path

config = json.loads(os.environ["TF_CONFIG"])
index = config["task"]["index"]
print("told", json.dumps(config), sys.argv[1:])
how = sys.argv[1] if len(sys.argv) > 1 else ""
if how == "fails" and index == 1:
    sys.exit(4)
if how == "leaves" and not Path(f"left-{index}").exists():
    Path(f"left-{index}").touch()
    sys.exit(75)
if how in ("saves", "stubborn"):

    def hear(*_):
        print("heard")
        if how == "saves":
            time.sleep(1 + index)
            Path(f"saved-{index}").touch()
            os._exit(75)

    signal.signal(signal.SIGTERM, hear)
    print("ready")
if how in ("fails", "stays", "saves", "stubborn"):
    time.sleep(600)
print("done")
"""
