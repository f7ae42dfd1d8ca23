"""Compares what this working tree computes and prints with what another commit does, bit by bit.

    python tests/frozen_runs.py REF [NAME ...]

For refactorings, which must not change results. Ten short trainings and some other commands (NAME: only
these) run on the sources of REF, whose results are cached in `runs/frozen/`, and on the working tree. The
tensors of all checkpoints, their metadata, the metrics and the printed lines must be equal; times and paths
are left out.
Bits differ from machine to machine, so the repository stores none.
"""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

ROOT = Path(__file__).parents[1]
SHORT = (
    "train.steps=6 train.device=cpu train.seed=1 checkpoint.every=3 eval.every=3 eval.batches=2 "
    "metrics.every=1 optim.rate.warmup=2 data.cache=../cache"
)
RUNS = {
    "dense": "quickstart.yaml",
    "experts": "moe-tiny.yaml data.source=stretto-sample",
    "tp-sp-cp": "quickstart.yaml layout.dp=1 layout.pp=1 layout.tp=2 layout.cp=2 "
    "layout.sequence_parallel=true model.family=llama optim.name=adamw",
    "zero3-pipeline": "quickstart.yaml dp.mode=zero3 optim.name=adamw recompute.mode=full",
    "asynchronous": "pipedream-2bw.yaml data.source=stretto-sample",
    "encoder-decoder": "t5-tiny.yaml data.source=stretto-sample",
    "lora": "quickstart.yaml lora.rank=4 lora.dropout=0.1 optim.name=adamw",
    "packed-mixture": "quickstart.yaml 'data.source={a.jsonl: 2, b.jsonl: 1}' data.packing=documents "
    "data.vocab=512 layout.pp=1 checkpoint.async_save=true",
    "clicks-rows": "dlrm.yaml tables.placement=row",
    "clicks-copies": "dlrm.yaml tables.placement=data optim.tables.name=lazy_adam optim.clip=1.0",
}
COMMANDS = {
    "config": "config quickstart.yaml",
    "layout": "layout --world 16 --tp 2 --cp 2 --dp 2 --pp 2",
    "memory": "memory llama-1b-64gpu.yaml",
    "plan": "plan --model llama3-8b --cluster h100:16 --sequence 4096 --batch 64",
    "predict": "predict deepseek-v3-2048gpu.yaml --cluster dgx-h100:2048",
    "schedules": "schedule --compare 1f1b,zb-h1,dualpipe --ranks 4 --microbatches 8",
    "verify": "verify quickstart.yaml data.sequence=32",
}
# differ from run to run, or name the machine or the version
VOLATILE = re.compile(
    r"_s$|time|second|tokens_per|mfu|saved|date|memory|rss|stretto|torch|host|path|dir$|wait|crc"
)
TIMES = re.compile(r"predicted|measured|tokens/s|s/step|samples/s|calibrate|finished in| s\b")


def run(command: str, sources: Path, folder: Path) -> Mapping[str, Any]:
    """What a command prints, and the tensors and records that it leaves in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(sources / "src"), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    environment["COLUMNS"] = "160"
    command = re.sub(r"\b([\w.-]+\.yaml)", lambda match: str(sources / "configs" / match[0]), command)
    done = subprocess.run(
        [sys.executable, "-m", "stretto.cli.main", *shlex.split(command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=900,
        check=False,
    )
    if done.returncode > (command.split()[0] != "train"):  # 1: a prediction says no
        sys.exit(f"exit code {done.returncode} on {sources}: stretto {command}\n{done.stdout}{done.stderr}")
    text = f"{done.stdout}{done.stderr}".replace(str(sources), "")
    return {
        "printed": [" ".join(line.split()) for line in text.splitlines() if not TIMES.search(line)],
        "tensors": dict(tensors(folder)),
        "records": dict(records(folder)),
    }


def tensors(folder: Path) -> Iterator[tuple[str, str]]:
    """All stored tensors: file and name, then type, shape and checksum."""
    for path in sorted(folder.glob("**/*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                value = file.get_slice(name)
                data = file.get_tensor(name).tobytes()
                yield (
                    f"{path.relative_to(folder)}: {name}",
                    f"{value.get_dtype()} {value.get_shape()} {zlib.crc32(data)}",
                )


def records(folder: Path) -> Iterator[tuple[str, Any]]:
    """Lines of metrics and files of JSON, without what differs from run to run."""
    for path in sorted([*folder.glob("**/*.jsonl"), *folder.glob("**/m*.json")]):
        if path.name[0] not in "ab":
            lines = path.read_text(encoding="utf-8").splitlines()
            yield str(path.relative_to(folder)), [lasting(json.loads(line)) for line in lines]


def lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: lasting(v)
            for key, v in value.items()
            if key not in ("files", "version", "schema") and not VOLATILE.search(key)
        }
    return [lasting(v) for v in value] if isinstance(value, list) else value


def measure(name: str, sources: Path) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory(prefix="stretto-frozen-") as scratch:
        folder = Path(scratch) / "job"
        folder.mkdir()
        for letter in "ab":
            rows = [{"text": f"{letter} {i} " + f"text {i % 7} of {letter}, " * (i % 40)} for i in range(400)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{letter}.jsonl").write_text(text, encoding="utf-8")
        command = f"train {RUNS[name]} {SHORT} run.dir=runs" if name in RUNS else COMMANDS[name]
        return run(command, sources, folder)


def baseline(name: str, ref: str) -> Mapping[str, Any]:
    """The results of a commit, from `runs/frozen/` if they are there."""
    commit = subprocess.run(
        ["git", "rev-parse", f"{ref}^{{commit}}"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    stored = ROOT / "runs" / "frozen" / commit / f"{name}.json"
    if not stored.exists():
        with tempfile.TemporaryDirectory(prefix="stretto-ref-") as sources:
            archive = ["git", "archive", commit, "src", "configs"]
            packed = subprocess.run(archive, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
            with tarfile.open(fileobj=io.BytesIO(packed)) as file:
                file.extractall(sources, filter="data")
            results = measure(name, Path(sources))
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_text(json.dumps(results), encoding="utf-8")
    return json.loads(stored.read_text(encoding="utf-8"))


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    lines = list[str]()
    for part in before:
        # the order of keys is no result
        texts = [
            json.dumps(results[part], indent=1, ensure_ascii=False, sort_keys=True)
            for results in (before, after)
        ]
        lines += difflib.unified_diff(*(text.splitlines() for text in texts), part, part, n=0, lineterm="")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref", metavar="REF", help="the commit to compare with")
    parser.add_argument("names", metavar="NAME", nargs="*", choices=[[], *RUNS, *COMMANDS])
    options = parser.parse_args()
    changed = 0
    for name in options.names or [*RUNS, *COMMANDS]:
        # as JSON gives it back: lists for tuples
        after = json.loads(json.dumps(measure(name, ROOT)))
        lines = differences(baseline(name, options.ref), after)
        counts = (
            f"{len(after['tensors'])} tensors, {len(after['records'])} files, {len(after['printed'])} lines"
        )
        print(f"{name}: {'DIFFERS' if lines else 'equal'} ({counts})", *lines[:40], sep="\n    ", flush=True)
        changed += bool(lines)
    print(f"{changed} differ from {options.ref}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
