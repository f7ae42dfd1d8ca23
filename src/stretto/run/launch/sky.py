"""A task of SkyPilot, as `sky jobs launch` takes it: a managed job, which SkyPilot recovers.

SkyPilot itself recovers a job whose nodes were preempted; after exit code 75 it does by the task's
`job_recovery`, however often that happens.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from stretto.engine.parallel.signed import KEY
from stretto.errors import Problem, StrettoError
from stretto.run.launch.cluster import ClusterJob, yaml_text
from stretto.run.launch.stop import SAVED

_NAME = re.compile(r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*")


def task(
    job: ClusterJob, *, accelerator: str | None = None, spot: bool = False, infra: str | None = None
) -> str:
    """Return the task as YAML.

    Args:
        accelerator: SkyPilot's name of the accelerators, as H100.
        spot: use spot instances.
        infra: where to run, as aws/us-east-1 or k8s; None: wherever it is cheapest.

    Raises:
        StrettoError: a value that SkyPilot does not take.
    """
    if not _NAME.fullmatch(job.name):
        fix = re.sub(r"[^a-zA-Z0-9]+", "-", job.name).strip("-") or "train"
        raise Problem(
            "job_name", repr(job.name), "must be letters and digits with . _ - between", f"--job-name {fix}"
        )
    if PurePath(job.config).is_absolute():
        raise Problem("CONFIG", job.config, "must lie in this folder, which SkyPilot copies to the nodes")
    if job.devices_per_node and accelerator is None:
        raise StrettoError(
            "the GPUs of the nodes have no name",
            hint="--accelerator H100, as in `sky gpus list`",
        )
    resources: dict[str, Any] = {}
    if infra is not None:
        resources["infra"] = infra
    if job.devices_per_node:
        resources["accelerators"] = {accelerator: job.devices_per_node}
    if job.cpus_per_rank is not None:
        resources["cpus"] = f"{job.cpus_per_rank * job.ranks_per_node}+"
    if job.image is not None:
        resources["image_id"] = f"docker:{job.image}"
    if spot:
        resources["use_spot"] = True
    resources["job_recovery"] = {"recover_on_exit_codes": [SAVED]}
    document: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.nodes,
        "workdir": ".",
        "resources": resources,
        "envs": job.variables(),
    }
    for source, target, access in job.mount_parts():
        if "://" in source:
            mode = "COPY" if access == "ro" else "MOUNT"
            document.setdefault("file_mounts", {})[target] = {"source": source, "mode": mode}
        elif access == "ro" or source.startswith(("/", ".")):
            raise Problem(
                "mount",
                repr(f"{source}:{target}"),
                "must name a bucket or a volume",
                "--mount my-volume:/runs",
            )
        else:
            document.setdefault("volumes", {})[target] = source
    submit = "sky jobs launch"
    if job.nodes > 1:
        document["secrets"] = {KEY: None}  # signs the ranks' control messages
        submit = f"{KEY}=$(openssl rand -hex 32) {submit} --secret {KEY}"
    if job.setup:
        document["setup"] = "\n".join([*job.setup, ""])
    command = job.static_command('"$SKYPILOT_NODE_RANK"', '"$host"')
    document["run"] = f'host=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")\n{command}\n'
    comment = [
        job.extent(),
        f"Submit: {submit} FILE",
    ]
    return yaml_text(comment, document)
