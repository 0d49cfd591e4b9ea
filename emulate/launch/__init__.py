"""Launch a program on a real cluster: Slurm, Kubernetes or plain hosts. TensorFlow's own runtime does the work there."""

from emulate.launch.hosts import Hosts, read_hosts
from emulate.launch.job import FIRST_PORT, Job, default_name, number_of_seconds, program_of
from emulate.launch.jobs import cancel, status
from emulate.launch.kubernetes import Cluster, Kubernetes, load_yaml
from emulate.launch.logs import Logs
from emulate.launch.slurm import Slurm
from emulate.launch.target import State, Target, follow, make_folder

__all__ = [
    "FIRST_PORT",
    "Cluster",
    "Hosts",
    "Job",
    "Kubernetes",
    "Logs",
    "Slurm",
    "State",
    "Target",
    "cancel",
    "default_name",
    "follow",
    "load_yaml",
    "make_folder",
    "number_of_seconds",
    "program_of",
    "read_hosts",
    "status",
]
