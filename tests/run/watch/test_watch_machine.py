"""Other processes on the machine, as /proc counts them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stretto.run.watch import machine
from stretto.run.watch.machine import OtherProcesses, busy_text


@pytest.mark.parametrize(
    ("runnable", "cores", "count"),
    [("4/129", 2, 3), ("1/129", 2, None), ("5/900", 64, None), ("9/900", 64, 8)],
)
def test_a_busy_machine_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runnable: str, cores: int, count: int | None
) -> None:
    monkeypatch.setattr(machine.time, "sleep", lambda _: None)
    monkeypatch.setattr(machine, "core_count", lambda: cores)
    (tmp_path / "loadavg").write_text(f"7.48 3.49 1.90 {runnable} 6493\n")
    text = f"this machine is busy: {count} runnable processes on {cores} cores"
    assert busy_text(tmp_path) == (None if count is None else text)
    assert busy_text(tmp_path / "none") is None


def test_own_processes_are_not_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four cores are ours. A child's child outlives its parent; a stranger is no descendant."""
    own = os.getpid()
    monkeypatch.setattr(OtherProcesses, "_watch", lambda _: None)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 2})
    clock = iter((100.0, 110.0, 0.0, 1.0))
    monkeypatch.setattr("stretto.run.watch.machine.time.monotonic", lambda: next(clock))
    ticks = os.sysconf("SC_CLK_TCK")

    def state(first: int, third: int, processes: dict[int, tuple[int, int]]) -> None:
        lines = [
            f"cpu{n} {busy} 0 0 {busy * 7} {busy * 5} 0 0 0 {busy} 0"  # idle, iowait and guests grow too
            for n, busy in enumerate((first, 5, third, 99))
        ]
        (tmp_path / "stat").write_text("\n".join(["cpu 1 1 1 1 1 1 1 1 0 0", *lines, "intr 3"]))
        for pid, (parent, used) in processes.items():
            (tmp_path / str(pid)).mkdir(exist_ok=True)
            text = f"{pid} (a b) c) S {parent} {' '.join('0' * 9)} {used} 0 0 0"
            (tmp_path / str(pid) / "stat").write_text(text)

    state(0, 0, {own: (1, 0), 1: (0, 0), 70001: (own, 0), 70002: (70001, 0), 70003: (1, 0)})
    with OtherProcesses(tmp_path) as others:
        state(9 * ticks, 6 * ticks, {own: (1, 2 * ticks), 70002: (1, 8 * ticks), 70003: (1, 5 * ticks)})
    assert others.share == pytest.approx((15 - 10) / 20)
    with OtherProcesses(tmp_path / "none") as others:
        pass
    assert others.share is None
