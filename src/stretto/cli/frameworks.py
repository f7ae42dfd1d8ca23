"""Jobs for other frameworks and of theirs: `--emit` of plan and config, `--from` of predict."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.output import labelled, watching, write_text
from stretto.errors import StrettoError, nearest, read_text

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.planner.estimate import Estimate
    from stretto.planner.search.ranking import Plan, Ranked
    from stretto.run.config.schema import JobConfig, TrainConfig
    from stretto.run.frameworks.mapping import Framework, Reading

NAMES = ("megatron", "nemo", "torchtitan", "deepspeed")  # of the registry, which help should not import
TABLES = "torchrec"  # for recommenders
_KNOWN = f"{', '.join(NAMES)}; {TABLES} for a recommender"
_ROWS = 5  # layouts beside the one that is run today
_INDENT = 10  # columns of a label

Emit = Annotated[
    str | None,
    typer.Option(metavar="FRAMEWORK", help=f"Print the job as another framework takes it: {_KNOWN}."),
]
Output = Annotated[
    Path | None, typer.Option(metavar="FILE", help="With --emit: write it here instead of printing it.")
]


def framework_named(name: str | None, others: dict[str, object]) -> Framework | None:
    """The framework of `--emit`, if it is given and not one for recommenders.

    Args:
        others: options that are of use with `--emit` only, by name.

    Raises:
        StrettoError: there is none of that name, or one of the other options is given without it.
    """
    if name is None:
        wrong = next((option for option, value in others.items() if value is not None), None)
        if wrong is not None:
            raise StrettoError(f"--{wrong} is for --emit", hint=f"add --emit {NAMES[0]}, or another")
        return None
    if name == TABLES:
        return None
    from stretto.run.frameworks.registry import framework

    return framework(name)


def check_trains_language(name: str | None) -> None:
    """Raise StrettoError where `--emit` names what trains recommenders alone."""
    if name == TABLES:
        raise StrettoError(
            f"{TABLES} is for recommenders, and this is a language model", hint=f"one of {', '.join(NAMES)}"
        )


def check_trains_recommenders(name: str | None) -> None:
    """Raise StrettoError where `--emit` names what trains language models alone."""
    if name not in (None, TABLES):
        raise StrettoError(f"{name} trains no recommenders", hint=f"--emit {TABLES}")


def print_emitted(text: str, output: Path | None) -> None:
    """Print what was emitted, or write it."""
    if output is None:
        print(text, end="")
    else:
        write_text(output, text)


def emitted_config(framework: Framework | None, config: JobConfig, source: Path) -> str:
    """A config's job as the framework takes it; for a recommender as TorchRec does.

    Args:
        framework: None: TorchRec.
        source: of the config.

    Raises:
        StrettoError: a choice that the framework does not have, or a kind of model.
    """
    from stretto.recommender.config.placement import configured_placements
    from stretto.recommender.config.schema import RecommenderConfig
    from stretto.recommender.torchrec import rule_of, torchrec_module
    from stretto.run.config.job import job_of
    from stretto.run.config.schema import TrainConfig
    from stretto.run.frameworks.mapping import emit

    if isinstance(config, TrainConfig):
        if framework is None:
            check_trains_language(TABLES)
        else:
            return emit(framework, job_of(config), config)
    assert isinstance(config, RecommenderConfig)
    check_trains_recommenders(None if framework is None else framework.name)
    tables = config.table_specs()
    placements = configured_placements(config, tables)
    if placements is None:
        raise StrettoError(
            "tables.placement is auto: it is planned for the ranks of a run",
            hint=f"stretto plan {source} --emit {TABLES} --cluster ..., or name a placement",
        )
    world = config.layout.ranks
    local = config.layout.ranks_per_node or world
    return torchrec_module(
        tables, placements, world=world, local=local, rule=rule_of(config), about=config.run.name
    )


# ------------------------------------------------------------------ plan


def emitted_row(framework: Framework, plan: Plan, row: int | None, base: TrainConfig | None) -> str:
    """A layout of a plan as the framework takes it.

    Args:
        row: of the ranking, from 1; None: the first.
        base: the config that was planned.

    Raises:
        StrettoError: there is no such row.
    """
    count = len(plan.ranking)
    if row is not None and row > count:
        raise StrettoError(f"--row is {row}: the plan has {count} rows", hint=f"nearest: --row {count}")
    from stretto.run.frameworks.mapping import emit

    ranked = plan.ranking[(row or 1) - 1]
    estimate = ranked.estimate
    about = (
        f"{ranked.words}\n"
        f"predicted on {estimate.job.layout.world} x {estimate.cluster.device.name}: "
        f"{estimate.seconds:.4g} s a step ({estimate.low:.4g} to {estimate.high:.4g})"
    )
    return emit(framework, estimate.job, base, about)


# ------------------------------------------------------------------ predict


@dataclass(frozen=True, kw_only=True)
class Priced:
    """What a framework's text costs, and a search for what costs less.

    Attributes:
        overlapped: the same layout with gradients reduced during the backward; None: as they are.
    """

    framework: Framework
    reading: Reading
    today: Estimate
    overlapped: Estimate | None
    plan: Plan

    @property
    def faster(self) -> list[Ranked]:
        """Layouts of the framework that take less time than today's by more than a tie, the fastest first."""
        from stretto.planner.search.ranking import TIE

        least = self.today.seconds * (1 - TIE)
        return [one for one in self.plan.ranking if one.estimate.seconds < least][:_ROWS]


