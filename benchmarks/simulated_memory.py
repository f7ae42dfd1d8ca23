"""Claim: the planner's memory of a rank is what torch's allocator holds for it: of 44 jobs at full size, at
least 40 within 1%.

Each job of `simulated_memory.csv` is `stretto dryrun --allocator` in a process of its own, twice: with the
allocator's own segments, and with expandable ones. Needs torch's CUDA build and a C compiler, and no GPU
(docs/evidence/gpu.md).

    python benchmarks/simulated_memory.py [--only gpt2] [--json rows.json]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

_HERE = Path(__file__).parent
GIB = 2**30
TOLERANCE = 0.01
DEFAULTS = """
data: {sequence: 4096, tokenizer: tokenizer.json}
batch: {global_size: 32, micro_size: 1}
train: {dtype: bfloat16, device: cuda, vocab_multiple: 128, compile: "off"}
"""


@dataclass(frozen=True)
class Job:
    """A line of `simulated_memory.csv`: changes to a config of the repository, or to `DEFAULTS`."""

    job: str
    config: str
    rank: str
    device_gib: str
    overrides: str


@dataclass(frozen=True)
class Row:
    """One job: bytes, and reserved over allocated with fixed and with expandable segments."""

    name: str
    predicted: int
    allocated: int
    reserved: float
    expandable: float

    @property
    def error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted / self.allocated - 1

    def __str__(self) -> str:
        sizes = f"{self.predicted / GIB:.2f} | {self.allocated / GIB:.2f}"
        return f"| {self.name} | {sizes} | {self.error:+.2%} | {self.reserved:.2f} | {self.expandable:.2f} |"


def measure(job: Job) -> Row:
    """Run the job with both kinds of segments.

    Raises:
        RuntimeError: the command failed, as where the job does not fit.
    """
    fixed, expandable = (_dry_run(job, settings) for settings in ("", "expandable_segments:True"))
    return Row(
        job.job,
        fixed["predicted_bytes"],
        fixed["allocated_bytes"],
        fixed["reserved_bytes"] / fixed["allocated_bytes"],
        expandable["reserved_bytes"] / expandable["allocated_bytes"],
    )


def _dry_run(job: Job, allocator_settings: str) -> dict[str, int]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(DEFAULTS)
        file.flush()
        config = _HERE.parent / "configs" / f"{job.config}.yaml" if job.config else file.name
        options = ["--rank", job.rank, *(["--device-gib", job.device_gib] if job.device_gib else [])]
        command = [sys.executable, "-m", "stretto.cli.main", "dryrun", str(config), "--allocator", "--json"]
        ran = subprocess.run(
            [*command, *options, *job.overrides.split()],
            env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": allocator_settings},
            capture_output=True,
            text=True,
        )
    if ran.returncode:
        raise RuntimeError(f"{job.job}: {ran.stdout[-500:]}{ran.stderr[-1500:]}")
    return json.loads(ran.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="jobs whose name has this in it")
    parser.add_argument("--json", type=Path, help="results of jobs that need not run again, read and written")
    args = parser.parse_args()
    path: Path | None = args.json
    results = json.loads(path.read_text()) if path is not None and path.exists() else {}
    with (_HERE / "simulated_memory.csv").open(newline="") as file:
        jobs = [Job(**line) for line in csv.DictReader(file)]
    rows = list[Row]()
    for job in jobs:
        if args.only not in job.job:
            continue
        if job.job not in results:
            results[job.job] = asdict(measure(job))
            if path is not None:
                path.write_text(json.dumps(results, indent=1))
        rows.append(Row(**results[job.job]))
        print(rows[-1], flush=True)
    count = sum(abs(row.error) <= TOLERANCE for row in rows)
    error = median(abs(row.error) for row in rows)
    print(f"\n{count} of {len(rows)} within {TOLERANCE:.0%}, the median error {error:.2%}")
    for segments in ("reserved", "expandable"):
        ratios = sorted(getattr(row, segments) for row in rows)
        decile = ratios[int(0.9 * (len(ratios) - 1))]
        print(
            f"{segments}: median {median(ratios):.2f}, nine of ten under {decile:.2f}, most {ratios[-1]:.2f}"
        )


if __name__ == "__main__":
    main()
