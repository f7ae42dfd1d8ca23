"""The campaign for one GPU: every measurement, a step at a time, each leaving JSON.

    python benchmarks/gpu/campaign.py --seconds 570          # as many steps as fit; again: the rest
    python benchmarks/gpu/campaign.py --only llama-1b waits   # these, done before or not
    python benchmarks/gpu/campaign.py --list                  # what there is, and what is done
    python benchmarks/gpu/campaign.py --report > docs/evidence/gpu-campaign.md  # the page made of the results
    python benchmarks/gpu/campaign.py --rehearse              # tiny, on a CPU: shows that all of it runs
    python benchmarks/gpu/campaign.py --rehearse simulated    # in full size, on a GPU that computes nothing

A step is a process of its own with nine minutes at most, and writes OUT/STEP.json with its result, or with
the traceback of its failure and what it had by then; then the next begins. Steps that are done are not done
again; those that failed come after those that were never tried. Nothing but Stretto, torch and, for one step,
the tests' packages is needed, and no network.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
if not any((Path(p) / "stretto").is_dir() for p in sys.path if p):
    sys.path.insert(0, str(HERE.parents[1] / "src"))  # not installed: the sources beside this folder

from gpu.steps import BY_NAME, LIMIT, STEPS, Step  # noqa: E402

DONE, FAILED, STOPPED = "done", "failed", "stopped"
RESULTS = HERE / "results"
CPU, SIMULATED = "cpu", "simulated"  # where a rehearsal runs
SIMULATED_BYTES = 141 * 10**9  # of a GPU: an H200's
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # models that nearly fill the device


def read(folder: Path, step: Step) -> dict[str, Any] | None:
    """What is there of a step; None if nothing or half a file is."""
    try:
        return json.loads((folder / f"{step.name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write(folder: Path, step: Step, record: dict[str, Any]) -> None:
    """Whole or not at all."""
    path = folder / f"{step.name}.json"
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def to_do(folder: Path, only: Sequence[str]) -> list[Step]:
    """The steps to take: those named; else all that are not done, those that failed last."""
    if only:
        return [step for step in STEPS if step.name in only]
    known = {step.name: read(folder, step) for step in STEPS}
    never = [step for step in STEPS if known[step.name] is None]
    return never + [s for s in STEPS if (one := known[s.name]) is not None and one["state"] != DONE]


def do(step: Step, folder: Path, device: str, rehearsal: str | None) -> dict[str, Any]:
    """One step in this process; its record, which is written too."""
    import torch

    from gpu.setting import Setting
    from stretto.engine import compiler

    setting = Setting(
        torch.device(device, 0) if device != CPU else torch.device(device),
        rehearsal == CPU,
        folder,
        step.name,
        simulated=rehearsal == SIMULATED,
    )
    compiler.BACKEND = setting.compiler
    started = time.perf_counter()
    record: dict[str, Any] = {"step": step.name, "title": step.title, **where(device, rehearsal)}
    try:
        with setting.choices():
            record |= {"state": DONE, "result": step.run(setting)}
    except BaseException as error:
        record |= {"state": FAILED, "error": traceback.format_exc(), "result": left(setting.partial)}
        if not isinstance(error, Exception):
            write(folder, step, record)
            raise
    record["seconds"] = time.perf_counter() - started
    write(folder, step, record)
    setting.partial.unlink(missing_ok=True)
    return record


def left(partial: Path) -> Any:
    """What a step had when it ended early."""
    try:
        return json.loads(partial.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def where(device: str, rehearsal: str | None) -> dict[str, Any]:
    """Date, commit, device and torch, for the record."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else device
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": name,
        "torch": torch.__version__,
        "tiny": rehearsal is not None,
    }


