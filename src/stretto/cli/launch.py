"""`stretto launch`: what one submits to a cluster to start a job on it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli.options import ConfigFile, Json, Overrides, check_choice, grouped
from stretto.cli.output import command_app
from stretto.cli.report import CommandReport
from stretto.errors import Problem, StrettoError, counted

if TYPE_CHECKING:
    from stretto.run.launch.cluster import ClusterJob

app = command_app()


@app.callback()
def launch() -> None:
    """Print what one submits to a cluster: a batch script, a manifest, or commands."""


@dataclass(frozen=True, kw_only=True)
class RanksOptions:
    """Options of all launchers: which ranks run where."""

    config: ConfigFile
    overrides: Overrides = None
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Number of nodes; default: the layout's ranks over those of a node."),
    ] = None
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks on each node; default: the layout's ranks over the nodes, or --gpus-per-node."
        ),
    ] = None
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Accelerators to request per node; default: one per rank, none on CPUs. Without --nodes and "
            "--ranks-per-node, ranks fill nodes of that size (default 8).",
        ),
    ] = None
    signal_seconds: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Time to save from the signal to the end; default: train.grace_s, else 120.",
        ),
    ] = None
    port: Annotated[int, typer.Option(help="Port of the rendezvous on the first node.")] = 29400
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable of every rank; repeatable.")
    ] = None
    setup: Annotated[
        list[str] | None, typer.Option(help="A shell line to run first on a node; repeatable.")
    ] = None
    as_json: Json = False


CpusPerRank = Annotated[int | None, typer.Option(min=1, help="CPU cores to request per rank.")]


@dataclass(frozen=True, kw_only=True)
class BatchOptions(RanksOptions):
    """Options of launchers that know jobs by name and run them in containers."""

    job_name: Annotated[str | None, typer.Option(help="Name of the job; default: the run's.")] = None
    cpus_per_rank: CpusPerRank = None
    image: Annotated[str | None, typer.Option(help="Container image that runs the ranks.")] = None
    mount: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE:TARGET[:ro]", help="A folder or volume in the container; repeatable."),
    ] = None


Time = Annotated[str | None, typer.Option(help="Time limit, as in 12:00:00.")]
RESTARTS = typer.Option(
    "--requeues",
    "--restarts",
    min=0,
    max=10**6,
    help="Most times that the stopped job is started again; a new submission starts at 0.",
)


def _cluster_job(options: RanksOptions, elsewhere: Sequence[str] = ()) -> ClusterJob:
    """Return the job that the config and the options describe.

    Args:
        elsewhere: folders of the machines that run it; paths in them are not looked for here.

    Raises:
        StrettoError: bad input.
    """
    from stretto.cli.jobs import check_job, ranks_of
    from stretto.recommender.config.load import load_config
    from stretto.run.config.required import check_required
    from stretto.run.launch.cluster import ClusterJob, nodes_of

    overrides = list(options.overrides or [])
    config = load_config(options.config, overrides)
    check_job(config, elsewhere)
    check_required(config)
    world, layout = ranks_of(config)
    nodes, ranks_per_node = nodes_of(
        world,
        layout,
        nodes=options.nodes,
        ranks_per_node=options.ranks_per_node,
        devices_per_node=options.gpus_per_node,
    )
    if (devices := options.gpus_per_node) is None:
        devices = 0 if config.train.device == "cpu" else ranks_per_node
    grace_s, signal_seconds = config.train.grace_s, options.signal_seconds
    if signal_seconds is None:
        signal_seconds = 120 if grace_s is None else ceil(grace_s)
    if grace_s is None:
        overrides.append(f"train.grace_s={signal_seconds}")
    elif grace_s > signal_seconds:
        raise StrettoError(
            f"train.grace_s is {grace_s:g}, and ranks have only --signal-seconds={signal_seconds}",
            hint=f"--signal-seconds {ceil(grace_s)}, or leave it out",
        )
    for variable in options.env or []:
        if "=" not in variable:
            raise Problem("env", repr(variable), "must be NAME=VALUE", "--env OMP_NUM_THREADS=8")
    job = ClusterJob(
        name=config.run.name,
        config=options.config,
        overrides=overrides,
        layout=layout,
        folder=str(config.run.folder),
        steps=config.train.steps,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        devices_per_node=devices,
        grace_s=signal_seconds,
        port=options.port,
        environment=dict(variable.split("=", 1) for variable in options.env or []),
        setup=options.setup or [],
    )
    if isinstance(options, BatchOptions):
        job = replace(
            job,
            name=options.job_name or job.name,
            cpus_per_rank=options.cpus_per_rank,
            image=options.image,
            mounts=options.mount or [],
        )
    return job


def _print(text: str, job: ClusterJob, as_json: bool) -> None:
    """Print what is submitted, and on stderr how many ranks run where if that goes to a file."""
    report = CommandReport(
        {
            "script": text,
            "nodes": job.nodes,
            "ranks_per_node": job.ranks_per_node,
            "gpus_per_node": job.devices_per_node,
            "ranks": job.ranks,
            "layout": job.layout,
        }
    )
    report.verbatim(text)
    report.print(as_json)
    if not as_json and not sys.stdout.isatty():
        gpus = job.devices_per_node
        number = "no GPUs" if gpus == 0 else counted(gpus or 0, "GPU")
        devices = "GPUs as --sbatch says" if gpus is None else f"{number} per node"
        print(f"{job.extent()} ({job.layout}), {devices}", file=sys.stderr)


def _warn_of_lost_runs(job: ClusterJob, lost: str) -> None:
    """Warn if the run's folder does not lie on a mount."""
    if not any(PurePath(job.folder).is_relative_to(target) for _, target, _ in job.mount_parts()):
        print(
            f"warning: {job.folder} lies on no --mount, so {lost} takes its checkpoints along: set run.dir",
            file=sys.stderr,
        )


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(BatchOptions):
    """Options of `stretto launch slurm`."""

    time: Time = None
    requeues: Annotated[int, RESTARTS] = 100
    container: Annotated[
        str | None,
        typer.Option(
            metavar="pyxis|apptainer",
            help="What runs --image; default: apptainer for a .sif file, else pyxis.",
        ),
    ] = None
    partition: Annotated[str | None, typer.Option(help="SLURM partition.")] = None
    account: Annotated[str | None, typer.Option(help="SLURM account.")] = None
    sbatch: Annotated[
        list[str] | None, typer.Option(help="A further sbatch option, as --sbatch=--qos=high; repeatable.")
    ] = None
    srun: Annotated[
        list[str] | None, typer.Option(help="A further srun option, as --srun=--cpu-bind=cores; repeatable.")
    ] = None


