"""Tasks of SkyPilot: held to its schema, and what its nodes run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch_checks import check_schema, check_shell
from stretto.errors import StrettoError
from stretto.run.launch.cluster import ClusterJob
from stretto.run.launch.sky import task


def job(**changes: Any) -> ClusterJob:
    fields = {
        "name": "gpt_2.x",
        "config": "configs/a.yaml",
        "layout": "dp=8",
        "nodes": 2,
        "ranks_per_node": 4,
        "devices_per_node": 4,
        "mounts": ["my-volume:/runs", "s3://bucket/tokens:/data"],
        "setup": ["pip install -e ."],
    }
    return ClusterJob(**{**fields, **changes})


def document(**changes: Any) -> dict[str, Any]:
    return yaml.safe_load(task(job(**changes), accelerator="H100", spot=True, infra="aws/us-east-1"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nodes": 1, "ranks_per_node": 8, "devices_per_node": 0, "mounts": [], "setup": []},
        {"image": "a/b:1"},
    ],
)
def test_tasks_are_as_published(changes: dict[str, Any]) -> None:
    check_schema(document(cpus_per_rank=6, **changes), "sky-task")


def test_a_task_is_recovered_after_it_has_saved() -> None:
    found = document(cpus_per_rank=6, image="a/b:1")
    assert found["resources"] == {
        "infra": "aws/us-east-1",
        "accelerators": {"H100": 4},
        "cpus": "24+",
        "image_id": "docker:a/b:1",
        "use_spot": True,
        "job_recovery": {"recover_on_exit_codes": [75]},
    }
    assert found["volumes"] == {"/runs": "my-volume"}
    assert found["file_mounts"] == {"/data": {"source": "s3://bucket/tokens", "mode": "MOUNT"}}
    read_only = document(mounts=["s3://bucket/tokens:/data:ro"])["file_mounts"]
    assert read_only == {"/data": {"source": "s3://bucket/tokens", "mode": "COPY"}}
    assert found["setup"] == "pip install -e .\n"
    assert found["secrets"] == {"STRETTO_JOB_KEY": None}
    assert "secrets" not in document(nodes=1, ranks_per_node=8)


def test_nodes_meet_on_the_first_address(tmp_path: Path) -> None:
    run = document()["run"]
    check_shell(run, tmp_path / "run.sh")
    printed = subprocess.run(
        ["bash", "-c", run.replace("python", "printf '%s\\n'")],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
    ).stdout.splitlines()
    assert printed[5:8] == ["--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29400"]


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"name": "a+b"}, "job_name is 'a+b'", "--job-name a-b"),
        ({"config": "/home/a.yaml"}, "CONFIG is /home/a.yaml", None),
        (
            {"mounts": ["/data:/data"]},
            "mount is '/data:/data': must name a bucket",
            "--mount my-volume:/runs",
        ),
    ],
)
def test_what_sky_does_not_take(changes: dict[str, Any], message: str, hint: str | None) -> None:
    with pytest.raises(StrettoError) as caught:
        document(**changes)
    assert message in caught.value.message
    assert caught.value.hint == hint


def test_gpus_need_a_name() -> None:
    with pytest.raises(StrettoError, match="the GPUs of the nodes have no name"):
        task(job())
