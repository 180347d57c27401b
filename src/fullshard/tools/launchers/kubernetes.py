"""A TrainJob of Kubeflow Trainer (v1alpha1, as of its release 2.3), for the runtime torch-distributed.

The runtime gives every pod torchrun's options as variables (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR
and others), so that the command is torchrun alone.
"""

from typing import Any

from fullshard.tools.launchers.request import TO_SAVE_S, TORCHRUN_WAITS, Request, comment
from fullshard.tools.launchers.yaml_text import to_yaml

_NODE = "node"  # what the runtime calls its job of training nodes, and their container


def manifest(request: Request) -> str:
    """Return the manifest."""
    trainer: dict[str, Any] = {
        "image": request.image,
        "numNodes": request.nodes,
        "numProcPerNode": request.ranks_per_node,
        # Kubernetes puts values for $(NAME) in a command, and one $ for two.
        "command": ["torchrun", *(word.replace("$", "$$") for word in request.program)],
    }
    if not request.on_cpu:
        gpus = {"nvidia.com/gpu": request.ranks_per_node}
        trainer["resourcesPerNode"] = {"requests": gpus, "limits": gpus}
    spec: dict[str, Any] = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    if request.volume:
        trainer["env"] = [dict(zip(("name", "value"), TORCHRUN_WAITS, strict=True))]
        spec["runtimePatches"] = [_with_volume(*request.volume.split(":", 1))]
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": request.name},
        "spec": spec,
    }
    note = comment(request, "Submit it with: kubectl create -f FILE")
    return f"{note}\n{to_yaml(job)}"


def _with_volume(claim: str, path: str) -> dict[str, Any]:
    """Return the patch of the runtime that mounts a claim in each training pod, which has time to save."""
    pod = {
        "terminationGracePeriodSeconds": TO_SAVE_S,
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": claim}}],
        "containers": [
            {"name": _NODE, "volumeMounts": [{"name": "shared", "mountPath": path}]},
        ],
    }
    job = {"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "manager": "fullshard/launch",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
    }
