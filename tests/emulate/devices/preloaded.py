"""A process that has imported TensorFlow and not initialised it, and forks a host for each task it is sent.

Started as a script: reads one pickled task a line (base64) from stdin, writes one pickled outcome a line to stdout.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import sys
import traceback
from typing import Any


def serve() -> None:
    import keras  # noqa: F401
    import tensorflow as tf  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        task = pickle.loads(base64.b64decode(line))
        answers.write(base64.b64encode(pickle.dumps(run_hosts(task))).decode() + "\n")
        answers.flush()


def run_hosts(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Fork the task's hosts, wait for all, and return what each left."""
    children = [fork_host(task, host) for host in range(len(task["ports"]) or 1)]
    signal.alarm(task["limit"])
    signal.signal(signal.SIGALRM, lambda *_: [os.kill(pid, signal.SIGKILL) for pid, _ in children])
    outcomes = []
    for pid, reader in children:
        with os.fdopen(reader, "rb") as stream:
            data = stream.read()
        os.waitpid(pid, 0)
        outcomes.append(pickle.loads(data) if data else {"error": "the host died or was killed at its time limit"})
    signal.alarm(0)
    return outcomes


def fork_host(task: dict[str, Any], host: int) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        outcome: dict[str, Any] = {"notes": [], "value": None, "error": None}
        try:
            outcome["value"] = be_host(task, host, outcome["notes"])
        except BaseException as error:
            outcome["error"] = "".join(traceback.format_exception(error))
        with os.fdopen(writer, "wb") as stream:
            stream.write(pickle.dumps(outcome))
        os._exit(0)
    os.close(writer)
    return pid, reader


def be_host(task: dict[str, Any], host: int, notes: list[tuple[str, str]]) -> Any:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.environ.update(task["environment"])
    if task["ports"]:
        cluster = {"worker": [f"localhost:{port}" for port in task["ports"]]}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": host}})
    import cloudpickle

    from emulate.devices import install

    install(task["plan"], lambda code, text: notes.append((code, text)))
    return cloudpickle.loads(task["function"])()


if __name__ == "__main__":
    serve()
