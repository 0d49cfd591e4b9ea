#!/usr/bin/env bash
# kubeflow-trainer-api reads a TrainJob of another release of the same API version and drops what it does not know.
#
# Guess: TrainJob is trainer.kubeflow.org/v1alpha1 from 2.0 to 2.3, so a manifest is valid in all; a field that a model does not know is
# an error, as pydantic checks types strictly here and Kubernetes validates fields strictly.
# What happens: 2.0 has podSpecOverrides, 2.1 podTemplateOverrides, 2.2 runtimePatches. `from_dict` of a release drops those of the
# others, and a misspelled numNode, without a word. The job that is created has no node selector, no tolerations and no volumes, or one
# node instead of four. The server sees nothing unknown, so its strict validation has nothing to say.
# Why: `TrainerV1alpha1TrainJobSpec.from_dict` in kubeflow_trainer_api/models/trainer_v1alpha1_train_job_spec.py validates a dict of the
# known names, `{"trainer": ... obj["trainer"] ...}`, and `model_config` does not forbid extra fields. A number for a string is refused.
# Workaround: compare `Model.from_dict(manifest).to_dict()` with the manifest, or give the manifest to `kubectl apply --validate=strict`.
# Versions: kubeflow-trainer-api 2.0.0, 2.1.0, 2.3.0
# Seen: the fields that from_dict and to_dict lose of one manifest with all of these fields.
#     2.0.0: activeDeadlineSeconds numNode podTemplateOverrides runtimePatches
#     2.1.0: activeDeadlineSeconds numNode podSpecOverrides runtimePatches
#     2.3.0: labels numNode podSpecOverrides podTemplateOverrides

# shellcheck source=findings/environment.bash
source "$(dirname "$0")/environment.bash"
fields() {
    environment "kubeflow-trainer-api==$1"
    cat > "$work/fields.py" <<'PYTHON'
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

node = {"nodeSelector": {"accelerator": "h100"}}
spec = {
    "runtimeRef": {"name": "tensorflow"},
    "labels": {"team": "vision"},
    "activeDeadlineSeconds": 3600,
    "podSpecOverrides": [{"targetJobs": [{"name": "node"}], **node}],
    "podTemplateOverrides": [{"targetJobs": [{"name": "node"}], "spec": node}],
    "runtimePatches": [{"manager": "me"}],
    "trainer": {"image": "train", "numNode": 4},
}
manifest = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "train"}, "spec": spec}
kept = TrainerV1alpha1TrainJob.from_dict(manifest).to_dict()["spec"]
print(*sorted((spec.keys() - kept.keys()) | (spec["trainer"].keys() - kept["trainer"].keys())))
PYTHON
    echo "$1: $(run_python fields.py)"
}
expect_header "$(fields 2.0.0)
$(fields 2.1.0)
$(fields 2.3.0)"
