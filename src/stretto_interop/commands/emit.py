"""Jobs written for other frameworks and read from them: `--emit` of plan and config, `--from` of predict."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from stretto.cli.interop import TABLES, check_trains_language, check_trains_recommenders
from stretto.cli.output import labelled, show_search
from stretto.errors import StrettoError, nearest, read_text
from stretto.job.job import Job
from stretto.job.presets import find_shape
from stretto.planner.estimate import Estimate, estimate
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.machines.cluster import Cluster
from stretto.planner.search.fixed import fixed
from stretto.planner.search.ranking import TIE, Plan, Ranked
from stretto.planner.search.search import search
from stretto.planner.search.task import SearchTask, unplanned
from stretto.recommender.config.placement import configured_placements
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.planner.place import TablePlan
from stretto.run.config.job import job_of
from stretto.run.config.schema import JobConfig, TrainConfig
from stretto.view.plan_texts import search_text
from stretto_interop.frameworks.fields import PATHS, run_values, values_of
from stretto_interop.frameworks.mapping import ExternalFramework, ForeignJob, emit, read, refusals
from stretto_interop.frameworks.registry import framework
from stretto_interop.torchrec import FusedOptimizer, holds, torchrec_module

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["framework", "holds", "run_values"]  # for the command line, with the functions below

_ROWS = 5  # layouts beside the one that is run today
_INDENT = 10  # columns of a label


def emitted_config(framework: ExternalFramework | None, config: JobConfig, source: Path) -> str:
    """Return a config's job in the framework's format; a recommender's in TorchRec's.

    Args:
        framework: target framework, or None for TorchRec.
        source: path of the config.

    Raises:
        StrettoError: a choice that the framework does not have, or a kind of model.
    """

    if isinstance(config, TrainConfig):
        if framework is None:
            check_trains_language(TABLES)
        else:
            return emit(framework, job_of(config), run_values(config))
    assert isinstance(config, RecommenderConfig)
    check_trains_recommenders(None if framework is None else framework.name)
    tables = config.table_specs()
    placements = configured_placements(config.tables, config.layout, tables)
    if placements is None:
        raise StrettoError(
            "tables.placement is auto: it is planned for the ranks of a run",
            hint=f"stretto plan {source} --emit {TABLES} --cluster ..., or name a placement",
        )
    world = config.layout.ranks
    local = config.layout.ranks_per_node or world
    return torchrec_module(
        tables,
        placements,
        world=world,
        local=local,
        rule=FusedOptimizer.of(config.optim.tables, config.tables.wire, config.train.dtype),
        about=config.run.name,
    )


def emitted_tables(
    model: str, plan: TablePlan, job: RecommenderConfig | None, wire: Sequence[str] | None
) -> str:
    """Return a plan's placement of tables in TorchRec's format.

    Args:
        wire: the type of exchanged values that the search was fixed to, as `--fix` takes it.
    """
    work = plan.job.work
    rule = FusedOptimizer()
    if job is not None:
        rule = FusedOptimizer.of(job.optim.tables, job.tables.wire, job.train.dtype)
    rule = replace(rule, name=work.optimizer, element=work.weight)
    if wire is not None:
        types = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
        rule = replace(rule, wire=types[wire[0]])
    return torchrec_module(
        plan.job.tables if job is None else job.table_specs(),
        plan.placements,
        world=work.ranks,
        local=work.local,
        rule=rule,
        about=f"{model} on {work.ranks} x {work.cluster.device.name}, {work.batch} samples a step\n"
        f"predicted with Stretto: {plan.samples_per_s:,.0f} samples/s",
    )


# ------------------------------------------------------------------ predict


@dataclass(frozen=True, kw_only=True)
class Priced:
    """The cost of a framework's config, and a search for cheaper layouts.

    Attributes:
        overlapped: the same layout with gradients reduced during the backward, or None if they are already.
    """

    framework: ExternalFramework
    reading: ForeignJob
    today: Estimate
    overlapped: Estimate | None
    plan: Plan

    @property
    def faster(self) -> list[Ranked]:
        """The layouts that beat today's by more than a tie, the fastest first."""

        limit = self.today.seconds * (1 - TIE)
        return [item for item in self.plan.ranking if item.estimate.seconds < limit][:_ROWS]


