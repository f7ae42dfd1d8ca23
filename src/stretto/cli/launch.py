"""`stretto launch`: batch scripts that start a job on a cluster."""

from __future__ import annotations

import sys
from math import ceil
from typing import Annotated

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app, report
from stretto.errors import StrettoError

app = command_app()


@app.callback()
def launch() -> None:
    """Print the batch script that starts a job on a cluster."""


@app.command(epilog="Example: stretto launch slurm configs/quickstart.yaml --nodes 2 --time 4:00:00 > job.sh")
def slurm(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A YAML file, as `stretto train` takes it.")
    ],
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="Fields to override.")
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks on each node; default: the layout's ranks over the nodes."),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Accelerators per node, if Slurm counts them as GPUs; default: one per rank, none on CPUs.",
        ),
    ] = None,
    cpus_per_rank: Annotated[int | None, typer.Option(min=1, help="CPU cores to request per rank.")] = None,
    partition: Annotated[str | None, typer.Option(help="SLURM partition.")] = None,
    account: Annotated[str | None, typer.Option(help="SLURM account.")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, as in 12:00:00.")] = None,
    job_name: Annotated[str | None, typer.Option(help="Name of the job; default: the run's.")] = None,
    signal_seconds: Annotated[
        int | None,
        typer.Option(min=1, help="Save this long before the limit; default: train.grace_s, else 120."),
    ] = None,
    requeues: Annotated[
        int, typer.Option(min=0, help="Most times that the job is requeued; a new submission starts at 0.")
    ] = 100,
    port: Annotated[int, typer.Option(help="Port of the rendezvous on the first node.")] = 29400,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="A further sbatch option, as --sbatch=--qos=high; repeatable.")
    ] = None,
    srun: Annotated[
        list[str] | None, typer.Option(help="A further srun option, as --srun=--cpu-bind=cores; repeatable.")
    ] = None,
    setup: Annotated[list[str] | None, typer.Option(help="A shell line to run first; repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Print an sbatch script that trains CONFIG, saves before the time limit, requeues and resumes."""
    from stretto.cli.jobs import check_job, ranks_of
    from stretto.recommender.config.load import load_config
    from stretto.run.config.required import check_required
    from stretto.run.launch.slurm import SlurmJob, script

    job = load_config(config, overrides or [])
    check_job(job)
    check_required(job)
    world, layout = ranks_of(job)
    each = _ranks_per_node(world, layout, nodes, ranks_per_node)
    gpus = gpus_per_node
    if gpus is None and not any(option.startswith(("--gpus", "-G", "--gres")) for option in sbatch or []):
        gpus = 0 if job.train.device == "cpu" else each
    words = list(overrides or [])
    if signal_seconds is None:
        signal_seconds = 120 if job.train.grace_s is None else ceil(job.train.grace_s)
    if job.train.grace_s is None:
        words.append(f"train.grace_s={signal_seconds}")
    elif job.train.grace_s > signal_seconds:
        raise StrettoError(
            f"train.grace_s is {job.train.grace_s:g}, and ranks have only --signal-seconds={signal_seconds}",
            hint=f"--signal-seconds {ceil(job.train.grace_s)}, or leave it out",
        )
    text = script(
        SlurmJob(
            config=config,
            nodes=nodes,
            ranks_per_node=each,
            overrides=words,
            job_name=job.run.name if job_name is None else job_name,
            partition=partition,
            account=account,
            time=time,
            gpus_per_node=gpus,
            cpus_per_rank=cpus_per_rank,
            signal_seconds=signal_seconds,
            requeues=requeues,
            port=port,
            sbatch=sbatch or [],
            srun=srun or [],
            setup=setup or [],
        )
    )
    facts = {
        "script": text,
        "nodes": nodes,
        "ranks_per_node": each,
        "gpus_per_node": gpus,
        "ranks": world,
        "layout": layout,
    }
    report(facts, as_json, lambda _: print(text, end=""))
    if not as_json and not sys.stdout.isatty():  # the script goes to a file
        print(_sizes(nodes, each, gpus, layout), file=sys.stderr)


def _sizes(nodes: int, ranks_per_node: int, gpus_per_node: int | None, layout: str) -> str:
    """What the job requests, such as "2 nodes x 4 ranks = 8 ranks (tp=2 dp=4), 4 GPUs per node"."""
    gpus = "GPUs as --sbatch says" if gpus_per_node is None else f"{gpus_per_node or 'no'} GPUs per node"
    return f"{nodes} nodes x {ranks_per_node} ranks = {nodes * ranks_per_node} ranks ({layout}), {gpus}"


def _ranks_per_node(world: int, layout: str, nodes: int, ranks_per_node: int | None) -> int:
    """Ranks on each node, so that nodes x ranks per node is the layout's world."""
    if ranks_per_node is None and world % nodes == 0:
        return world // nodes
    if ranks_per_node is not None and ranks_per_node * nodes == world:
        return ranks_per_node
    legal = [n for n in range(1, world + 1) if world % n == 0]
    near = min(legal, key=lambda n: abs(n - nodes))
    wrong = (
        f"nodes={nodes}"
        if ranks_per_node is None
        else f"nodes={nodes} x ranks_per_node={ranks_per_node} = {nodes * ranks_per_node}"
    )
    raise StrettoError(
        f"{wrong} does not make up layout {layout} with {world} ranks",
        hint=f"use --nodes {near} --ranks-per-node {world // near}",
    )
