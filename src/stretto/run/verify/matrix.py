"""Which data-parallel modes go with which schedules and offload, as the rules have it; for the documentation.

python -m stretto.run.verify.matrix > docs/modes.md
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stretto.program import names
from stretto.run.config.load import parse
from stretto.run.verify.cases import configured_job, quick, vary
from stretto.spec.data_parallel import MODES
from stretto.spec.job import Job
from stretto.spec.rules import problems

_JOB = """
model: {family: gpt, layers: 14, hidden: 64, heads: 4, tied: false}
batch: {global_size: 16, micro_size: 2}
dp: {path: .}
"""
_PLACES: tuple[dict[str, Any], ...] = ({}, {"offload": "cpu"}, {"offload": "nvme"})
_HEAD = """# Modes, schedules and offload

What runs, as the rules of a job have it, on 2 pipeline x 2 data-parallel ranks; `stretto verify CONFIG
--layouts all` proves each mode with each schedule, and each place of the states with each of both, on the
ranks that it is given. This page is made by `python -m stretto.run.verify.matrix`, and a test keeps it true.
What the modes are: [data-parallel.md](data-parallel.md).

A cell names the places of optimiser states that the pair runs with: on the `device`, in host memory (`cpu`),
in files (`nvme`); with zero3 also `parameters`, whose shards may lie in host memory or files.

"""


def matrix() -> str:
    """The page, as Markdown."""
    job, reasons = configured_job(parse(_JOB)), list[str]()
    lines = [f"| schedule | {' | '.join(MODES)} |", "|---" * (len(MODES) + 1) + "|"]
    for name in _trained(job):
        cells = [_cell(job, name, mode, reasons) for mode in MODES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    more = ["", "Why not:", "", *notes] if notes else []
    return _HEAD + "\n".join([*lines, *more]) + "\n"


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
        reason = broken[0].rule.replace(f"schedule {name} ", "a schedule such as this ")
        if reason not in reasons:
            reasons.append(reason)
        if (number := f"[{reasons.index(reason) + 1}]") not in wrong:
            wrong.append(number)
    return " ".join([", ".join(works), *wrong]).strip()


if __name__ == "__main__":
    print(matrix(), end="")
