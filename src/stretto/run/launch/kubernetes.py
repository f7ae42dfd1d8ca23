"""Manifests for Kubernetes: a Kubeflow TrainJob, a JobSet, or a Volcano Job.

Kubernetes sends SIGTERM to the pods that it evicts or drains. Ranks save, agents end with code 75, and the
manifest has the whole job started again after that code, after one that says that a node is gone, or after a
pod was disrupted; any other failure ends the job. A TrainJob has no such policy of its own: it stands in the
runtime that it refers to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stretto.engine.parallel.signed import KEY
from stretto.errors import Problem, StrettoError
from stretto.run.launch.cluster import RESTARTED, ClusterJob, yaml_text
from stretto.run.launch.progress import PROGRESS

KINDS = ("trainjob", "jobset", "volcano")
RUNTIME = "torch-distributed"  # Kubeflow's own ClusterTrainingRuntime for torchrun

_NODE = "node"  # name of the replicated job, of the task and of the container
_LONGEST_NAME = 48  # pods have 15 characters more, and a label has 63
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def manifest(
    job: ClusterJob,
    kind: str,
    *,
    devices: str = "nvidia.com/gpu",
    runtime: str | None = RUNTIME,
    namespace: str | None = None,
) -> str:
    """Return the manifest for `kubectl apply`.

    Args:
        kind: one of `KINDS`.
        devices: the cluster's name of an accelerator as a resource.
        runtime: ClusterTrainingRuntime that a TrainJob refers to; None: the manifest has a TrainingRuntime of
            its own, with the policy of restarts.
        namespace: namespace of the job, or None for that of the context.

    Raises:
        StrettoError: a value that Kubernetes does not take.
    """
    if job.image is None:
        raise StrettoError("Kubernetes runs containers, and there is no image", hint="--image IMAGE")
    for field, value in (("job_name", job.name), ("namespace", namespace)):
        if value is not None and (not _NAME.fullmatch(value) or len(value) > _LONGEST_NAME):
            fix = re.sub(r"[^a-z0-9]+", "-", value.lower())[:_LONGEST_NAME].strip("-0123456789") or "train"
            raise Problem(
                field,
                repr(value),
                f"must be at most {_LONGEST_NAME} of a-z, 0-9 and -, a letter first",
                f"--{field.replace('_', '-')} {fix}",
            )
    metadata = {"name": job.name, **({"namespace": namespace} if namespace else {})}
    secret = f"generic {job.name}-key --from-file=key=/dev/stdin"
    comment = [
        job.extent(),
        "Before, for the key that signs the ranks' control messages:",
        f"openssl rand -hex 32 | kubectl create secret {secret}{f' -n {namespace}' if namespace else ''}",
    ]
    match kind:
        case "jobset":
            documents = [_jobset(job, metadata, devices)]
        case "volcano":
            documents = [_volcano_job(job, metadata, devices)]
        case _:
            documents = [_train_job(job, metadata, devices, runtime)]
            if runtime is None:
                documents.insert(0, _training_runtime(job, metadata))
    return yaml_text(comment, *documents)


def _train_job(
    job: ClusterJob, metadata: Mapping[str, Any], devices: str, runtime: str | None
) -> dict[str, Any]:
    """Return a TrainJob of Kubeflow Trainer, whose controller sets the variables of torchrun."""
    command = job.command(
        '--node-rank="$PET_NODE_RANK"', '--master-addr="$PET_MASTER_ADDR"', '--master-port="$PET_MASTER_PORT"'
    )
    container, volumes = _container(job, command, devices), _volumes(job)
    trainer = {
        "numNodes": job.nodes,
        "numProcPerNode": job.ranks_per_node,
        "image": container["image"],
        "command": container["command"],
        "env": [*container["env"], {"name": PROGRESS, "value": f"{job.steps} {job.folder}"}],
    }
    if container["resources"]:
        trainer["resourcesPerNode"] = container["resources"]
    pod = {
        "terminationGracePeriodSeconds": job.termination_s,
        "containers": [{"name": _NODE, "volumeMounts": container["volumeMounts"]}],
        "volumes": volumes,
    }
    replicated = {"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}
    scope = "TrainingRuntime" if runtime is None else "ClusterTrainingRuntime"
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": scope,
                "name": runtime or job.name,
            },
            **_deadline(job),
            "trainer": trainer,
            "runtimePatches": [
                {
                    "manager": "stretto/launch",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
                }
            ],
        },
    }


def _training_runtime(job: ClusterJob, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the runtime of a TrainJob that is restarted as `_jobset` is."""
    pod = {"restartPolicy": "Never", "containers": [{"name": _NODE, "image": job.image}]}
    replicated = {
        "name": _NODE,
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {**_failure_policy(), "template": {"spec": pod}},
        },
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {**metadata, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {"spec": {"failurePolicy": _restarts(job), "replicatedJobs": [replicated]}},
        },
    }


