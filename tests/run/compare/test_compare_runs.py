"""Runner of a comparison in processes of their own: interrupted, failed, and not run twice."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.run.compare import runs
from stretto.run.compare.result import CombinationResult
from stretto.run.compare.runs import PendingRun, Runner


def run(name: str) -> PendingRun:
    pending = CombinationResult(name=name, overrides=[], status="refused", fingerprint=f"print of {name}")
    return PendingRun(pending=pending, overrides=[], language=False)


def settings(folder: Path, *, again: bool = False) -> Runner:
    return Runner(path="job.yaml", folder=folder, warmup=0, steps=1, memory=False, again=again)


def test_an_interrupt_keeps_what_is_done_and_the_next_time_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = list[str]()

    def one(_: Runner, run: PendingRun) -> CombinationResult:
        ran.append(run.pending.name)
        if run.pending.name == "b" and ran.count("b") == 1:
            raise KeyboardInterrupt
        if run.pending.name == "b":
            return replace(run.pending, status="failed", error="out of memory")
        return replace(run.pending, status="done", median=1.0, speed=2.0)

    monkeypatch.setattr(Runner, "_run", one)
    three, said = [run(name) for name in "abc"], list[str]()
    results, stopped = settings(tmp_path).run_all(three, said.append)
    assert stopped
    assert [one.status for one in results] == ["done", "stopped", "stopped"]
    assert said[1] == "1/3 a: 1 s a step, 2 tokens/s"
    results, stopped = settings(tmp_path).run_all(three, said.append)
    assert not stopped
    assert [one.status for one in results] == ["done", "failed", "done"]
    assert ran == ["a", "b", "b", "c"]
    assert "1/3 a: done before" in said
    settings(tmp_path).run_all(three, said.append)
    assert ran[4:] == ["b"], "what failed is tried again"
    settings(tmp_path, again=True).run_all(three, said.append)
    assert ran[5:] == ["a", "b", "c"]


@pytest.mark.parametrize("number", [signal.SIGINT])
def test_an_interrupted_command_is_ended_with_its_process(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "ended"
    script = (
        "import signal, sys, time, pathlib\n"
        f"def end(*_): pathlib.Path({str(left)!r}).touch(); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('{}', flush=True)\ntime.sleep(60)\n"
    )
    monkeypatch.setattr(runs, "_STRETTO", (sys.executable, "-c", script))
    threading.Timer(1.5, os.kill, (os.getpid(), number)).start()
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
