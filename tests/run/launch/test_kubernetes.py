"""Manifests for Kubernetes: held to the published schemas, and what restarts a job."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch_checks import check_schema, check_shell
from stretto.errors import StrettoError
from stretto.run.launch.cluster import RESTARTED, ClusterJob
from stretto.run.launch.kubernetes import KINDS, RUNTIME, manifest
from stretto.run.watch.joint import HUNG

SCHEMAS = {
    "TrainJob": "trainjob",
    "TrainingRuntime": "trainingruntime",
    "JobSet": "jobset",
    "Job": "volcano-job",
}


def job(**changes: Any) -> ClusterJob:
    fields = {
        "name": "gpt",
        "config": "my job.yaml",
        "overrides": ["data.source=a$$b$(c)"],
        "layout": "dp=8",
        "folder": "runs/gpt",
        "steps": 300,
        "nodes": 2,
        "ranks_per_node": 4,
        "devices_per_node": 4,
        "cpus_per_rank": 6,
        "image": "a/b:1",
        "mounts": ["claim:/runs", "/data:/data:ro"],
        "environment": {"NCCL_DEBUG": "INFO"},
        "setup": ['echo "$(hostname)"'],
        "grace_s": 90,
        "restarts": 7,
    }
    return ClusterJob(**{**fields, **changes})


def documents(kind: str, runtime: str | None = RUNTIME, **changes: Any) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(manifest(job(**changes), kind, runtime=runtime)))


def pods(document: Any) -> list[dict[str, Any]]:
    """The pod specs anywhere in a document: objects with containers."""
    if isinstance(document, list):
        return [pod for each in document for pod in pods(each)]
    if not isinstance(document, dict):
        return []
    found = [document] if "containers" in document else []
    return found + [pod for each in document.values() for pod in pods(each)]


@pytest.mark.parametrize("restarts", [0, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_manifests_are_as_published(kind: str, restarts: int) -> None:
    time = {} if kind == "volcano" else {"time": "2:00:00"}
    for runtime in (RUNTIME, None):
        for document in documents(kind, runtime, restarts=restarts, **time):
            check_schema(document, SCHEMAS[document["kind"]])


def test_the_schemas_refuse_what_they_do_not_know() -> None:
    (document,) = documents("jobset")
    document["spec"]["replicas"] = 1
    document["spec"]["failurePolicy"]["maxRestarts"] = "7"
    with pytest.raises(AssertionError, match=r"'7' is not of type 'integer'.*'replicas' was unexpected"):
        check_schema(document, "jobset")


@pytest.mark.parametrize("kind", KINDS)
def test_pods_have_shared_memory_volumes_and_time_to_save(kind: str) -> None:
    (pod,) = pods(documents(kind))
    assert pod["terminationGracePeriodSeconds"] > 90
    assert pod["volumes"] == [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        {"name": "mount-0", "persistentVolumeClaim": {"claimName": "claim"}},
        {"name": "mount-1", "hostPath": {"path": "/data"}},
    ]
    assert pod["containers"][0]["volumeMounts"] == [
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "mount-0", "mountPath": "/runs"},
        {"name": "mount-1", "mountPath": "/data", "readOnly": True},
    ]


@pytest.mark.parametrize(
    ("kind", "node", "host"),
    [
        ("trainjob", "$PET_NODE_RANK", "$PET_MASTER_ADDR"),
        ("jobset", "$JOB_COMPLETION_INDEX", "gpt-node-0-0.gpt"),
        ("volcano", "$VC_TASK_INDEX", "gpt-node-0.gpt"),
    ],
)
def test_nodes_run_the_agent(kind: str, node: str, host: str, tmp_path: Path) -> None:
    """The command after Kubernetes and bash have replaced what they replace."""
    (document,) = yaml.safe_load_all(manifest(job(), kind, devices="amd.com/gpu"))
    holder = document["spec"]["trainer"] if kind == "trainjob" else pods(document)[0]["containers"][0]
    assert holder["image"] == "a/b:1"
    assert holder.get("resourcesPerNode", holder.get("resources")) == {
        "requests": {"cpu": 24},
        "limits": {"amd.com/gpu": 4},
    }
    variables = {entry["name"]: entry.get("value") for entry in holder["env"]}
    assert variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "90"
    assert variables["NCCL_DEBUG"] == "INFO"
    (key,) = (entry["valueFrom"] for entry in holder["env"] if "valueFrom" in entry)
    assert key["secretKeyRef"]["name"] == "gpt-key"
    assert variables.get("STRETTO_PROGRESS") == ("300 runs/gpt" if kind == "trainjob" else None)
    bash, option, script = holder["command"]
    script = script.replace("$$", "$")
    check_shell(script, tmp_path / "script.sh")
    printed = subprocess.run(
        [bash, option, script.replace("exec python", "printf '%s\\n'")],
        capture_output=True,
        text=True,
        check=True,
        env={
            "PATH": "/usr/bin:/bin",
            node.strip("$"): "1",
            host.strip("$"): "first",
            "PET_MASTER_PORT": "29500",
        },
    ).stdout.splitlines()[1:]
    assert printed[:6] == [
        *("-m", "stretto.run.launch.agent", "--nnodes=2", "--nproc-per-node=4", "--max-restarts=0"),
        "--node-rank=1",
    ]
    assert printed[6] == f"--master-addr={'first' if host.startswith('$') else host}"
    assert printed[7].startswith("--master-port=29")
    assert printed[8:] == [
        *("-m", "stretto.cli.main", "train", "my job.yaml", "data.source=a$$$$b$$(c)", "--resume", "auto")
    ]


def test_a_job_that_saved_or_was_disrupted_is_restarted_and_no_other() -> None:
    assert HUNG in RESTARTED
    (jobset,) = documents("jobset")
    runtime, train_job = documents("trainjob", None)
    assert train_job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": runtime["metadata"]["name"],
    }
    for spec in (jobset["spec"], runtime["spec"]["template"]["spec"]):
        assert spec["failurePolicy"] == {
            "maxRestarts": 7,
            "rules": [
                {"name": "saved", "action": "RestartJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                {"name": "failed", "action": "FailJobSet"},
            ],
        }
        template = spec["replicatedJobs"][0]["template"]["spec"]
        assert template["backoffLimit"] == 0
        assert template["template"]["spec"]["restartPolicy"] == "Never"
        (container,) = template["template"]["spec"]["containers"]
        assert template["podFailurePolicy"]["rules"] == [
            {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": container["name"], "operator": "In", "values": [69, 75]},
            },
        ]
    (volcano,) = documents("volcano")
    actions = [tuple(policy.values()) for policy in volcano["spec"]["policies"]]
    assert actions[:3] == [(75, "RestartJob"), (69, "RestartJob"), ("PodEvicted", "RestartJob")]
    assert actions[3] == ("PodFailed", "TerminateJob")
    assert volcano["spec"]["maxRetry"] == 7
    (never,) = documents("volcano", restarts=0)
    assert all(policy["action"] != "RestartJob" for policy in never["spec"]["policies"])
    assert never["spec"]["maxRetry"] == 1, "0 means Volcano's default, which is more"


def test_a_train_job_refers_to_kubeflow_s_runtime() -> None:
    (document,) = documents("trainjob", time="1:00")
    assert document["spec"]["runtimeRef"]["kind"] == "ClusterTrainingRuntime"
    assert document["spec"]["runtimeRef"]["name"] == "torch-distributed"
    assert document["spec"]["activeDeadlineSeconds"] == 60


@pytest.mark.parametrize(
    ("kind", "changes", "message", "hint"),
    [
        ("jobset", {"image": None}, "there is no image", "--image"),
        ("trainjob", {"name": "GPT_2.x"}, "job_name is 'GPT_2.x'", "--job-name gpt-2-x"),
        ("trainjob", {"name": "a" * 60}, "job_name is", "--job-name " + "a" * 48),
        ("volcano", {"time": "1:00:00"}, "no time limit", "--time"),
    ],
)
def test_what_kubernetes_does_not_take(kind: str, changes: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(StrettoError) as caught:
        documents(kind, **changes)
    assert message in caught.value.message
    assert caught.value.hint is not None
    assert hint in caught.value.hint
