"""Let a `tf.distribute.Server` compute on the GPUs of its host.

It makes its devices from the configuration that it is given, and from none where the program gives none (TF 2.21,
server_lib._make_server_def): what was set of the process's devices would not hold for it, and every server would take all
memory of a GPU of which its host has a slice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from emulate.devices import upstream


def give_servers_their_gpus(before: Callable[[], None]) -> None:
    """Change the class of servers in this process; call once.

    Args:
        before: Called before each server is made.
    """
    cls = upstream.server_class()
    real = cls.__init__

    @functools.wraps(real)
    def init(
        self: Any,
        server_or_cluster_def: Any,
        job_name: Any = None,
        task_index: Any = None,
        protocol: Any = None,
        config: Any = None,
        start: Any = True,
    ) -> None:
        before()
        by_default = getattr(server_or_cluster_def, "default_session_config", None)
        real(self, server_or_cluster_def, job_name, task_index, protocol, _with_gpus(config, by_default), start)

    cls.__init__ = init


def _with_gpus(config: Any, by_default: Any) -> Any:
    """Add the devices of this process to a server's configuration, unless the program sets them."""
    ours = upstream.context().config
    said, made = type(ours)(), type(ours)()
    for given in (by_default, config):
        if given is not None:
            said.MergeFrom(given)
    if config is not None:
        made.CopyFrom(config)
    wanted, there = said.gpu_options, ours.gpu_options
    if not said.HasField("gpu_options"):
        made.gpu_options.CopyFrom(there)
        if "GPU" not in said.device_count:
            made.device_count["GPU"] = ours.device_count["GPU"]
    elif any(gpu.memory_limit_mb for gpu in there.experimental.virtual_devices) and not wanted.experimental.virtual_devices:
        made.gpu_options.visible_device_list = there.visible_device_list
        made.gpu_options.experimental.virtual_devices.MergeFrom(there.experimental.virtual_devices)
        made.gpu_options.per_process_gpu_memory_fraction = 0  # what a slice has is a number, and TensorFlow refuses both
    return made