@app.command(epilog="Example: stretto launch slurm configs/quickstart.yaml --nodes 2 --time 4:00:00 > job.sh")
@grouped(SlurmOptions)
def slurm(options: SlurmOptions) -> None:
    """Print an sbatch script that trains CONFIG, saves before the time limit, requeues and resumes."""
    from stretto.run.launch.slurm import CONTAINERS, script

    sbatch = options.sbatch or []
    container = options.container
    if container is None:
        container = "apptainer" if (options.image or "").endswith(".sif") else "pyxis"
    check_choice("--container", container, CONTAINERS)
    if options.image is None and (options.mount or options.container):
        raise StrettoError("--mount and --container need --image", hint="--image IMAGE, or leave them out")
    mounts = (mount.split(":") for mount in options.mount or [])
    elsewhere = [parts[1] for parts in mounts if len(parts) > 1 and parts[0] != parts[1]]
    job = replace(_cluster_job(options, elsewhere), time=options.time, restarts=options.requeues)
    if options.gpus_per_node is None and any(s.startswith(("--gpus", "-G", "--gres")) for s in sbatch):
        job = replace(job, devices_per_node=None)
    text = script(
        job,
        partition=options.partition,
        account=options.account,
        container=container,
        sbatch=sbatch,
        srun=options.srun or [],
    )
    _print(text, job, options.as_json)
    if job.cpus_per_rank is None and not any(s.startswith(("--cpus", "-c")) for s in sbatch):
        print(
            "warning: the script requests no CPU cores, and many clusters give a task one: --cpus-per-rank",
            file=sys.stderr,
        )


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions(BatchOptions):
    """Options of `stretto launch kubernetes`."""

    kind: Annotated[
        str,
        typer.Option(
            metavar="trainjob|jobset|volcano",
            help="Kubeflow's TrainJob, a JobSet, or a Job of the scheduler Volcano.",
        ),
    ] = "trainjob"
    time: Time = None
    requeues: Annotated[int | None, RESTARTS] = None
    gpu_resource: Annotated[str, typer.Option(help="The cluster's name of an accelerator.")] = (
        "nvidia.com/gpu"
    )
    runtime: Annotated[
        str | None,
        typer.Option(help="ClusterTrainingRuntime of a TrainJob; default: torch-distributed."),
    ] = None
    own_runtime: Annotated[
        bool, typer.Option("--own-runtime", help="Add a TrainingRuntime that restarts a TrainJob on code 75.")
    ] = False
    namespace: Annotated[str | None, typer.Option(help="Namespace; default: that of the context.")] = None


