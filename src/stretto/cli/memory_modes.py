"""`stretto memory --modes`: what each data-parallel mode keeps on a rank."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from stretto.cli.face import report

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from rich.table import Table

    from stretto.layout.shards import Mode
    from stretto.planner.memory.modes import ModeBytes
    from stretto.planner.memory.ranks import MemoryJob
    from stretto.run.config.schema import TrainConfig


def show_modes(config: TrainConfig, as_json: bool) -> None:
    """All modes that are legal on the config's layout, in a table or in JSON.

    Raises:
        StrettoError: the job is not legal in any mode.
    """
    from stretto.planner.memory.modes import compare_modes
    from stretto.run.config.job import job_of, memory_job
    from stretto.spec.data_parallel import MODES
    from stretto.spec.rules import problems

    configs: dict[Mode, TrainConfig] = {mode: _in_mode(config, mode) for mode in MODES}
    wrong = {mode: problems(job_of(one)) for mode, one in configs.items()}
    legal: list[Mode] = [mode for mode in MODES if not wrong[mode]]
    if not legal:
        raise wrong["ddp"][0]

    def job(mode: Mode) -> MemoryJob:
        return memory_job(configs[mode])

    found = compare_modes(legal, job)
    refused: dict[Mode, str] = {}
    for mode in MODES:
        if wrong[mode]:
            refused[mode] = wrong[mode][0].message
    copies, half = job_of(config).copies, job_of(config).precision.half
    facts = {
        "copies": copies,
        "modes": [{**asdict(one), "states": one.states} for one in found],
        "refused": refused,
    }
    report(facts, as_json, lambda to: _show(to, found, refused, copies, half))


def _in_mode(config: TrainConfig, mode: Mode) -> TrainConfig:
    """The config in another mode; of its sizes and moments only its own mode keeps any."""
    from stretto.run.config.states import DataParallelConfig

    dp = config.dp
    if mode == dp.mode:
        return config
    other = DataParallelConfig(mode=mode, offload=dp.offload, path=dp.path)
    return config.model_copy(update={"dp": other})


def _show(
    to: Console, found: Sequence[ModeBytes], refused: Mapping[Mode, str], copies: int, half: bool
) -> None:
    away = [kind for kind in ("host", "disk") if any(getattr(one, kind) for one in found)]
    kinds = ["weights", "gradients", "masters", "optimizer", "states", *away, "peak"]
    table = side_table("mode", *kinds, "ZeRO paper")
    for one in found:
        paper = "" if one.published is None else memory_size(round(one.published))
        table.add_row(one.mode, *(memory_size(getattr(one, kind)) for kind in kinds), paper)
    to.print(table, soft_wrap=True)
    ranks = f"{copies} ranks have" if copies > 1 else "one rank has"
    to.print(f"on the fullest rank; {ranks} the same parameters", soft_wrap=True)
    count = "the paper counts 2 + 2 + 12 bytes a parameter: weights and gradients of 16 bits, AdamW in 32"
    to.print(count + ("" if half else "; here weights have more"), soft_wrap=True)
    for mode, why in refused.items():
        to.print(f"{mode}: {why}", soft_wrap=True)


def side_table(first: str, *others: str) -> Table:
    """A table of a name and numbers beside it."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="left" if name == "formula" else "right", no_wrap=True)
    return table


def memory_size(number: int) -> str:
    """Such as 850 B, 12.3 KiB, 1.25 GiB."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 1000 * size else f"{number / size:.0f} {unit}"
    return f"{number} B"
