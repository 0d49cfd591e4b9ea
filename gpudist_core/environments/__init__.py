"""Find out where the program runs: on this machine, or as a task of TF_CONFIG, of a Slurm step or of a given cluster."""

from gpudist_core.environments.devices import (
    index_of,
    load_cuda_libraries,
    local_devices,
    num_gpus,
    shares_hardware,
    show_own_gpus,
)
from gpudist_core.environments.environment import Environment, environment, find_tasks
from gpudist_core.environments.tasks import Tasks

__all__ = [
    "Environment",
    "Tasks",
    "environment",
    "find_tasks",
    "index_of",
    "load_cuda_libraries",
    "local_devices",
    "num_gpus",
    "shares_hardware",
    "show_own_gpus",
]
