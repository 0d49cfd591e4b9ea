"""Run a job on Kubernetes: as a JobSet, or as a TrainJob of Kubeflow Trainer, which makes a JobSet."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emulate.cluster import FIRST_PORT, TEMPORARY_FAILURE
from emulate.errors import Unavailable, UsageError
from emulate.launch.job import Job, log_file, tf_config
from emulate.launch.target import (
    CANCELLED,
    FAILED,
    SUCCEEDED,
    TIMED_OUT,
    HostCommand,
    JobState,
    call,
    check_installed,
    uninterrupted,
)

Manifest = dict[str, Any]
INDEX = "JOB_COMPLETION_INDEX"
_INDEX_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_INDEX_LABEL, _JOBSET_LABEL = "batch.kubernetes.io/job-completion-index", "jobset.sigs.k8s.io/jobset-name"
_QUEUE_LABEL, _STEP_LABEL = "kueue.x-k8s.io/queue-name", "trainer.kubeflow.org/trainjob-ancestor-step"
_ENDS = {"Completed": SUCCEEDED, "Complete": SUCCEEDED, "Failed": FAILED}
_GRACE = 120
"""Seconds from SIGTERM to SIGKILL: time to save a checkpoint."""
_READING = 600
"""Seconds for which the pod lives at most through which the trace is copied."""
_IMAGE = re.compile(r"[\w.:/@-]+")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_RESOURCE = re.compile(r"[a-z0-9.-]+/[\w.-]+")


@dataclass(frozen=True)
class KubernetesCluster:
    """Describe what a job needs of a Kubernetes cluster.

    Attributes:
        image: The container image with the program.
        namespace: The namespace, None for the one of kubectl's context.
        claim: A PersistentVolumeClaim that all pods can write, mounted as the parent of the job's folder.
        queue: A queue of Kueue.
        gpu_resource: The name under which the cluster offers GPUs.
    """

    image: str
    namespace: str | None = None
    claim: str | None = None
    queue: str | None = None
    gpu_resource: str = "nvidia.com/gpu"

    def __post_init__(self) -> None:
        of_label = (_LABEL, "a name of Kubernetes: lower-case letters, digits, hyphens and dots")
        rules = (
            ("--image", self.image, _IMAGE, "the name of a container image"),
            *((f"--{name}", getattr(self, name), *of_label) for name in ("namespace", "claim", "queue")),
            ("--gpu-resource", self.gpu_resource, _RESOURCE, "a resource such as nvidia.com/gpu"),
        )
        for option, value, form, what in rules:
            if value is not None and not form.fullmatch(value):
                raise UsageError(f"{option} must be {what}. Received: {option} {value!r}.")


@dataclass
class Kubernetes:
    """Run a job on Kubernetes.

    Attributes:
        job: The job. Its folder is the one that the pods see, in the claim.
        cluster: What it needs of the cluster.
        kind: `jobset` or `trainjob`.
        folder: The job's folder on this machine.
    """

    job: Job
    cluster: KubernetesCluster
    kind: str
    folder: Path
    poll: float = 2.0
    _created: list[str] = field(default_factory=list)
    _following: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def replicated_job(self) -> str:
        """Return the name of the replicated job, which is part of the pods' names. Trainer wants `node`."""
        return "worker" if self.kind == "jobset" else "node"

    def host_name(self, number: int) -> str:
        """Return the name under which a pod reaches another one."""
        return f"{self.job.name}-{self.replicated_job}-0-{number}.{self.job.name}"

    @property
    def environment(self) -> list[Manifest]:
        """Return the environment of each pod. Kubernetes fills in the index, which must stand before TF_CONFIG."""
        unbuffered = {"name": "PYTHONUNBUFFERED", "value": "1"}  # so that a log is there when it is written
        if not self.job.topology.has_several_hosts:
            return [unbuffered]
        names = [self.host_name(number) for number in range(self.job.num_hosts)]
        places = ", ".join(f'"{name}:{FIRST_PORT + number}"' for number, name in enumerate(names))
        direct = {"name": "no_grpc_proxy", "value": ",".join(names)}  # gRPC would send to a proxy what pods write to each other
        index = {"name": INDEX, "valueFrom": {"fieldRef": {"fieldPath": _INDEX_FIELD}}}
        return [unbuffered, direct, index, {"name": "TF_CONFIG", "value": tf_config(places, f"$({INDEX})")}]

    @property
    def _command(self) -> list[str]:
        """Return the command as Kubernetes reads it, for which `$(NAME)` is a variable."""
        return [part.replace("$(", "$$(") for part in self.job.command]

    @property
    def _resources(self) -> Manifest:
        job = self.job
        limits = {
            self.cluster.gpu_resource: job.num_gpus or None,
            "cpu": job.cpus,
            "memory": f"{job.memory}i" if job.memory else None,
        }
        return {name: str(value) for name, value in limits.items() if value is not None}

    @property
    def _pod(self) -> Manifest:
        """Return the pod's template, without what a TrainJob says itself."""
        container: Manifest = {"name": "program" if self.kind == "jobset" else "node", "image": self.cluster.image}
        container |= {"workingDir": str(self.job.workdir)} if self.job.workdir else {}
        pod: Manifest = {"restartPolicy": "Never", "terminationGracePeriodSeconds": _GRACE, "containers": [container]}
        if self.cluster.claim:
            container["volumeMounts"] = [{"name": "shared", "mountPath": str(self.job.folder.parent)}]
            pod["volumes"] = [{"name": "shared", "persistentVolumeClaim": {"claimName": self.cluster.claim}}]
        return pod

    def _job_template(self, pod: Manifest) -> Manifest:
        """Return the Job: a pod that fails ends it; exit code 75 and a preemption end it in a way that restarts the set."""
        again = [
            {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [TEMPORARY_FAILURE]}},
            {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
        hosts = self.job.num_hosts
        spec: Manifest = {"completionMode": "Indexed", "completions": hosts, "parallelism": hosts, "backoffLimit": 0}
        spec |= {"activeDeadlineSeconds": self.job.seconds} if self.job.seconds else {}
        return {"spec": {**spec, "podFailurePolicy": {"rules": again}, "template": {"spec": pod}}}

    def _set(self, job: Manifest) -> Manifest:
        rules = [
            {"name": "restart", "action": "RestartJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
            {"name": "fail", "action": "FailJobSet"},
        ]
        return {
            "failurePolicy": {"maxRestarts": self.job.restarts, "rules": rules},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": self.replicated_job, "replicas": 1, "template": job}],
        }

    def _metadata(self) -> Manifest:
        metadata: Manifest = {"name": self.job.name}
        metadata |= {"namespace": self.cluster.namespace} if self.cluster.namespace else {}
        return metadata | ({"labels": {_QUEUE_LABEL: self.cluster.queue}} if self.cluster.queue else {})

    @property
    def manifests(self) -> list[Manifest]:
        """Return what kubectl submits."""
        return [self._jobset()] if self.kind == "jobset" else [self._runtime(), self._trainjob()]

    def _jobset(self) -> Manifest:
        pod = self._pod
        pod["containers"][0] |= {"command": self._command, "env": self.environment}
        pod["containers"][0] |= {"resources": {"limits": self._resources}} if self._resources else {}
        spec = self._set(self._job_template(pod))
        return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": self._metadata(), "spec": spec}

    def _runtime(self) -> Manifest:
        """Return the runtime: without a framework of its own (`plainML`), so that nothing but our TF_CONFIG is set."""
        job = {"metadata": {"labels": {_STEP_LABEL: "trainer"}}, **self._job_template(self._pod)}
        metadata = {name: value for name, value in self._metadata().items() if name != "labels"}
        spec = {"mlPolicy": {"numNodes": self.job.num_hosts}, "template": {"spec": self._set(job)}}
        return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainingRuntime", "metadata": metadata, "spec": spec}

    def _trainjob(self) -> Manifest:
        trainer: Manifest = {
            "image": self.cluster.image,
            "command": self._command,
            "numNodes": self.job.num_hosts,
            "env": self.environment,
        }
        trainer |= {"resourcesPerNode": {"limits": self._resources}} if self._resources else {}
        runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": self.job.name}
        spec = {"runtimeRef": runtime, "trainer": trainer}
        return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": self._metadata(), "spec": spec}

    @property
    def text(self) -> str:
        """Return the manifests as YAML."""
        yaml = load_yaml()
        return str(yaml.safe_dump_all(self.manifests, sort_keys=False, width=120))

    def submit(self) -> dict[str, Any]:
        """Give the manifests to kubectl."""
        check_installed(("kubectl",))
        for manifest in self.manifests:
            with uninterrupted():
                call("kubectl", "create", "-f", "-", *self._namespace, text=json.dumps(manifest))
                self._created.append(manifest["kind"])
        record = {"target": self.kind, "kinds": self._created, "name": self.job.name, "namespace": self.cluster.namespace}
        return record | {"label": f"{self.kind} {self.job.name}"}

    @property
    def _namespace(self) -> list[str]:
        return ["--namespace", self.cluster.namespace] if self.cluster.namespace else []

    def state(self) -> JobState:
        """Ask the cluster, and follow the log of each new pod."""
        pods = pods_of(self.job.name, self._namespace)
        for pod in pods:
            name = str(pod["metadata"]["name"])
            if name in self._following or pod.get("status", {}).get("phase") in (None, "Pending", "Unknown"):
                continue
            index = pod["metadata"].get("labels", {}).get(_INDEX_LABEL, "0")
            with log_file(self.folder, index).open("ab") as log:
                command = ["kubectl", "logs", "--follow", name, *self._namespace]
                # A session of its own: Ctrl-C is for gpudist.
                self._following[name] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        return state_of(self.kind, self.job.name, self._namespace, pods)

    def cancel(self) -> bool:
        """Delete what was created, and wait until its pods are gone. A job that was there before stays."""
        delete(self._created, self.job.name, self._namespace)
        return self._created[-1:] == [self.manifests[-1]["kind"]]

    def finish(self) -> None:
        """Wait for the rest of the logs, then stop following them."""
        for process in self._following.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        self._following = {}

    def collect(self) -> None:
        """Copy the trace from the claim to this machine, through a pod that only reads it."""
        if self.job.steps is None:
            return
        pod, name = self._pod, f"{self.job.name}-trace"
        pod["containers"][0]["command"] = ["sleep", str(_READING)]
        pod |= {"terminationGracePeriodSeconds": 0}
        metadata = {**self._metadata(), "name": name}
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}
        try:
            call("kubectl", "create", "-f", "-", *self._namespace, text=json.dumps(manifest))
            call("kubectl", "wait", "--for=condition=Ready", f"pod/{name}", "--timeout=100s", *self._namespace)
            call("kubectl", "cp", f"{name}:{self.job.trace}", str(self.folder / self.job.trace.name), *self._namespace)
        finally:
            call("kubectl", "delete", "pod", name, "--ignore-not-found", "--wait=false", *self._namespace)

    def host_commands(self) -> list[HostCommand]:
        """Return what each pod runs, with the environment that Kubernetes makes of the manifest."""
        names = [self.host_name(number) for number in range(self.job.num_hosts)]
        return [
            HostCommand((name, name.partition(".")[0]), self.job.command, expanded(self.environment, number))
            for number, name in enumerate(names)
        ]


def expanded(environment: list[Manifest], index: int) -> Mapping[str, str]:
    """Return the environment of a pod as the kubelet makes it: `$(NAME)` stands for what was set above it."""
    values: dict[str, str] = {}
    for entry in environment:
        value = entry.get("value", str(index))
        values[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda match: values.get(match[1], match[0]), value)
    return values


def load_yaml() -> Any:
    """Return PyYAML. Raise UsageError if it is not installed."""
    try:
        import yaml
    except ImportError:
        raise UsageError(
            "--jobset and --trainjob need PyYAML. Received: it is not installed. Use pip install gpudist[launch]."
        ) from None
    return yaml


def pods_of(name: str, namespace: list[str]) -> list[Manifest]:
    """Return the pods of a job."""
    text = call("kubectl", "get", "pods", "--selector", f"{_JOBSET_LABEL}={name}", "--output", "json", *namespace)
    items: list[Manifest] = json.loads(text)["items"]
    return items


def state_of(kind: str, name: str, namespace: list[str], pods: list[Manifest]) -> JobState:
    """Return how far a job is.

    Args:
        kind: `jobset` or `trainjob`.
        name: Its name.
        namespace: Arguments for kubectl.
        pods: Its pods.

    Returns:
        Its state.
    """
    try:
        status = json.loads(call("kubectl", "get", kind, name, "--output", "json", *namespace)).get("status", {})
    except Unavailable as error:
        if "NotFound" not in str(error):
            raise
        return JobState(CANCELLED, "it was deleted")
    for condition in status.get("conditions", []):
        if condition.get("status") == "True" and condition.get("type") in _ENDS:
            return _ended(_ENDS[condition["type"]], condition, pods)
    phases = [str(pod.get("status", {}).get("phase")) for pod in pods]
    running = phases.count("Running") + phases.count("Succeeded")
    return JobState("running" if running else "waiting", f"{running} of {max(len(phases), 1)} pods started")


def _ended(phase: str, condition: Manifest, pods: list[Manifest]) -> JobState:
    if phase == SUCCEEDED:
        return JobState(phase)
    said = f"Kubernetes says {condition.get('reason')}: {condition.get('message')}"
    codes = {
        pod["metadata"]["name"]: ended["exitCode"]
        for pod in pods
        for container in pod.get("status", {}).get("containerStatuses", [])
        if (ended := container.get("state", {}).get("terminated"))
    }
    failed = [f"{pod} ended with exit code {code}" for pod, code in codes.items() if code]
    timed_out = "DeadlineExceeded" in said
    return JobState(TIMED_OUT if timed_out else FAILED, "; ".join([said, *failed]))


def delete(kinds: Sequence[str], name: str, namespace: list[str]) -> None:
    """Delete objects with their pods, the last one first, and wait until they are gone. What is gone already stays so."""
    for kind in reversed(kinds):
        options = ["--ignore-not-found", "--cascade=foreground", "--timeout=100s", *namespace]
        call("kubectl", "delete", kind.lower(), name, *options)
