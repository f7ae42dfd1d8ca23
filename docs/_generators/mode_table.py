"""The table of docs/reference/data-parallel.md: modes, schedules and offload that can be combined.

python docs/_generators/mode_table.py docs/reference/data-parallel.md    # write it into the page
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.job.data_parallel import MODES
from stretto.job.job import Job
from stretto.job.rules import problems
from stretto.program import names
from stretto.run.config.load import parse
from stretto.verify.language.cases import configured_job, quick, vary

_JOB = """
model: {family: gpt, layers: 14, hidden: 64, heads: 4, tied: false}
batch: {global_size: 16, micro_size: 2}
dp: {path: .}
"""
_PLACES: tuple[dict[str, Any], ...] = ({}, {"offload": "cpu"}, {"offload": "nvme"})
START, END = "<!-- table of modes: docs/_generators/mode_table.py -->", "<!-- end of the table -->"


def matrix() -> str:
    """The table, as Markdown; schedules with equal cells share a row."""
    job, reasons = configured_job(parse(_JOB)), list[str]()
    rows = dict[str, list[str]]()
    for name in _trained(job):
        cells = " | ".join(_cell(job, name, mode, reasons) for mode in MODES)
        rows.setdefault(cells, []).append(f"`{name}`")
    lines = [f"| schedule | {' | '.join(MODES)} |", "|---" * (len(MODES) + 1) + "|"]
    lines += [f"| {', '.join(schedules)} | {cells} |" for cells, schedules in rows.items()]
    notes = [
        textwrap.fill(f"{number}. {reason}", width=100, subsequent_indent="   ", break_on_hyphens=False)
        for number, reason in enumerate(reasons, 1)
    ]
    return "\n".join([*lines, *(("", *notes) if notes else ())])


def write(page: Path) -> None:
    """Put the table between its marks on a page."""
    before, _, tail = page.read_text(encoding="utf-8").partition(START)
    after = tail.partition(END)[2]
    page.write_text(f"{before}{START}\n\n{matrix()}\n\n{END}{after}", encoding="utf-8")


def _trained(job: Job) -> Iterator[str]:
    """Schedules that train."""
    for name in names():
        if _scheduled(job, name).program().trains:
            yield name


def _scheduled(job: Job, name: str) -> Job:
    return vary(job, dp=2, pp=2, schedule=name, options=quick(name))


def _cell(job: Job, name: str, mode: Any, reasons: list[str]) -> str:
    """What of the places is legal; what is not, by the number of its reason."""
    base = vary(_scheduled(job, name), mode=mode)
    tried = [(place.get("offload", "device"), place) for place in _PLACES]
    if mode == "zero3":
        tried.append(("parameters", {"offload": "nvme", "offload_parameters": "nvme"}))
    works, wrong = list[str](), list[str]()
    for word, place in tried:
        broken = problems(vary(base, **place))
        if not broken:
            works.append(word)
            continue
        reason = broken[0].rule.replace(f"schedule {name} ", "such a schedule ")
        if reason not in reasons:
            reasons.append(reason)
        if (number := f"[{reasons.index(reason) + 1}]") not in wrong:
            wrong.append(number)
    return " ".join([", ".join(works), *wrong]).strip()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
