"""The job as users start it: in a terminal, under torchrun; and what is left when its launcher is killed."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from command_line import CommandLine
from stretto.run.config import TrainConfig
from stretto.run.launch.local import run_ranks
from stretto.run.train.language_job import LANGUAGE
from stretto.run.train.launch import run_job
from tiny_job import job, job_file
from train_runs import losses, train

TRAIN = [sys.executable, "-m", "stretto.cli.main", "train"]
PATIENCE = 60.0  # seconds; a loaded machine is slow to import torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    job_file(folder)
    return folder


@pytest.fixture
def started() -> Generator[list[subprocess.Popen[bytes]]]:
    """Processes that must not outlive the test."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_until(ready: Callable[[], bool], event: str) -> None:
    end = time.monotonic() + PATIENCE
    while not ready():
        assert time.monotonic() < end, f"waited in vain for {event}"
        time.sleep(0.05)


def steps_of(folder: Path, name: str) -> int:
    path = folder / "runs" / name / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def children_of(pid: int) -> list[int]:
    """All processes below `pid`, children before their own."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(text.rpartition(")")[2].split()[1])
    below = [pid]
    for ancestor in below:
        below += [child for child, parent in parents.items() if parent == ancestor]
    return below[1:]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def read_terminal(master: int, until: Callable[[str], bool]) -> str:
    """The output of the terminal until `until(output)` holds or it is closed."""
    text, end = "", time.monotonic() + PATIENCE
    while not until(text) and time.monotonic() < end:
        try:
            text += os.read(master, 65536).decode(errors="replace")
        except OSError:  # the other side has closed it
            break
    return text


def test_ctrl_c_in_a_terminal_saves_and_restores_the_terminal(
    folder: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    pid, master = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm", COLUMNS="120", LINES="30")
        command = [*TRAIN, str(folder / "tiny.yaml"), "layout.dp=2", "train.steps=100000", "run.name=tty"]
        os.execv(sys.executable, [*command, "metrics.every=5"])
    text = read_terminal(master, lambda seen: "step 5/" in seen)
    below = children_of(pid)
    os.write(master, b"\x03")
    text += read_terminal(master, lambda _: False)
    _, status = os.waitpid(pid, 0)
    os.close(master)
    assert os.waitstatus_to_exitcode(status) == 130
    assert "\x1b[?25l" in text  # a bar, which hides the cursor
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "train ━" in plain
    assert "asked to stop: saving after step" in plain
    last = [line.strip() for line in plain.replace("\r", "\n").splitlines() if line.strip()][-2:]
    assert last[0].startswith("stopped; newest checkpoint: ")
    assert last[1].startswith("to continue: stretto train ")
    assert "run.name=tty --resume auto" in last[1]
    assert "Traceback" not in plain
    assert below
    wait_until(lambda: not any(alive(process_id) for process_id in below), "ranks to end")


def test_a_second_job_is_refused_and_a_killed_launcher_leaves_no_ranks_behind(
    folder: Path, started: list[subprocess.Popen[bytes]], stretto: CommandLine
) -> None:
    """Not even one that is stopped."""
    arguments = [str(folder / "tiny.yaml"), "layout.dp=2", "train.steps=100000", "run.name=orphans"]
    process = subprocess.Popen([*TRAIN, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    started.append(process)
    wait_until(lambda: steps_of(folder, "orphans") > 2, "the first steps")
    below = children_of(process.pid)
    assert len(below) >= 3  # two ranks and what they were forked from
    holder = f"orphans is in use by a job on host {socket.gethostname()}, process {process.pid}"
    assert holder in stretto.error("train", *arguments, "--resume", "auto")
    os.kill(below[-1], signal.SIGSTOP)  # a rank: those come after what they were forked from
    process.kill()
    process.wait()
    wait_until(lambda: not any(alive(process_id) for process_id in below), "ranks to end")
    assert list((folder / "runs" / "orphans" / "checkpoints").iterdir())  # they saved before they left


def joined(config: TrainConfig) -> int:
    outcome = run_job(LANGUAGE, config, quiet=True).outcome
    assert outcome is not None
    return outcome["step"]


def test_ranks_of_another_launcher_make_all_ready_themselves(folder: Path) -> None:
    """As those of torchrun, by the variables in their environment."""
    config, reference = (job(folder, "layout.dp=2", f"run.name={name}") for name in ("joined", "alone"))
    assert run_ranks(2, joined, config) == [6, 6]
    train(reference)
    assert losses(config) == losses(reference)


@pytest.mark.slow
@pytest.mark.parametrize("again", ["ranks", "torchrun"])
def test_training_under_torchrun_saves_on_sigterm_and_resumes(
    folder: Path, started: list[subprocess.Popen[bytes]], again: str
) -> None:
    """Under torchrun again, or on ranks of this process, which costs less; that torchrun comes to its end is
    seen in tests/run/generate too.
    """
    name = f"joined-by-{again}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    join = ["-m", "stretto.cli.main", "train", str(folder / "tiny.yaml"), "layout.dp=2", f"run.name={name}"]
    environment = {**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60", "SLOW_STEPS": "0.3"}
    slow = Path(__file__).with_name("slow_main.py")
    first = subprocess.Popen(
        [*torchrun, str(slow), *join[2:], "--resume", "auto"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    started.append(first)
    wait_until(lambda: steps_of(folder, name) >= 2, "the first steps")
    first.send_signal(signal.SIGTERM)
    text = first.communicate(timeout=PATIENCE)[0].decode()
    assert first.returncode != 0
    assert "asked to stop: saving after step" in text
    assert text.count("to continue: stretto train") == 1  # printed by one rank
    done = steps_of(folder, name)
    assert 2 <= done < 6
    if again == "torchrun":
        second = subprocess.run(
            [*torchrun, *join, "--resume", "auto", "--json"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )
        assert second.returncode == 0, second.stderr
        assert json.loads(second.stdout)["steps"] == 6
        assert f"resumed from {folder}/runs/{name}/checkpoints/step-{done:08d}" in second.stderr
    else:
        assert train(job(folder, "layout.dp=2", f"run.name={name}", "checkpoint.resume=auto"))["step"] == 6
    reference = job(folder, "layout.dp=2", f"run.name=whole-{again}")
    train(reference)
    assert losses(job(folder, f"run.name={name}")) == losses(reference)