def priced(
    name: str, words: Sequence[str], *, model: str | None, cluster: str | None, seconds: float, memory: bool
) -> Priced:
    """Price what a framework's file describes, and search for what would be faster.

    Args:
        words: the file's name, or - for standard input, and choices that it does not say, as in layout.tp=2.
        model: in place of the file's.
        seconds: of the search.

    Raises:
        StrettoError: no such framework or file, or a text that cannot be read.
    """
    from stretto.planner.machines.catalogue import find_cluster
    from stretto.planner.search.search import search
    from stretto.run.frameworks.mapping import read
    from stretto.run.frameworks.prices import better, overlapped, price
    from stretto.run.frameworks.registry import framework

    known = framework(name)
    if not words or "=" in words[0]:
        raise StrettoError(
            f"--from {name} takes a file",
            hint=f"as in stretto predict --from {name} FILE --cluster h100:64; - reads standard input",
        )
    if cluster is None:
        raise StrettoError("--cluster is missing", hint="add --cluster h100:64, or another")
    machine = find_cluster(cluster)
    source = "standard input" if words[0] == "-" else words[0]
    text = sys.stdin.read() if words[0] == "-" else read_text(Path(words[0]))
    reading = read(known, text, source, machine.devices, _beside(model, words[1:]))
    machine = machine.sized(reading.job.layout.world)
    with watching() as progress:
        plan = search(better(known, reading, machine, seconds, 2 * _ROWS), progress)
    return Priced(
        framework=known,
        reading=reading,
        today=price(reading, machine, memory=memory),
        overlapped=overlapped(known, reading, machine),
        plan=plan,
    )


def _beside(model: str | None, words: Sequence[str]) -> dict[str, Any]:
    """Choices that stand beside a file: a model's sizes, and those of words such as layout.tp=2.

    Raises:
        StrettoError: no such model, or a word that names no choice of a job.
    """
    import yaml

    from stretto.run.frameworks.choices import PATHS, choices_of
    from stretto.spec.job import Job
    from stretto.spec.presets import find_shape

    values: dict[str, Any] = {}
    if model is not None:
        of_model = choices_of(Job(shape=find_shape(model))).values
        values = {name: value for name, value in of_model.items() if name.startswith("model.")}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in PATHS or not equals:
            near = nearest(name, PATHS)
            hint = f"did you mean {near}=...?" if near else "as in layout.tp=2"
            raise StrettoError(f"{word!r} is no choice of a job", hint=hint)
        values[name] = yaml.safe_load(text)
    return values


def priced_facts(made: Priced) -> dict[str, Any]:
    """What was read and what would be faster, as the command's JSON."""
    return {
        "overlapped_s": None if made.overlapped is None else made.overlapped.seconds,
        "ignored": {why: list(names) for why, names in made.reading.ignored.items()},
        "remarks": list(made.reading.remarks),
        "faster": [
            {"layout": one.words, "step_time_s": one.estimate.seconds, "why": one.why} for one in made.faster
        ],
        "complete": made.plan.complete,
    }


def show_priced(to: Console, made: Priced) -> None:
    """Print what the price leaves out, and what would be faster."""
    from stretto.view.plan_facts import counts

    to.print()
    for remark in made.reading.remarks:
        labelled(to, "note", remark, _INDENT)
    for why, names in made.reading.ignored.items():
        labelled(to, "ignored", f"{', '.join(names)}: {why}", _INDENT)
    if made.overlapped is not None:
        change = _change(made.overlapped, made.today)
        labelled(to, "overlap", f"{change} with gradients reduced during the backward", _INDENT)
    labelled(to, "search", f"layouts of {made.framework.title}: {counts(made.plan)}", _INDENT)
    if not made.faster:
        labelled(to, "", "nothing was found that is faster by more than 1% and fits", _INDENT)
        return
    to.print("what would be faster:")
    for place, one in enumerate(made.faster, 1):
        labelled(to, f"{place:>2}.", f"{_change(one.estimate, made.today)}: {one.words}", 4)
        labelled(to, "", one.why, 4)
    best = made.faster[0].estimate
    if best.high > made.today.low:
        text = (
            f"intervals overlap: {best.low:.3g} to {best.high:.3g} s for the first, {made.today.low:.3g} to "
            f"{made.today.high:.3g} s for today's; errors that both share cancel, but measure before you move"
        )
        labelled(to, "", text, 4)


def _change(made: Estimate, today: Estimate) -> str:
    return f"{made.seconds:.4g} s a step ({100 * (made.seconds / today.seconds - 1):+.1f}%)"
