"""The runs of a folder as answers: state, curves that grow while they train, configs, stop and resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from threading import Event
from typing import Any, cast

from stretto.engine.checkpoint.folder import checkpoints, step_of
from stretto.errors import StrettoError
from stretto.run.launch.lease import LEASE, STALE_S, is_running, local_launcher, read_lease, this_machine
from stretto.run.launch.progress import newest
from stretto.view.colours import GROUPS, hexed
from stretto.web.answers import Answer, Question, Questions
from stretto.web.folder import CONFIG, EVALUATIONS, MOST_FOLDERS, STEPS, StudioFolder
from stretto.web.jobs import StudioJobs, config_arguments
from stretto.web.traces import trace_answer

_LOOK_S = 0.3  # between two looks at the files
_SEARCH_S = 2.0  # between two searches for new runs
_MOST_POINTS = 1_500  # of a curve; longer ones show means
_MOST_SELECTED = len(GROUPS)  # runs in one plot, a colour each
_MOST_LINES = 200  # of a job's output on the page
_RANK = "memory/{}_gib/rank_"

# plots of steps: the title, its unit, and the names that records of language models and recommenders have
_PLOTS = (
    ("loss", "nats", ("loss",)),
    ("learning rate", "", ("lr",)),
    ("learning rate of the tables", "", ("lr_tables",)),
    ("gradient norm", "", ("grad_norm",)),
    ("tokens per second", "1/s", ("tokens_per_s",)),
    ("samples per second", "1/s", ("samples_per_s",)),
    ("time of a step", "s", ("step_time_s",)),
)
_EVALUATED = (("AUC", "", "auc"), ("log loss", "nats", "logloss"), ("normalised entropy", "", "entropy"))

Points = tuple[list[float], list[float | None]]  # steps, values


class GrowingRecords:
    """The records of a file to which a run appends lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file, self._read = (0, 0), 0
        self._unended = b""  # the line that is being written
        self.records = list[dict[str, Any]]()

    def look(self) -> bool:
        """Read what the file has in addition, or all of it if it was rewritten; return whether it changed."""
        if not self._path.is_file():  # a pipe would never end
            return False
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                rewritten = (status.st_dev, status.st_ino) != self._file or status.st_size < self._read
                if rewritten:
                    self._file, self._read = (status.st_dev, status.st_ino), 0
                    self._unended, self.records = b"", []
                file.seek(self._read)
                content = file.read()
        except OSError:
            return False
        self._read += len(content)
        *lines, self._unended = (self._unended + content).split(b"\n")
        for line in lines:
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict) and isinstance(record.get("step"), int):
                    self.records.append(record)
        return rewritten or bool(lines)

    def points(self, name: str) -> Points:
        """Return the finite values of a name by step, and None in place of others; long curves as means."""
        rows = [(row["step"], _number(row[name])) for row in self.records if row.get(name) is not None]
        each = -(-len(rows) // _MOST_POINTS)
        steps, values = list[float](), list[float | None]()
        for first in range(0, len(rows), each or 1):
            part = rows[first : first + each]
            numbers = [value for _, value in part if value is not None]
            steps.append(part[-1][0])
            values.append(sum(numbers) / len(numbers) if len(numbers) == len(part) else None)
        return steps, values


def _number(value: Any) -> float | None:
    """Return a finite number; None for NaN and infinity, which the records have as texts."""
    return float(value) if isinstance(value, int | float) and isfinite(value) else None


class Runs:
    """The questions about the runs of a folder.

    Args:
        ended: set when the studio ends.
    """

    def __init__(self, folder: StudioFolder, jobs: StudioJobs, ended: Event) -> None:
        self._folder, self._jobs = folder, jobs
        self._ended = ended
        self.questions: Questions = {
            "runs": self.watch,
            "run-config": self.config,
            "run-trace": lambda question: trace_answer(folder, question),
            "run-hang": self.hang,
            "run-start": self.start,
            "run-stop": self.stop,
            "run-resume": self.resume,
            "configs": lambda _: {"configs": folder.configs()},
        }

    def watch(self, question: Question) -> Iterator[Answer | None]:
        """Yield all runs, the curves of the selected ones and the output of trainings whenever they change,
        and None in between. Ends with the studio.
        """
        selected = [self._folder.path(name) for name in question.get("selected", [])][:_MOST_SELECTED]
        files = dict[Path, list[GrowingRecords]]()
        paths, searched = list[Path](), 0.0
        cut_short = False
        curves, last = list[dict[str, Any]](), ""
        while not self._ended.is_set():
            if time.monotonic() - searched > _SEARCH_S:
                paths, searched = self._folder.runs(), time.monotonic()
                cut_short = self._folder.cut_short
            for run in selected:  # one that an address names may not be there yet
                if run not in files and self._folder.is_run(run):
                    names = (STEPS, EVALUATIONS)
                    files[run] = [GrowingRecords(self._folder.path(run / name)) for name in names]
            grown = [file.look() for pair in files.values() for file in pair]
            if any(grown) or not last:
                curves = _plots({self._folder.name(run): pair for run, pair in files.items()})
            trainings = [job.record(_MOST_LINES) for job in self._jobs if job.kind == "train"]
            longest = max((len(file.records) for pair in files.values() for file in pair), default=0)
            answer = {
                "runs": [self._summary(path) for path in paths],
                "jobs": trainings,
                "most_folders": MOST_FOLDERS if cut_short else None,
                "steps_of_a_point": -(-longest // _MOST_POINTS),
            }
            state = json.dumps(answer)
            if any(grown) or state != last:
                last = state
                yield {**answer, "plots": curves}
            else:
                yield None
            self._ended.wait(_LOOK_S)

    def _summary(self, run: Path) -> dict[str, Any]:
        """Return what a list of runs shows of one."""
        config, record = self._folder.config(run / CONFIG), newest(self._folder.path(run / STEPS)) or {}
        steps = _within(config, "train", "steps")
        step = record.get("step", 0)
        holder, job = read_lease(run), None
        training = False
        if holder is not None and holder.machine == this_machine():
            training = is_running(holder.process)
            job = next((each.number for each in self._jobs if each.process.pid == holder.process), None)
        elif holder is not None:
            with suppress(OSError):
                training = time.time() - (run / LEASE).stat().st_mtime < STALE_S
        saved = sorted(filter(None, map(step_of, checkpoints(run / "checkpoints"))))
        done = isinstance(steps, int) and step >= steps
        return {
            "name": self._folder.name(run),
            "state": "trains" if training else "finished" if done else "stopped",
            "step": step,
            "steps": steps,
            "loss": _number(record.get("loss")),
            "speed": _number(record.get("tokens_per_s", record.get("samples_per_s"))),
            "unit": "samples/s" if "samples_per_s" in record else "tokens/s",
            "ranks": _ranks(config),
            "saved": saved,
            "local": holder is None or holder.machine == this_machine(),
            "job": job,
            "hang": (run / "hang").is_dir(),
            "traces": sorted(
                int(p.stem[5:]) for p in (run / "trace").glob("step-*.json") if p.stem[5:].isdigit()
            ),
        }

    def config(self, question: Question) -> Answer:
        """The config of the first of some runs as text, and the fields in which they differ."""
        runs = [self._folder.run(name) for name in question["names"]]
        flat = [dict(_fields(self._folder.config(run / CONFIG))) for run in runs]
        names = [name for name in dict.fromkeys(name for each in flat for name in each) if name != "run.name"]
        rows = [[name, *(each.get(name, "") for each in flat)] for name in names]
        differences = [row for row in rows if len({*row[1:]}) > 1]
        head = ["field", *(self._folder.name(run) for run in runs)]
        text = self._folder.read(runs[0] / CONFIG) if runs else ""
        return {"text": text, "differences": [head, *differences] if differences else []}

    def hang(self, question: Question) -> Answer:
        """What `stretto diagnose` says of the records of a hang."""
        folder = self._folder.run(question["name"]) / "hang"
        command = [sys.executable, "-c", "from stretto.cli.main import main; main()", "diagnose", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        return {"text": done.stdout or done.stderr}

    def start(self, question: Question) -> Answer:
        """Train a config of the folder."""
        arguments = config_arguments(self._folder, question["config"], question.get("overrides"))
        return {"job": self._jobs.start("train", *arguments).number}

    def resume(self, question: Question) -> Answer:
        """Continue a run from its newest checkpoint."""
        run = self._folder.run(question["name"])
        if local_launcher(run) is not None:
            raise StrettoError(f"{question['name']} trains already")
        place = [f"run.dir={json.dumps(str(run.parent))}", f"run.name={json.dumps(run.name)}"]
        arguments = config_arguments(self._folder, self._folder.name(run / CONFIG), question.get("overrides"))
        return {"job": self._jobs.start("train", *arguments, *place, "--resume", "auto").number}

    def stop(self, question: Question) -> Answer:
        """Ask a run of this machine to finish its step and save, as Ctrl-C in its terminal does."""
        process = local_launcher(self._folder.run(question["name"]))
        if process is None:
            raise StrettoError(
                f"no process of this machine trains {question['name']}",
                hint="stop it where it was started: Ctrl-C, or scancel",
            )
        os.kill(process, signal.SIGTERM)
        return {}


def _within(config: Mapping[str, Any], section: str, field: str) -> Any:
    inner = config.get(section)
    return cast("dict[str, Any]", inner).get(field) if isinstance(inner, dict) else None


def _ranks(config: Mapping[str, Any]) -> int | None:
    """Return the number of ranks of a config's layout, or None if it has none."""
    sizes = [_within(config, "layout", axis) for axis in ("tp", "cp", "dp", "pp", "ranks")]
    numbers = [size for size in sizes if isinstance(size, int)]
    product = 1
    for number in numbers:
        product *= number
    return product if numbers else None


def _fields(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a config by their full names, as text; of null, which says as much as none, ""."""
    if isinstance(values, dict) and (values or not prefix):
        for name, inner in cast("dict[Any, Any]", values).items():
            yield from _fields(inner, f"{prefix}.{name}" if prefix else str(name))
    elif values is None or isinstance(values, str):
        yield prefix, values or ""
    else:
        yield prefix, json.dumps(values, default=str)


def _plots(runs: Mapping[str, Sequence[GrowingRecords]]) -> list[dict[str, Any]]:
    """Return a plot for each quantity that any of the runs has recorded, a line or more for each run."""
    plots = list[dict[str, Any]]()

    def add(
        title: str, unit: str, lines: Sequence[tuple[str, int, Points]], dashed: Sequence[int] = ()
    ) -> None:
        shown = [
            {"label": label, "x": x, "y": y, "stroke": hexed(GROUPS[at % len(GROUPS)]), "dashed": n in dashed}
            for n, (label, at, (x, y)) in enumerate(lines)
            if x
        ]
        if shown:
            plots.append({"title": title, "unit": unit, "lines": shown})

    for title, unit, names in _PLOTS:
        lines = [(run, at, steps.points(names[0])) for at, (run, (steps, _)) in enumerate(runs.items())]
        if title == "loss":
            held_out = [
                (f"{run}, held out", at, each.points("loss"))
                for at, (run, (_, each)) in enumerate(runs.items())
            ]
            add(title, unit, [*lines, *held_out], dashed=range(len(lines), 2 * len(lines)))
        else:
            add(title, unit, lines)
    for title, unit, name in _EVALUATED:
        add(title, unit, [(run, at, each.points(name)) for at, (run, (_, each)) in enumerate(runs.items())])
    for kind in ("device", "host"):
        add(f"memory of the {kind}, peak", "GiB", _memory(runs, kind))
    return plots


def _memory(runs: Mapping[str, Sequence[GrowingRecords]], kind: str) -> list[tuple[str, int, Points]]:
    """Return the peak memory of each rank of a single run, or of the fullest rank of each of several."""
    lines = list[tuple[str, int, Points]]()
    for at, (run, (steps, _)) in enumerate(runs.items()):
        rows = GrowingRecords(Path())
        rows.records = [
            {"step": r["step"], **r["memory"]} for r in steps.records if isinstance(r.get("memory"), dict)
        ]
        prefix = _RANK.format(kind)
        ranks = [name for name in (rows.records[-1] if rows.records else {}) if name.startswith(prefix)]
        if len(runs) == 1 and ranks:
            lines += [(f"rank {n.removeprefix(prefix)}", i, rows.points(n)) for i, n in enumerate(ranks)]
        else:
            lines.append((f"{run}, fullest rank", at, rows.points(f"memory/{kind}_max_gib")))
    return lines
