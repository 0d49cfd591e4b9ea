"""Where the program runs: this machine's devices, the tasks of TF_CONFIG, of a Slurm step or of a cluster given."""

from gpudist_core.environment.devices import index_of, local_devices, num_gpus, shares_hardware, show_own_gpus
from gpudist_core.environment.environment import Environment, environment, find_tasks
from gpudist_core.environment.tasks import Tasks

__all__ = [
    "Environment",
    "Tasks",
    "environment",
    "find_tasks",
    "index_of",
    "local_devices",
    "num_gpus",
    "shares_hardware",
    "show_own_gpus",
]
