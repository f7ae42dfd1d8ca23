"""Runner of a comparison in processes of their own: interrupted, failed, and not run twice."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.run.compare import runs
from stretto.run.compare.result import CombinationResult, Repeat
from stretto.run.compare.runs import PendingRun, Runner


def run(name: str) -> PendingRun:
    pending = CombinationResult(name=name, overrides=[], status="refused", fingerprint=f"print of {name}")
    return PendingRun(pending=pending, overrides=[])


def settings(folder: Path, *, again: bool = False, repeats: int = 2) -> Runner:
    return Runner(
        path="job.yaml", folder=folder, warmup=0, steps=1, repeats=repeats, memory=False, again=again
    )


def test_an_interrupt_keeps_what_is_done_and_the_next_time_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other round is in reverse; what failed is run by the next command, not in the next round."""
    ran = list[str]()
    begin = {"interrupted": "b2", "failing": "c1"}

    def run_once(_: Runner, run: PendingRun, result: CombinationResult, number: int) -> CombinationResult:
        ran.append(f"{run.pending.name}{number}")
        if ran[-1] == begin["interrupted"]:
            raise KeyboardInterrupt
        if ran[-1] == begin["failing"]:
            return replace(result, status="failed", error="out of memory")
        times = {"median": 1.0, "q1": 1.0, "q3": 1.0, "speed": 2.0, "began": 0.0, "wall": 90.0}
        done = [*result.repeats, Repeat(round=number, others=0.5, **times)]
        return replace(result, status="done", repeats=done)

    monkeypatch.setattr(Runner, "_run", run_once)
    monkeypatch.setattr(runs, "busy_text", lambda: "this machine is busy: 3 runnable processes on 2 cores")
    three, messages = [run(name) for name in "abc"], list[str]()
    results, stopped = settings(tmp_path).run_all(three, messages.append)
    assert stopped
    assert ran == ["a1", "b1", "c1", "b2"]
    assert [each.status for each in results] == ["done", "done", "failed"]
    busy = "; warning: other processes used 50% of the cores"
    assert messages[:4] == [
        "warning: this machine is busy: 3 runnable processes on 2 cores",
        "round 1/2, 1/3 a: 1 steps",
        f"round 1/2, 1/3 a: 1 s a step, 2 tokens/s{busy}",
        "round 1/2, 2/3 b: 1 steps; about 8 min left, 5 runs",
    ]
    begin.clear()
    begin |= {"interrupted": "", "failing": ""}
    results, stopped = settings(tmp_path).run_all(three, messages.append)
    assert not stopped
    assert [each.status for each in results] == ["done"] * 3
    assert ran[4:] == ["c1", "c2", "b2", "a2"]
    assert "1/3 a: 1 round done before" in messages
    settings(tmp_path, repeats=3).run_all(three, messages.append)
    assert ran[8:] == ["a3", "b3", "c3"]
    settings(tmp_path, again=True, repeats=1).run_all(three, messages.append)
    assert ran[11:] == ["a1", "b1", "c1"]
    begin["interrupted"] = "b1"
    results, _ = settings(tmp_path / "new").run_all(three, messages.append)
    assert [each.status for each in results] == ["done", "stopped", "stopped"]


@pytest.mark.parametrize("number", [signal.SIGINT])
def test_an_interrupted_command_is_ended_with_its_process(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, started = tmp_path / "ended", tmp_path / "started"
    script = (
        "import signal, sys, time, pathlib\n"
        f"def end(*_): pathlib.Path({str(left)!r}).touch(); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"pathlib.Path({str(started)!r}).touch()\ntime.sleep(60)\n"
    )
    monkeypatch.setattr(runs, "_STRETTO", (sys.executable, "-c", script))

    def interrupt() -> None:
        while not started.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        runs._stretto(["train"], tmp_path / "log")
    assert time.monotonic() - began < 30
    assert left.exists()


def test_what_a_command_prints_is_read_and_what_it_says_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import json, sys; print(json.dumps(sys.argv[1:])); print('said', file=sys.stderr); sys.exit(3)"
    monkeypatch.setattr(runs, "_STRETTO", (sys.executable, "-c", script))
    assert runs._stretto(["memory", "job.yaml"], tmp_path / "log") == (3, ["memory", "job.yaml", "--json"])
    assert (tmp_path / "log").read_text() == "said\n"
    monkeypatch.setattr(runs, "_STRETTO", (sys.executable, "-c", "print('no JSON')"))
    assert runs._stretto(["train"], tmp_path / "log") == (0, None)


def test_the_error_of_a_failed_run_is_its_last(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("banner\nerror: first\nhint: no\nerror: rank 1 failed: out of memory\nhint: less\n")
    assert runs._error(log, 1) == "rank 1 failed: out of memory"
    log.write_text("Killed\n")
    assert runs._error(log, -9) == f"exit code -9, see {log}"


def test_the_reason_why_traffic_is_not_measured_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: Sequence[str], log: Path) -> tuple[int, None]:
        assert arguments == ["memory", "job.yaml", "a.b=1", "--measure"]
        log.write_text("error: no room\n")
        return 1, None

    monkeypatch.setattr(runs, "_stretto", fail)
    result = settings(tmp_path)._with_memory(run("a").pending, ["a.b=1"])
    assert (result.sent, result.memory, result.unmeasured) == (None, None, "no room")
