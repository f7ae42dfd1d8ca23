"""`stretto verify` for a recommender: prove placements of tables equal to one process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli.output import report, say_no
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stretto.recommender.config.schema import RecommenderConfig
    from stretto.recommender.verify.diagnose import TableVerdict
    from stretto.recommender.verify.job import Proposal
    from stretto.run.verify.every import Impossible


def verify_recommender(
    config: RecommenderConfig,
    layouts: str | None,
    ranks: int | None,
    steps: int | None,
    as_json: bool,
    told: AbstractContextManager[None],
) -> None:
    """Prove and report; exit code 1 where a placement differs.

    Args:
        told: tells a failed rank and a signal.
    """
    from stretto.recommender.config.check import check
    from stretto.recommender.verify import job
    from stretto.run.verify.diagnose import TOLERANCE

    check(config)
    started = time.perf_counter()
    proposal = _proposal(config, layouts, ranks, as_json)
    count = steps or job.STEPS
    with told:
        verdicts = job.verify(proposal, count, quiet=as_json)
    facts: dict[str, Any] = {
        "equal": all(v.equal for v in verdicts),
        "dtype": "float64",
        "tolerance": TOLERANCE,
        "steps": count,
        "seconds": time.perf_counter() - started,
        "impossible": [asdict(one) for one in proposal.impossible],
        "layouts": [_plain({**asdict(v), "equal": v.equal}) for v in verdicts],
    }
    report(facts, as_json, lambda to: _show(to, verdicts, facts, proposal.impossible))
    if not facts["equal"]:
        raise say_no()


def _proposal(config: RecommenderConfig, layouts: str | None, ranks: int | None, quiet: bool) -> Proposal:
    """What is proved."""
    from stretto.recommender.verify.job import Proposal
    from stretto.run.launch.local import check_ranks

    if layouts not in ("all", "product"):
        if ranks is not None:
            raise StrettoError(
                f"--ranks {ranks} goes with --layouts all", hint="give --layouts all, or leave --ranks out"
            )
        return Proposal.own(config, None if layouts is None else Path(layouts), quiet)
    world = ranks or config.layout.ranks
    check_ranks(world)
    return Proposal.every(config, world, whole=layouts == "product")


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: a difference without measure is null."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in facts.items()}


def _show(
    to: Console,
    verdicts: Sequence[TableVerdict],
    facts: Mapping[str, Any],
    impossible: Sequence[Impossible],
) -> None:
    to.print(_table(verdicts, facts["steps"]))
    for v in verdicts:
        if v.diagnosis:
            to.print(f"{v.layout}: {v.diagnosis}", soft_wrap=True, markup=False)
    if impossible:
        to.print("impossible:")
    for one in impossible:
        to.print(f"  {one}", soft_wrap=True, markup=False)
    wrong = sum(not v.equal for v in verdicts)
    cases = f"{len(verdicts)} placements" if len(verdicts) > 1 else "1 placement"
    took = f" in {facts['seconds']:.0f} s" if len(verdicts) > 1 else ""
    to.print(f"{cases}{took}, " + (f"{wrong} DIFFER" if wrong else "all equal to one process"))


def _table(verdicts: Sequence[TableVerdict], steps: int) -> Table:
    from rich.table import Table

    table = Table(title=f"largest relative difference from one process, float64, {steps} steps")
    for name in ("placement", "loss", "gradients", "norm", "rows", "states", "logits", "worst", "equal"):
        table.add_column(name, overflow="fold")
    for v in verdicts:
        errors = (
            v.loss_error,
            v.grad_error,
            v.norm_error,
            v.weight_error,
            v.state_error,
            v.predict_error,
        )
        numbers = ["-" if error is None else f"{error:.1e}" for error in errors]
        equal = "yes" if v.equal else "[bold red]NO"
        table.add_row(v.layout, *numbers, v.worst_weight, equal)
    return table