def commit() -> str | None:
    """Of the sources; where there is no git, what STRETTO_COMMIT says."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("STRETTO_COMMIT")
    return done.stdout.strip()


def apart(step: Step, folder: Path, device: str, rehearsal: str | None, limit: float) -> dict[str, Any]:
    """One step in a process of its own, so that nothing of it, a crash among the rest, meets the next."""
    command = [sys.executable, __file__, "--step", step.name, "--out", str(folder), "--device", device]
    started, before = time.perf_counter(), time.time()
    process = subprocess.Popen(
        [*command, *(["--rehearse", rehearsal] if rehearsal else [])],
        env={**ALLOCATOR, **os.environ},
        start_new_session=True,
    )
    try:
        code = process.wait(timeout=limit)
        error = f"the process ended with code {code}"
    except subprocess.TimeoutExpired:
        code, error = None, f"stopped after {limit:.0f} s"
    finally:
        end_all(process)
    record, path = read(folder, step), folder / f"{step.name}.json"
    if record is None or path.stat().st_mtime < before - 1:  # none of this process
        record = {"step": step.name, "title": step.title, **bare(rehearsal), "error": error}
        record |= {
            "state": STOPPED if code is None else FAILED,
            "result": left(folder / f"{step.name}.partial"),
        }
        record["seconds"] = time.perf_counter() - started
        write(folder, step, record)
    return record


def end_all(process: subprocess.Popen[bytes]) -> None:
    """End a step's process and the ranks that it has started: they are a session of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def bare(rehearsal: str | None) -> dict[str, Any]:
    """As `where`, without asking the device, which may have been what failed."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "time": now,
        "commit": commit(),
        "device": None,
        "torch": None,
        "tiny": rehearsal is not None,
    }


def campaign(
    folder: Path, steps: Sequence[Step], device: str, rehearsal: str | None, seconds: float
) -> list[dict[str, Any]]:
    """All steps that fit into the time, and a line on each."""
    folder.mkdir(parents=True, exist_ok=True)
    ends, records = time.monotonic() + seconds, list[dict[str, Any]]()
    for step in steps:
        remaining = ends - time.monotonic()
        unseen = f"not rehearsed: {step.unrehearsed}" if rehearsal == SIMULATED and step.unrehearsed else ""
        if unseen and not step.rehearsed:
            print(f"{step.name}: {unseen}", flush=True)
            continue
        if rehearsal is None and remaining < step.seconds:
            print(f"{step.name}: needs about {step.seconds:.0f} s, {remaining:.0f} are left", flush=True)
            continue
        # a rehearsal shares its CPU with whatever else runs there
        limit = 4 * LIMIT if rehearsal == CPU else LIMIT
        record = apart(step, folder, device, rehearsal, min(limit, remaining))
        records.append(record)
        last = "" if record["state"] == DONE else f": {record['error'].strip().splitlines()[-1]}"
        last += f"; {unseen}" if unseen else ""
        print(
            f"{step.name}: {record['state']} in {record['seconds']:.0f} s{last}{counted(record)}", flush=True
        )
    return records


def counted(record: dict[str, Any]) -> str:
    """How many of a step's rows are without an error, for its line; "" if it has no rows."""
    rows = (record["result"] or {}).get("rows", [])
    each = list(rows.values()) if isinstance(rows, dict) else rows
    failed = sum(1 for row in each if isinstance(row.get("error"), str) or row.get("right") is False)
    return f"; {len(each) - failed} of {len(each)} rows" if each else ""


def show(folder: Path) -> None:
    """A line for each step."""
    for step in STEPS:
        record = read(folder, step)
        state = "not run yet" if record is None else f"{record['state']}, {record['time']}"
        print(f"{step.name:<15} {step.title:<55} about {step.seconds:>3.0f} s  {state}")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=list(BY_NAME), default=[])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no step that would end later"
    )
    parser.add_argument(
        "--rehearse",
        nargs="?",
        const=CPU,
        choices=[CPU, SIMULATED],
        help="tiny sizes, on the CPU; or full ones on a simulated GPU, with torch's CUDA build",
    )
    parser.add_argument("--list", action="store_true", help="what there is, and what is done")
    parser.add_argument("--report", action="store_true", help="print the page made of the results")
    parser.add_argument("--step", choices=list(BY_NAME), help=argparse.SUPPRESS)  # in this process
    args = parser.parse_args(words)
    device = CPU if args.rehearse == CPU else args.device
    if args.list:
        show(args.out)
        return 0
    if args.report:
        from gpu.report import page

        print(page({step.name: read(args.out, step) for step in STEPS}), end="")
        return 0
    if args.step:
        args.out.mkdir(parents=True, exist_ok=True)
        return int(do(BY_NAME[args.step], args.out, device, args.rehearse)["state"] != DONE)
    with tempfile.TemporaryDirectory(prefix="stretto-") as libraries:
        if args.rehearse == SIMULATED:
            from stretto.run.dryrun.simulated_gpu import preloaded

            os.environ |= preloaded(Path(libraries), device_bytes=SIMULATED_BYTES)
        records = campaign(args.out, to_do(args.out, args.only), device, args.rehearse, args.seconds)
    return int(any(record["state"] != DONE for record in records))


if __name__ == "__main__":
    sys.exit(main())