@app.command(
    epilog="Example: stretto launch kubernetes configs/quickstart.yaml run.dir=/runs --nodes 2 "
    "--image registry/stretto:1 --mount my-claim:/runs > job.yaml; kubectl apply -f job.yaml"
)
@grouped(KubernetesOptions)
def kubernetes(options: KubernetesOptions) -> None:
    """Print a manifest that trains CONFIG in containers, saves when pods are evicted, and resumes.

    CONFIG is a path in the image too. SOURCE of a mount is a persistent volume claim, or a folder of the node
    (/...).
    """
    from stretto.run.launch.kubernetes import KINDS, RUNTIME, manifest

    check_choice("--kind", options.kind, KINDS)
    train_job = options.kind == "trainjob"
    if not train_job and (options.own_runtime or options.runtime):
        raise StrettoError(
            f"--kind {options.kind} has no runtime", hint="leave --runtime and --own-runtime out"
        )
    if options.own_runtime and options.runtime:
        raise StrettoError("--runtime and --own-runtime exclude each other", hint="leave one of them out")
    if train_job and not options.own_runtime and options.requeues is not None:
        raise StrettoError(
            f"how often a TrainJob is restarted stands in its runtime, {options.runtime or RUNTIME}",
            hint="--own-runtime, or leave --requeues out",
        )
    job = replace(_cluster_job(options, ["/"]), time=options.time)
    if options.requeues is not None:
        job = replace(job, restarts=options.requeues)
    text = manifest(
        job,
        options.kind,
        devices=options.gpu_resource,
        runtime=None if options.own_runtime else options.runtime or RUNTIME,
        namespace=options.namespace,
    )
    _print(text, job, options.as_json)
    _warn_of_lost_runs(job, "a pod that ends")


@dataclass(frozen=True, kw_only=True)
class SkyOptions(BatchOptions):
    """Options of `stretto launch sky`."""

    accelerator: Annotated[
        str | None, typer.Option(help="SkyPilot's name of the accelerators, as H100; needed on GPUs.")
    ] = None
    spot: Annotated[bool, typer.Option("--spot", help="Use spot instances.")] = False
    infra: Annotated[str | None, typer.Option(help="Where to run, as aws/us-east-1 or k8s.")] = None


@app.command(
    epilog="Example: stretto launch sky configs/quickstart.yaml run.dir=/runs --nodes 2 --spot "
    "--setup 'pip install -e .[train]' --mount my-volume:/runs > job.yaml; sky jobs launch job.yaml"
)
@grouped(SkyOptions)
def sky(options: SkyOptions) -> None:
    """Print a SkyPilot task that trains CONFIG; as a managed job it is recovered and resumes.

    CONFIG lies in this folder, which SkyPilot copies. SOURCE of a mount is a volume or a bucket (s3://...).
    """
    from stretto.run.launch.sky import task

    job = _cluster_job(options, ["/"])
    text = task(job, accelerator=options.accelerator, spot=options.spot, infra=options.infra)
    _print(text, job, options.as_json)
    _warn_of_lost_runs(job, "a node that is lost")


@dataclass(frozen=True, kw_only=True)
class RayOptions(RanksOptions):
    """Options of `stretto launch ray`."""

    cpus_per_rank: CpusPerRank = None
    requeues: Annotated[int, RESTARTS] = 100


@app.command(
    epilog="Example: stretto launch ray configs/quickstart.yaml run.dir=/shared/runs --nodes 2 > job.py; "
    "ray job submit --working-dir . -- python job.py"
)
@grouped(RayOptions)
def ray(options: RayOptions) -> None:
    """Print a Python script that trains CONFIG on a Ray cluster, one agent per node, and restarts it.

    CONFIG lies in the folder that `ray job submit` copies. run.dir must be shared by all nodes.
    """
    from stretto.run.launch.ray import script

    job = _cluster_job(options, ["/"])
    job = replace(job, cpus_per_rank=options.cpus_per_rank, restarts=options.requeues)
    _print(script(job), job, options.as_json)
    if not PurePath(job.folder).is_absolute():
        print(
            f"warning: {job.folder} would lie in each node's own copy of this folder: set run.dir",
            file=sys.stderr,
        )


@dataclass(frozen=True, kw_only=True)
class TorchrunOptions(RanksOptions):
    """Options of `stretto launch torchrun`."""

    host: Annotated[
        str | None, typer.Option(help="Name or address of the first node; needed for more than one.")
    ] = None


@app.command(epilog="Example: stretto launch torchrun configs/quickstart.yaml --nodes 2 --host node0")
@grouped(TorchrunOptions)
def torchrun(options: TorchrunOptions) -> None:
    """Print the command that trains CONFIG for each node."""
    from stretto.run.launch.cluster import node_commands

    job = _cluster_job(options)
    _print(node_commands(job, options.host), job, options.as_json)
