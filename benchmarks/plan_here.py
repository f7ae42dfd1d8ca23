"""How well layouts are ranked on a calibrated machine: layouts of four ranks predicted, then measured.

    python benchmarks/plan_here.py --runs here.jsonl

calibrates (unless --profile names an existing profile), predicts about fifty legal layouts of the
quickstart's GPT, measures each in interleaved rounds, and prints both with the rank correlation (Spearman)
and the regret: how much slower the layout predicted to be fastest is than the measured fastest. Layouts
already in --runs are not measured again, so an interrupted run can be continued. Run it on a machine that
does nothing else: four ranks on two cores leave no spare capacity.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from harness import where
from plan_here_runs import RANKS, Laid, layouts, measured

from stretto.planner.estimate import estimate
from stretto.planner.machines.catalogue import read_cluster
from stretto.planner.machines.cluster import Cluster
from stretto.planner.machines.describe import save_cluster
from stretto.run.calibrate.profile import calibrate
from stretto.run.config.job import job_of

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"


@dataclass(frozen=True)
class Row:
    """A layout, predicted and measured: seconds per step, and CPU seconds of all ranks per core."""

    name: str
    predicted: float
    measured: float
    cpu: float


def rows(
    layouts: Sequence[Laid], path: Path, cluster: Cluster, out: Path, rounds: int, limit: float
) -> list[Row]:
    """All measured layouts."""
    runs = measured(layouts, path, out, rounds, steps=2, limit=limit)
    results = list[Row]()
    for layout in layouts:
        if layout.name not in runs:
            continue
        config = layout.config(path)
        predicted = estimate(job_of(config), cluster, memory=False).seconds
        times = [run["seconds"] for run in runs[layout.name]]
        cpu = median(run["cpu"] for run in runs[layout.name]) / (cluster.computing or RANKS)
        results.append(Row(layout.name, predicted, median(times), cpu))
    return results


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share a rank."""
    a, b = _ranks(first), _ranks(second)
    middle = (len(a) + 1) / 2
    both = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    alone = [sum((x - middle) ** 2 for x in ranks) for ranks in (a, b)]
    return both / (alone[0] * alone[1]) ** 0.5


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (1 + sum(other == value for other in values)) / 2
        for value in values
    ]


def regret(rows: Sequence[Row]) -> float:
    """Slowdown of the layout predicted to be fastest relative to the measured fastest."""
    best = min(row.measured for row in rows)
    return min(rows, key=lambda row: row.predicted).measured / best - 1


def report(rows: Sequence[Row]) -> str:
    """The table and the scores, as Markdown."""
    lines = ["| layout | predicted, s | measured, s | CPU of all ranks / cores, s | predicted / measured |"]
    lines += ["|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: row.predicted):
        ratio = row.predicted / row.measured
        lines.append(
            f"| {row.name} | {row.predicted:.3f} | {row.measured:.3f} | {row.cpu:.3f} | {ratio:.2f} |"
        )
    predicted, times, cpus = zip(*((row.predicted, row.measured, row.cpu) for row in rows), strict=True)
    errors = [abs(p / m - 1) for p, m in zip(predicted, times, strict=True)]
    lines += [
        "",
        f"{len(rows)} layouts; Spearman {spearman(predicted, times):.3f} "
        f"(with CPU time {spearman(predicted, cpus):.3f}, "
        f"of CPU time with measured {spearman(cpus, times):.3f}); "
        f"regret of the pick {100 * regret(rows):.1f}%; "
        f"error {100 * sum(errors) / len(errors):.1f}% mean, {100 * median(errors):.1f}% median",
        "",
        where(),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("plan_here.jsonl"), help="measured steps; goes on")
    parser.add_argument("--profile", type=Path, default=Path("plan_here.yaml"), help="made if not there")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds; then nothing new")
    parser.add_argument("--only", default="", help="layouts whose name has this in it")
    args = parser.parse_args()
    if not args.profile.exists():
        save_cluster(calibrate(RANKS), args.profile)
    chosen = [layout for layout in layouts(args.config) if args.only in layout.name]
    cluster = read_cluster(args.profile).sized(RANKS)
    print(report(rows(chosen, args.config, cluster, args.runs, args.rounds, args.limit)))


if __name__ == "__main__":
    main()
