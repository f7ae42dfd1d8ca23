"""Claim: one rank of a job of thousands can be run in one process within minutes, and does what the planner
counts: operations and bytes exactly, memory within 3%.

Runs one rank of each layout, without any hardware: the layouts of published papers, and others that cover
the remaining features.

    python benchmarks/dryrun.py [--only gpt3] [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from dataclasses import asdict, dataclass
from typing import Any

from stretto.job.rules import problems
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import one_rank
from stretto.planner.rank_step.counts import counts
from stretto.run.config.job import job_of
from stretto.run.config.schema import TrainConfig
from stretto.run.config.validation import read_section
from stretto.run.dryrun.run import dry_run

SP = {"sequence_parallel": True}
INTERLEAVED = {"name": "interleaved", "chunks": 3}


@dataclass(frozen=True)
class Case:
    """A job and the rank to run."""

    name: str
    rank: int
    sections: dict[str, dict[str, Any]]


def case(name: str, rank: int, preset: str, sequence: int, batch: int, **sections: dict[str, Any]) -> Case:
    """A job in bfloat16 for accelerators."""
    all_sections: dict[str, dict[str, Any]] = {
        "model": {"preset": preset, **sections.pop("model", {})},
        "data": {"sequence": sequence, "tokenizer": "tokenizer.json"},
        "batch": {"global_size": batch, "micro_size": sections.pop("micro", {}).get("size", 1)},
        "train": {"dtype": "bfloat16", "device": "cuda", "vocab_multiple": 128},
        **sections,
    }
    return Case(name, rank, all_sections)


CASES = [
    case(
        *("gpt3 175B, tp8 pp8 dp16, interleaved, selective", 700, "gpt3-175b", 2048, 1024),
        layout={"tp": 8, "pp": 8, "dp": 16, **SP},
        schedule={"name": "interleaved", "chunks": 3},
        recompute={"mode": "selective"},
        dp={"mode": "zero1"},
    ),
    case(
        *("gpt3 175B, tp8 pp16 dp24 (3072 ranks), full", 3071, "gpt3-175b", 2048, 768),
        layout={"tp": 8, "pp": 16, "dp": 24},
        recompute={"mode": "full"},
    ),
    case(
        *("gpt3 175B, tp8 pp8 dp4, zero bubble", 0, "gpt3-175b", 2048, 64),
        layout={"tp": 8, "pp": 8, "dp": 4, **SP},
        schedule={"name": "zb-h1"},
    ),
    case(
        *("llama3 70B, tp8 pp4 dp8, zero2", 100, "llama3.1-70b", 8192, 64),
        layout={"tp": 8, "pp": 4, "dp": 8, **SP},
        dp={"mode": "zero2"},
    ),
    case(
        *("llama3 70B, tp8 cp4 pp4, ring", 60, "llama3.1-70b", 32768, 8),
        model={"positions": 32768},
        layout={"tp": 8, "pp": 4, "cp": 4, **SP},
        recompute={"mode": "full"},
    ),
    case(
        *("llama3 8B, cp4 dp8, ulysses, zero3", 17, "llama3.1-8b", 16384, 16),
        model={"positions": 16384},
        layout={"cp": 4, "dp": 8, "context": "ulysses"},
        dp={"mode": "zero3"},
    ),
    case(
        *("llama3 8B, dp64, zero3 by layers", 63, "llama3.1-8b", 4096, 128),
        layout={"dp": 64},
        dp={"mode": "zero3", "shard_parameters": 8},
        recompute={"mode": "full"},
    ),
    case(
        *("mixtral 8x7B, tp2 ep8 pp4 dp8", 33, "mixtral-8x7b", 4096, 64),
        layout={"tp": 2, "pp": 4, "dp": 8, "ep": 8, "expert_tp": 1, **SP},
        dp={"mode": "zero1"},
    ),
]


@dataclass(frozen=True)
class Row:
    """One case: the planner's error, and the cost of the dry run."""

    name: str
    ranks: int
    flops: int  # of the step
    flops_off: int
    bytes: int
    bytes_off: int
    peak: int  # bytes
    memory_off: float  # of the prediction, relative
    operators: int
    seconds: float
    process_mib: int


def measure(case: Case) -> Row:
    """Run a rank and compare it with the planner's counts."""
    config = read_section(TrainConfig, case.sections)
    job = job_of(config)
    for problem in problems(job):
        raise problem
    ran, predicted = dry_run(job, case.rank), memory_of(job)
    planned = counts(job, case.rank, predicted)
    return Row(
        case.name,
        job.layout.world,
        sum(ran.flops.values()),
        sum(abs(ran.flops.get(key, 0) - planned.flops.get(key, 0)) for key in {*ran.flops, *planned.flops}),
        sum(ran.bytes.values()),
        sum(abs(ran.bytes.get(key, 0) - planned.bytes.get(key, 0)) for key in {*ran.bytes, *planned.bytes}),
        ran.peak,
        one_rank(predicted, ran.coordinates["pp"]).total / ran.peak - 1,
        ran.operators,
        ran.seconds,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = list[Row]()
    for case in CASES:
        if args.only in case.name:
            rows.append(measure(case))
            if not args.json:
                show(rows[-1])
    if args.json:
        json.dump([asdict(row) for row in rows], sys.stdout)


def show(row: Row) -> None:
    """One line of the table."""
    print(
        f"{row.name:50} {row.ranks:5} ranks  {row.flops / 1e12:8.1f} TFLOP, off {row.flops_off}  "
        f"{row.bytes / 2**30:6.1f} GiB communicated, off {row.bytes_off}  {row.peak / 2**30:6.2f} GiB held, "
        f"predicted {row.memory_off:+.2%}  {row.operators:7} operators  {row.seconds:5.1f} s  "
        f"{row.process_mib} MiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