def priced(
    name: str,
    arguments: Sequence[str],
    *,
    model: str | None,
    cluster: str | None,
    seconds: float,
    memory: bool,
) -> Priced:
    """Price the job that a framework's file describes, and search for faster layouts.

    Args:
        arguments: the file's name, or - for standard input, then fields that it lacks, such as layout.tp=2.
        model: replaces the file's.
        seconds: limit of the search.

    Raises:
        StrettoError: no such framework or file, or a text that cannot be read.
    """

    target = framework(name)
    if not arguments or "=" in arguments[0]:
        raise StrettoError(
            f"--from {name} takes a file",
            hint=f"as in stretto predict --from {name} FILE --cluster h100:64; - reads standard input",
        )
    if cluster is None:
        raise StrettoError("--cluster is missing", hint="add --cluster h100:64, or another")
    machine = find_cluster(cluster)
    source = "standard input" if arguments[0] == "-" else arguments[0]
    text = sys.stdin.read() if arguments[0] == "-" else read_text(Path(arguments[0]))
    reading = read(target, text, source, machine.devices, _overrides(model, arguments[1:]))
    machine = machine.sized(reading.job.layout.world)
    with show_search() as progress:
        plan = search(better(target, reading, machine, seconds, 2 * _ROWS), progress)
    return Priced(
        framework=target,
        reading=reading,
        today=price(reading, machine, memory=memory),
        overlapped=overlapped(target, reading, machine),
        plan=plan,
    )


def _overrides(model: str | None, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values that override a file: a model's sizes, and arguments such as layout.tp=2.

    Raises:
        StrettoError: no such model, or an argument that names no choice of a job.
    """

    values: dict[str, Any] = {}
    if model is not None:
        of_model = values_of(Job(shape=find_shape(model))).values
        values = {name: value for name, value in of_model.items() if name.startswith("model.")}
    for word in arguments:
        name, equals, text = word.partition("=")
        if name not in PATHS or not equals:
            closest = nearest(name, PATHS)
            hint = f"did you mean {closest}=...?" if closest else "as in layout.tp=2"
            raise StrettoError(f"{word!r} is no choice of a job", hint=hint)
        values[name] = yaml.safe_load(text)
    return values


def priced_facts(result: Priced) -> dict[str, Any]:
    """Return what was read and what would be faster, as the command's JSON."""
    return {
        "overlapped_s": None if result.overlapped is None else result.overlapped.seconds,
        "ignored": {reason: list(names) for reason, names in result.reading.ignored.items()},
        "remarks": list(result.reading.remarks),
        "faster": [
            {"layout": item.layout, "step_time_s": item.estimate.seconds, "why": item.reason}
            for item in result.faster
        ],
        "complete": result.plan.complete,
    }


def show_priced(to: Console, result: Priced) -> None:
    """Print what the price leaves out, and what would be faster."""

    to.print()
    for remark in result.reading.remarks:
        labelled(to, "note", remark, _INDENT)
    for reason, names in result.reading.ignored.items():
        labelled(to, "ignored", f"{', '.join(names)}: {reason}", _INDENT)
    if result.overlapped is not None:
        change = _change(result.overlapped, result.today)
        labelled(to, "overlap", f"{change} with gradients reduced during the backward", _INDENT)
    labelled(to, "search", f"layouts of {result.framework.title}: {search_text(result.plan)}", _INDENT)
    if not result.faster:
        labelled(to, "", "nothing was found that is faster by more than 1% and fits", _INDENT)
        return
    to.print("what would be faster:")
    for place, item in enumerate(result.faster, 1):
        labelled(to, f"{place:>2}.", f"{_change(item.estimate, result.today)}: {item.layout}", 4)
        labelled(to, "", item.reason, 4)
    best = result.faster[0].estimate
    if best.high > result.today.low:
        text = (
            f"intervals overlap: {best.low:.3g} to {best.high:.3g} s for the first, "
            f"{result.today.low:.3g} to {result.today.high:.3g} s for today's; errors that both share "
            "cancel, but measure before you move"
        )
        labelled(to, "", text, 4)


def _change(result: Estimate, today: Estimate) -> str:
    return f"{result.seconds:.4g} s a step ({100 * (result.seconds / today.seconds - 1):+.1f}%)"


# ------------------------------------------------------------------ what jobs cost there


def price(reading: ForeignJob, cluster: Cluster, *, memory: bool = True) -> Estimate:
    """Estimate time and memory of a job as it was read, on a cluster of its size."""
    return estimate(reading.job, cluster, reading.assumptions, memory=memory)


def overlapped(framework: ExternalFramework, reading: ForeignJob, cluster: Cluster) -> Estimate | None:
    """Estimate the same layout with gradients reduced during the backward; None if they are already."""
    if reading.assumptions.overlap:
        return None
    assumptions = replace(reading.assumptions, overlap=framework.assumptions.overlap)
    return estimate(reading.job, cluster, assumptions)


def better(
    framework: ExternalFramework, reading: ForeignJob, cluster: Cluster, seconds: float, top: int
) -> SearchTask:
    """Return a search for layouts that do the same work on the same cluster in less time.

    Args:
        seconds: limit of the search.
        top: number of layouts.
    """
    plans = fixed(framework.plans)
    return SearchTask(
        job=unplanned(reading.job),  # with what the framework keeps of it
        cluster=cluster,
        assumptions=replace(reading.assumptions, overlap=framework.assumptions.overlap),
        fixed=plans,
        fixed_by=dict.fromkeys(plans, framework.name),
        refusals=lambda item: refusals(framework, item),
        seconds=seconds,
        top=top,
    )
