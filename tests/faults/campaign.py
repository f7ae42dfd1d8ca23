"""Plants faults in a copy of the sources, one at a time, and runs what must see each.

    python tests/faults/campaign.py [-j N] [--again] [--check] [WORD ...]

--check: run nothing; see in a second whether each quoted line still stands once in its module.
Faults of cuda.yaml take torch's CUDA build: STRETTO_CUDA_PYTHON names the Python of such an environment.
Without it they are listed and not run.
WORD: only faults with one of the words in their room, name, module or test. Results are kept in
`results.json`, so that a campaign that was interrupted goes on where it was; a result is out of date when
the fault, its module, or what must see it has changed. At the end docs/evidence/faults.md is written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from faults import FAULTS, ROOT, Fault, misquotations, problems

sys.path.insert(0, str(ROOT / "tests"))  # as pytest has it
from jobs import write_job

RESULTS, PAGE = Path(__file__).with_name("results.json"), ROOT / "docs" / "evidence" / "faults.md"
BEGIN = "<!-- written by tests/faults/campaign.py; change the faults, not this table -->"
END = "<!-- end of the table -->"
SECONDS = 600  # tests and proofs that hang end themselves before
PROOFS = ("verify",)  # folders of the sources that `verify` consists of
CUDA_PYTHON = "STRETTO_CUDA_PYTHON"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Whether a fault was seen: by what diagnosis of `verify` or error, after how long; and the output."""

    caught: bool
    seconds: float
    named: str = ""
    output: str = ""


def python_of(fault: Fault) -> str | None:
    """The Python that runs the fault's test; None if it takes torch's CUDA build, and none is named."""
    return os.environ.get(CUDA_PYTHON) if fault.room == "cuda" else sys.executable


def run(fault: Fault) -> Seen:
    """Plant the fault in a copy of the sources and run its test or proof on them.

    Raises:
        RuntimeError: the fault cannot be planted, or its test could not be run.
    """
    if reasons := problems(fault):
        raise RuntimeError("\n".join(reasons))
    with tempfile.TemporaryDirectory(prefix="stretto-fault-") as folder:
        sources = Path(folder) / "src"
        # with compiled files, which hold for all modules but the changed one
        shutil.copytree(ROOT / "src", sources, ignore=shutil.ignore_patterns("*.egg-info"))
        file = sources / fault.source
        file.write_text(fault.planted(file.read_text(encoding="utf-8")), encoding="utf-8")
        return _see(fault, sources, Path(folder))


def equal_without(fault: Fault) -> Seen:
    """The fault's proof on the sources as they are, which must say that all is equal."""
    with tempfile.TemporaryDirectory(prefix="stretto-fault-") as folder:
        return _see(fault, ROOT / "src", Path(folder))


