"""`stretto launch`: batch scripts that start a job on a cluster."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import ceil
from typing import Annotated

import typer

from stretto.cli.options import ConfigFile, Json, Overrides, grouped
from stretto.cli.output import command_app
from stretto.cli.report import CommandReport
from stretto.errors import StrettoError

app = command_app()


@app.callback()
def launch() -> None:
    """Print the batch script that starts a job on a cluster."""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """Options of `stretto launch slurm`."""

    config: ConfigFile
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")]
    overrides: Overrides = None
    ranks_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks on each node; default: the layout's ranks over the nodes."),
    ] = None
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Accelerators per node, if Slurm counts them as GPUs; default: one per rank, none on CPUs.",
        ),
    ] = None
    cpus_per_rank: Annotated[int | None, typer.Option(min=1, help="CPU cores to request per rank.")] = None
    partition: Annotated[str | None, typer.Option(help="SLURM partition.")] = None
    account: Annotated[str | None, typer.Option(help="SLURM account.")] = None
    time: Annotated[str | None, typer.Option(help="Time limit, as in 12:00:00.")] = None
    job_name: Annotated[str | None, typer.Option(help="Name of the job; default: the run's.")] = None
    signal_seconds: Annotated[
        int | None,
        typer.Option(min=1, help="Save this long before the limit; default: train.grace_s, else 120."),
    ] = None
    requeues: Annotated[
        int, typer.Option(min=0, help="Most times that the job is requeued; a new submission starts at 0.")
    ] = 100
    port: Annotated[int, typer.Option(help="Port of the rendezvous on the first node.")] = 29400
    sbatch: Annotated[
        list[str] | None, typer.Option(help="A further sbatch option, as --sbatch=--qos=high; repeatable.")
    ] = None
    srun: Annotated[
        list[str] | None, typer.Option(help="A further srun option, as --srun=--cpu-bind=cores; repeatable.")
    ] = None
    setup: Annotated[list[str] | None, typer.Option(help="A shell line to run first; repeatable.")] = None
    as_json: Json = False


@app.command(epilog="Example: stretto launch slurm configs/quickstart.yaml --nodes 2 --time 4:00:00 > job.sh")
@grouped(SlurmOptions)
def slurm(options: SlurmOptions) -> None:
    """Print an sbatch script that trains CONFIG, saves before the time limit, requeues and resumes."""
    from stretto.cli.jobs import check_job, ranks_of
    from stretto.recommender.config.load import load_config
    from stretto.run.config.required import check_required
    from stretto.run.launch.slurm import SlurmJob, script

    overrides = list(options.overrides or [])
    job = load_config(options.config, overrides)
    check_job(job)
    check_required(job)
    world, layout = ranks_of(job)
    nodes, ranks_per_node = options.nodes, _ranks_per_node(options, world, layout)
    gpus, sbatch = options.gpus_per_node, options.sbatch or []
    if gpus is None and not any(option.startswith(("--gpus", "-G", "--gres")) for option in sbatch):
        gpus = 0 if job.train.device == "cpu" else ranks_per_node
    grace_s = job.train.grace_s
    signal_seconds = options.signal_seconds
    if signal_seconds is None:
        signal_seconds = 120 if grace_s is None else ceil(grace_s)
    if grace_s is None:
        overrides.append(f"train.grace_s={signal_seconds}")
    elif grace_s > signal_seconds:
        raise StrettoError(
            f"train.grace_s is {grace_s:g}, and ranks have only --signal-seconds={signal_seconds}",
            hint=f"--signal-seconds {ceil(grace_s)}, or leave it out",
        )
    page = script(
        SlurmJob(
            config=options.config,
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            overrides=overrides,
            job_name=job.run.name if options.job_name is None else options.job_name,
            partition=options.partition,
            account=options.account,
            time=options.time,
            gpus_per_node=gpus,
            cpus_per_rank=options.cpus_per_rank,
            signal_seconds=signal_seconds,
            requeues=options.requeues,
            port=options.port,
            sbatch=sbatch,
            srun=options.srun or [],
            setup=options.setup or [],
        )
    )
    report = CommandReport(
        {
            "script": page,
            "nodes": nodes,
            "ranks_per_node": ranks_per_node,
            "gpus_per_node": gpus,
            "ranks": world,
            "layout": layout,
        }
    )
    report.verbatim(page)
    report.print(options.as_json)
    if not options.as_json and not sys.stdout.isatty():  # the script goes to a file
        devices = "GPUs as --sbatch says" if gpus is None else f"{gpus or 'no'} GPUs per node"
        print(
            f"{nodes} nodes x {ranks_per_node} ranks = {world} ranks ({layout}), {devices}", file=sys.stderr
        )


def _ranks_per_node(options: SlurmOptions, world: int, layout: str) -> int:
    """Ranks on each node, so that nodes x ranks per node is the layout's world."""
    nodes, ranks_per_node = options.nodes, options.ranks_per_node
    if ranks_per_node is None and world % nodes == 0:
        return world // nodes
    if ranks_per_node is not None and ranks_per_node * nodes == world:
        return ranks_per_node
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    nearest = min(divisors, key=lambda n: abs(n - nodes))
    wrong = f"nodes={nodes}"
    if ranks_per_node is not None:
        wrong += f" x ranks_per_node={ranks_per_node} = {nodes * ranks_per_node}"
    raise StrettoError(
        f"{wrong} does not make up layout {layout} with {world} ranks",
        hint=f"use --nodes {nearest} --ranks-per-node {world // nearest}",
    )
