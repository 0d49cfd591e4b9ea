"""Launch a program on a real cluster: Slurm, Kubernetes or plain hosts. TensorFlow's own runtime does the work there."""

from emulate.launch.hosts import HostsBySsh, read_hosts
from emulate.launch.job import Job, JobLogs, default_name, number_of_seconds, program_of
from emulate.launch.jobs import cancel, status
from emulate.launch.kubernetes import Kubernetes, KubernetesCluster, load_yaml
from emulate.launch.slurm import Slurm
from emulate.launch.target import Target, follow, make_folder

__all__ = [
    "HostsBySsh",
    "Job",
    "JobLogs",
    "Kubernetes",
    "KubernetesCluster",
    "Slurm",
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