def _see(fault: Fault, sources: Path, folder: Path) -> Seen:
    # ranks and commands that a test starts inherit the path, so the fault is on all of them
    pythonpath = os.pathsep.join([str(sources), str(ROOT / "tests"), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": pythonpath, "PYTHONDONTWRITEBYTECODE": "1"}
    started = time.perf_counter()
    process = subprocess.Popen(
        _command(fault, folder),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        process.communicate()
        raise RuntimeError(f"{fault.name}: {fault.seen_by} does not end in {SECONDS} s") from None
    seconds, code = time.perf_counter() - started, process.returncode
    if fault.verify is not None:
        return Seen(caught=code != 0, seconds=seconds, named=_named(out, error), output=out + error[-3000:])
    # 1: the test failed; others: pytest itself did, if not over a module that the fault keeps from loading
    if code not in (0, 1) and "ERROR collecting" not in out:
        raise RuntimeError(f"{fault.name}: {fault.test} could not be run:\n{out}{error}")
    return Seen(caught=code != 0, seconds=seconds, output=out[-3000:])


def _command(fault: Fault, folder: Path) -> list[str]:
    if fault.verify is None:
        test, python = f"tests/{fault.test}", python_of(fault)
        assert python is not None, f"{fault.name} takes torch's CUDA build: set {CUDA_PYTHON}"
        return [python, "-m", "pytest", "-x", "-q", "-m", "", "-p", "no:cacheprovider", test]
    cases = folder / "cases.yaml"
    cases.write_text(yaml.safe_dump([fault.verify]), encoding="utf-8")
    arguments = ["verify", str(write_job(fault.job, folder)), *fault.overrides]
    return [sys.executable, "-m", "stretto.cli.main", *arguments, "--layouts", str(cases), "--json"]


def _named(out: str, error: str) -> str:
    """The diagnosis, or the error that ended the proof."""
    if out.lstrip().startswith("{"):
        found = json.loads(out)
        cases = [*found["layouts"], *found["own_types"]]
        return "; ".join(case["diagnosis"] for case in cases if case["diagnosis"])
    errors = [line for line in error.splitlines() if line.startswith("error: ")]
    return errors[-1] if errors else ""


def key_of(fault: Fault) -> str:
    """Changes when the fault, its module, or what must see it does."""
    files = [ROOT / "src" / fault.source]
    if fault.test is not None:
        files.append(ROOT / "tests" / fault.test.partition("::")[0])
    else:
        folders = [ROOT / "src" / "stretto" / name for name in PROOFS]
        files += sorted(path for folder in folders for path in folder.rglob("*.py"))
    digest = hashlib.sha256(json.dumps(asdict(fault)).encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Results:
    """The latest result of each fault, in a file that is written after every one."""

    def __init__(self, path: Path = RESULTS) -> None:
        self._path, self._lock = path, threading.Lock()

    def _read(self) -> dict[str, dict[str, Any]]:
        return json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}

    def get(self, fault: Fault, key: str | None = None) -> Seen | None:
        """The result of a fault; with a key, if it is up to date."""
        record = self._read().get(fault.name)
        if record is None or (key is not None and record["key"] != key):
            return None
        return Seen(caught=record["caught"], seconds=record["seconds"], named=record["named"])

    def put(self, fault: Fault, key: str, seen: Seen) -> None:
        """Read again what is there, for another campaign may be under way."""
        with self._lock:
            fields = {"caught": seen.caught, "named": seen.named, "seconds": round(seen.seconds, 1)}
            self._write({**self._read(), fault.name: {"key": key, **fields}})

    def forget_others(self, names: Collection[str]) -> None:
        """Drop the results of faults that are no longer there."""
        self._write({name: record for name, record in self._read().items() if name in names})

    def _write(self, every: Mapping[str, Any]) -> None:
        text = json.dumps(dict(sorted(every.items())), indent=1, ensure_ascii=False)
        self._path.write_text(text + "\n", encoding="utf-8")


def table(results: Results) -> str:
    """The faults with their results, as Markdown."""
    rows = [(fault, seen) for fault in FAULTS if (seen := results.get(fault)) is not None]
    caught = sum(seen.caught for _, seen in rows)
    named = sum(bool(seen.named) for fault, seen in rows if fault.verify is not None)
    proofs = sum(fault.verify is not None for fault, _ in rows)
    lines = [
        f"{len(rows)} faults, {caught} caught, {len(rows) - caught} missed; {proofs} of them by",
        f"`stretto verify`, {named} of these with the sentence of the column *named*.",
        "",
        "| room | fault | module | seen by | caught | named | s |",
        "|---|---|---|---|---|---|--:|",
    ]
    for fault, seen in rows:
        verdict = "yes" if seen.caught else f"**no**: {fault.missed}"
        cells = (fault.room, fault.name, f"`{fault.module}`", f"`{fault.seen_by}`", verdict, seen.named)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} | {seen.seconds:.0f} |")
    return "\n".join(lines)


def write_page(results: Results) -> None:
    """Write the table into its page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}", encoding="utf-8")


class Baselines:
    """What proofs say without a fault, each run once: that all is equal."""

    def __init__(self) -> None:
        self._lock, self._of = threading.Lock(), dict[str, Future[Seen]]()

    def check(self, fault: Fault) -> None:
        """Raises RuntimeError if the fault's proof says no without it."""
        with self._lock:
            first = fault.seen_by not in self._of
            future = self._of.setdefault(fault.seen_by, Future())
        if first:
            future.set_result(equal_without(fault))
        if (seen := future.result()).caught:
            raise RuntimeError(f"without a fault, {fault.seen_by} says: {seen.named}\n{seen.output}")


def campaign(faults: Sequence[Fault], workers: int, again: bool) -> int:
    """Run the faults whose results are out of date; return how many were missed that are not known to be."""
    results, baselines, missed = Results(), Baselines(), 0
    due = [(fault, key_of(fault)) for fault in faults]
    due = [(fault, key) for fault, key in due if again or results.get(fault, key) is None]
    for fault in [fault for fault, _ in due if python_of(fault) is None]:
        print(
            f"not run: {fault.name}: it takes torch's CUDA build: set {CUDA_PYTHON} to its Python", flush=True
        )
    due = [(fault, key) for fault, key in due if python_of(fault) is not None]

    def see(fault: Fault) -> Seen:
        if fault.verify is not None:
            baselines.check(fault)
        return run(fault)

    with ThreadPoolExecutor(workers) as pool:
        runs = {pool.submit(see, fault): (fault, key) for fault, key in due}
        for number, done in enumerate(as_completed(runs), 1):
            fault, key = runs[done]
            if done.exception() is not None:
                print(f"[{number}/{len(due)}] COULD NOT BE RUN: {fault.name}\n{done.exception()}", flush=True)
                missed += 1
                continue
            seen, expected_miss = done.result(), fault.missed is not None
            results.put(fault, key, seen)
            missed += not seen.caught and not expected_miss
            verdict = "caught" if seen.caught else ("missed, as is known" if expected_miss else "MISSED")
            where = f"[{number}/{len(due)}] {verdict} in {seen.seconds:.0f} s: {fault.name} ({fault.module})"
            print(f"{where}\n    {seen.named}" if seen.named else where, flush=True)
    results.forget_others({fault.name for fault in FAULTS})
    print(f"{len(faults)} faults, {len(due)} of them run now, {missed} missed")
    write_page(results)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("-j", dest="workers", type=int, default=1, metavar="N", help="faults at a time")
    parser.add_argument("--again", action="store_true", help="also those whose results are up to date")
    parser.add_argument("--check", action="store_true", help="only whether each quoted line stands once")
    options = parser.parse_args()

    def chosen(fault: Fault) -> bool:
        text = f"{fault.room} {fault.name} {fault.module} {fault.seen_by}"
        return not options.words or any(word in text for word in options.words)

    faults = [fault for fault in FAULTS if chosen(fault)]
    if options.check:
        wrong = [problem for fault in faults for problem in misquotations(fault)]
        print("\n".join([*wrong, f"{len(faults)} faults, {len(wrong)} problems"]))
        return 1 if wrong else 0
    return 1 if campaign(faults, options.workers, options.again) else 0


if __name__ == "__main__":
    sys.exit(main())