def _jobset(job: ClusterJob, metadata: Mapping[str, Any], devices: str) -> dict[str, Any]:
    command = job.static_command('"$JOB_COMPLETION_INDEX"', f"{job.name}-{_NODE}-0-0.{job.name}")
    spec = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        **_deadline(job),
        **_failure_policy(),
        "template": {"spec": _pod(job, command, devices)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": _restarts(job),
            "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": spec}}],
        },
    }


def _failure_policy() -> dict[str, Any]:
    """Return what makes a Job of Kubernetes fail with a reason of its own if it shall be restarted."""
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    codes = {"containerName": _NODE, "operator": "In", "values": sorted(RESTARTED)}
    rules = [
        {"action": "FailJob", "onPodConditions": [disrupted]},
        {"action": "FailJob", "onExitCodes": codes},
    ]
    return {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}}


def _restarts(job: ClusterJob) -> dict[str, Any]:
    """Return the policy of a JobSet: it is restarted if the Job has failed by its own policy."""
    rules = [
        {"name": "saved", "action": "RestartJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
        {"name": "failed", "action": "FailJobSet"},
    ]
    return {"maxRestarts": job.restarts, "rules": rules}


def _volcano_job(job: ClusterJob, metadata: Mapping[str, Any], devices: str) -> dict[str, Any]:
    if job.time is not None:
        raise Problem("time", repr(job.time), "a Volcano Job has no time limit", "leave --time out")
    command = job.static_command('"$VC_TASK_INDEX"', f"{job.name}-{_NODE}-0.{job.name}")
    policies: list[dict[str, Any]] = []  # the first that matches counts
    if job.restarts:
        policies = [{"exitCode": code, "action": "RestartJob"} for code in RESTARTED]
        policies.append({"event": "PodEvicted", "action": "RestartJob"})
    policies += [
        {"event": "PodFailed", "action": "TerminateJob"},
        {"event": "TaskCompleted", "action": "CompleteJob"},
    ]
    task = {"name": _NODE, "replicas": job.nodes, "template": {"spec": _pod(job, command, devices)}}
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "schedulerName": "volcano",
            "minAvailable": job.nodes,
            "maxRetry": max(job.restarts, 1),  # 0 would mean Volcano's default
            "plugins": {"env": [], "svc": ["--publish-not-ready-addresses=true"]},
            "policies": policies,
            "tasks": [task],
        },
    }


def _deadline(job: ClusterJob) -> dict[str, int]:
    return {"activeDeadlineSeconds": job.time_s} if job.time_s else {}


def _pod(job: ClusterJob, command: str, devices: str) -> dict[str, Any]:
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.termination_s,
        "containers": [{"name": _NODE, **_container(job, command, devices)}],
        "volumes": _volumes(job),
    }


def _container(job: ClusterJob, command: str, devices: str) -> dict[str, Any]:
    secret = {"name": f"{job.name}-key", "key": "key", "optional": True}
    environment: list[dict[str, Any]] = [{"name": n, "value": v} for n, v in job.variables().items()]
    requests: dict[str, Any] = {}
    if job.cpus_per_rank is not None:
        requests["cpu"] = job.cpus_per_rank * job.ranks_per_node
    resources: dict[str, Any] = {"requests": requests} if requests else {}
    if job.devices_per_node:
        resources["limits"] = {devices: job.devices_per_node}
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    for index, (_, target, access) in enumerate(job.mount_parts()):
        read_only = {"readOnly": True} if access == "ro" else {}
        mounts.append({"name": f"mount-{index}", "mountPath": target, **read_only})
    script = "\n".join([*job.setup, f"exec {command}", ""])  # exec: the agent gets the signals of the pod
    return {
        "image": job.image,
        # Kubernetes replaces $$ by $, and $(NAME) by a variable
        "command": ["bash", "-c", re.sub(r"\$(?=[$(])", "$$", script)],
        "env": [*environment, {"name": KEY, "valueFrom": {"secretKeyRef": secret}}],
        "resources": resources,
        "volumeMounts": mounts,
    }


def _volumes(job: ClusterJob) -> list[dict[str, Any]]:
    """Return the pod's volumes: memory for messages between ranks, folders of the node, and claims."""
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    for index, (source, *_) in enumerate(job.mount_parts()):
        folder = source.startswith("/")
        origin = (
            {"hostPath": {"path": source}} if folder else {"persistentVolumeClaim": {"claimName": source}}
        )
        volumes.append({"name": f"mount-{index}", **origin})
    return volumes
