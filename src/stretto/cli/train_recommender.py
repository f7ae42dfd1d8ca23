"""What `stretto train` says when a recommender's run has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from stretto.config.recommender.schema import RecommenderConfig

_QUALITY = ("auc", "logloss", "entropy", "best_entropy", "best_auc", "calibration")


def facts(config: RecommenderConfig, outcome: dict[str, Any]) -> dict[str, Any]:
    """What `--json` prints of the run; None for what was not measured."""
    quality: dict[str, Any] = outcome.get("quality") or {}
    return {
        "steps": outcome.get("step"),
        "loss": outcome.get("loss"),
        "samples_per_s": outcome.get("samples_per_s"),
        **{name: quality.get(name) for name in _QUALITY},
        "run_dir": str(config.run.folder),
        "placement": outcome.get("placement"),
    }


def tell(config: RecommenderConfig, outcome: dict[str, Any], path: str, out: TextIO) -> None:
    """Speed and quality, the placement table, the run's folder, and commands that work with it."""
    from stretto.train.recommender.records import ClickEval, quality_text

    speed, quality = outcome.get("samples_per_s"), outcome.get("quality")
    print(file=out)
    print(f"{outcome['placement_text']}\n", file=out)
    if speed is not None:
        print(f"speed: {speed:,.0f} samples/s (median of the last steps)", file=out)
    if quality is not None:
        told = quality_text(ClickEval(**quality))
        print(f"on {quality['samples']:,} held-out samples: {told}", file=out)
    folder, first = config.run.folder, outcome["checkpoint"]
    table = next(iter(outcome.get("placement") or {"C1": None}))
    rows = [
        (f"stretto verify {path} --layouts all", "prove every placement equal to one process"),
        (f"stretto train {path} {_other(config)}", "the same with other placements or ranks"),
        (f"stretto checkpoint export {first} --table {table} --out {table}.npy", "one table as an array"),
    ]
    width = max(len(command) for command, _ in rows)
    held = "config.yaml, placement.yaml, metrics.jsonl, eval.jsonl, checkpoints/"
    print(f"run folder: {folder}  ({held})\nnext:", file=out)
    for command, what in rows:
        print(f"  {command:{width}}  # {what}", file=out)


def _other(config: RecommenderConfig) -> str:
    """Another placement than the run's."""
    return "tables.placement=column" if config.tables.placement == "row" else "tables.placement=row"
