"""Manifests for Kubernetes: valid against the schemas of their kinds, and what a pod makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from emulate.launch import Job, Kubernetes, KubernetesCluster
from emulate.launch.kubernetes import INDEX
from emulate.topology import Topology

DATA = Path(__file__).parent / "data"
JOB = Job(
    "train",
    Topology(2, 4),
    ("train.py",),
    ("--epochs", "$(HOME)"),
    Path("/gpudist/train"),
    workdir=Path("/app"),
    python="python3",
    cpus=8,
    memory="64G",
    seconds=7200,
    restarts=3,
)
CLUSTER = KubernetesCluster("registry.example/a:1", namespace="team", claim="shared", queue="gpus")
CHOICES = {
    "all": (JOB, CLUSTER),
    "least": (replace(JOB, workdir=None, cpus=None, memory=None, seconds=None, restarts=0), KubernetesCluster("a")),
    "one-host": (replace(JOB, topology=Topology(1, 4)), CLUSTER),
    "recorded": (replace(JOB, restarts=0, steps=5, device="cpu"), CLUSTER),
}


def strict(schema: Any) -> Any:
    """Refuse keys that a schema does not have, as `kubectl --validate=strict` does."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict(part) for name, part in schema.items()}
    if isinstance(found.get("properties"), dict) and not found.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def validate(manifest: dict[str, Any]) -> None:
    crd = json.loads((DATA / f"{manifest['kind']}.json").read_text())
    assert manifest["apiVersion"] == f"{crd['group']}/{crd['version']}"
    jsonschema.validate(manifest, strict(crd["schema"]))


def manifests(kind: str, choice: str) -> list[dict[str, Any]]:
    job, cluster = CHOICES[choice]
    return list(yaml.safe_load_all(Kubernetes(job, cluster, kind, Path()).text))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_manifests_are_valid(kind: str, choice: str) -> None:
    found = manifests(kind, choice)
    for manifest in found:
        validate(manifest)
    assert [manifest["kind"] for manifest in found] == (["JobSet"] if kind == "jobset" else ["TrainingRuntime", "TrainJob"])


@pytest.mark.parametrize(
    "place", [("spec", "replicatedJob"), ("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "container")]
)
def test_the_schemas_notice_a_typo(place: tuple[str | int, ...]) -> None:
    [manifest] = manifests("jobset", "all")
    inner: Any = manifest
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = []
    with pytest.raises(jsonschema.ValidationError, match=str(place[-1])):
        validate(manifest)


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_tf_config_of_each_pod_has_the_names_that_pods_get(kind: str) -> None:
    commands = Kubernetes(JOB, CLUSTER, kind, Path()).host_commands()
    name = "worker" if kind == "jobset" else "node"
    # JobSet: <set>-<replicated job>-<job>-<pod>.<subdomain>; the subdomain is the set's name; Trainer names the set as the job.
    workers = [f"train-{name}-0-{pod}.train" for pod in (0, 1)]
    assert [command.names[0] for command in commands] == workers
    told = [json.loads(command.environment["TF_CONFIG"]) for command in commands]
    cluster = {"worker": [f"{worker}:{2222 + pod}" for pod, worker in enumerate(workers)]}
    assert told == [{"cluster": cluster, "task": {"type": "worker", "index": pod}} for pod in (0, 1)]
    assert commands[0].argv == ("python3", "train.py", "--epochs", "$(HOME)")


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    return found


def test_the_index_stands_before_the_variable_that_refers_to_it_and_arguments_are_not_expanded() -> None:
    found = container(manifests("jobset", "all")[0])
    names = [entry["name"] for entry in found["env"]]
    assert names.index(INDEX) < names.index("TF_CONFIG")
    assert found["command"] == ["python3", "train.py", "--epochs", "$$(HOME)"]


def test_resources_and_the_shared_volume_are_asked_for() -> None:
    [manifest] = manifests("jobset", "all")
    found = container(manifest)
    assert found["resources"]["limits"] == {"nvidia.com/gpu": "4", "cpu": "8", "memory": "64Gi"}
    assert found["volumeMounts"] == [{"name": "shared", "mountPath": "/gpudist"}]
    assert manifest["metadata"] == {"name": "train", "namespace": "team", "labels": {"kueue.x-k8s.io/queue-name": "gpus"}}
    train = manifests("trainjob", "all")[1]["spec"]["trainer"]
    assert train["resourcesPerNode"]["limits"] == found["resources"]["limits"]


def test_one_host_gets_no_tf_config() -> None:
    assert [entry["name"] for entry in container(manifests("jobset", "one-host")[0])["env"]] == ["PYTHONUNBUFFERED"]


def test_exit_code_75_and_a_preemption_restart_the_set_and_other_failures_end_it() -> None:
    [manifest] = manifests("jobset", "all")
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    exits, disrupted = job["podFailurePolicy"]["rules"]
    assert (exits["action"], exits["onExitCodes"]["values"]) == ("FailJob", [75])
    assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == ("FailJob", "DisruptionTarget")
    restart, fail = manifest["spec"]["failurePolicy"]["rules"]
    assert (restart["action"], restart["onJobFailureReasons"]) == ("RestartJobSet", ["PodFailurePolicy"])
    assert (fail["action"], "onJobFailureReasons" in fail) == ("FailJobSet", False)
    assert (manifest["spec"]["failurePolicy"]["maxRestarts"], job["backoffLimit"]) == (3, 0)
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy needs it


def test_a_train_job_names_its_runtime_whose_job_is_the_trainer() -> None:
    runtime, job = manifests("trainjob", "all")
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    assert set(runtime["spec"]["mlPolicy"]) == {"numNodes"}  # no framework: the policy plainML
    replicated = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    assert replicated["name"] == "node"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
