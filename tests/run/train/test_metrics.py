from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stretto.run.train.metrics import EvalRecord, Metrics, StepRecord, step_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(step: int, **changes: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "step": step,
        "loss": 8.0 - step / 100,
        "grad_norm": 1.234,
        "lr": 3e-4,
        "tokens": 4096 * step,
        "tokens_per_s": 12345.4,
        "step_time_s": 0.33,
    }
    return StepRecord(**(fields | changes))


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_line_for_every_step_with_the_promised_keys(tmp_path: Path) -> None:
    with Metrics(tmp_path, steps=3, every=100, out=io.StringIO()) as metrics:
        for step in (1, 2, 3):
            metrics.step(record(step))
            assert len(lines(tmp_path / "metrics.jsonl")) == step, "flushed at once"
    rows = lines(tmp_path / "metrics.jsonl")
    assert [f["step"] for f in rows] == [1, 2, 3]
    keys = "version step loss grad_norm lr tokens tokens_per_s step_time_s epoch epochs mfu memory_gib "
    keys += "bubble loss_scale skipped expert_loss expert_dropped expert_busiest bad slow targets"
    assert list(rows[0]) == keys.split()
    assert rows[0]["mfu"] is None


def test_numbers_that_json_has_not(tmp_path: Path) -> None:
    with Metrics(tmp_path, steps=2, out=io.StringIO()) as metrics:
        metrics.step(record(1, loss=math.nan, grad_norm=math.inf, lr=-math.inf))
        metrics.evaluation(EvalRecord(step=1, loss=1e6, tokens=10, seconds=0.1))
    row = lines(tmp_path / "metrics.jsonl")[0]
    assert (row["loss"], row["grad_norm"], row["lr"]) == ("NaN", "Infinity", "-Infinity")
    assert math.isnan(float(row["loss"]))
    assert lines(tmp_path / "eval.jsonl")[0]["perplexity"] == "Infinity"


def test_shown_steps_have_the_memory_of_all_ranks(tmp_path: Path) -> None:
    memory = {"memory/host_gib/rank_0": 1.5}
    with Metrics(tmp_path, steps=9, every=2, out=io.StringIO()) as metrics:
        for step in (1, 2, 3):
            metrics.step(record(step), memory)
    assert [row.get("memory") for row in lines(tmp_path / "metrics.jsonl")] == [memory, memory, None]


def test_a_step_of_several_updates_has_no_norm(tmp_path: Path) -> None:
    out = io.StringIO()
    with Metrics(tmp_path, steps=1, out=out) as metrics:
        metrics.step(record(1, grad_norm=None))
    assert lines(tmp_path / "metrics.jsonl")[0]["grad_norm"] is None
    assert out.getvalue() == "step 1/1 | loss 7.9900 | lr 3.0e-04 | 0.33 s/step | tokens/s 12345\n"


def test_the_line_of_a_float16_step_shows_its_loss_scale_and_skipped_updates() -> None:
    assert step_line(record(1, loss_scale=2.0**24, skipped=0), 4).endswith("| loss_scale 16777216")
    assert step_line(record(3, loss_scale=0.5, skipped=2), 4).endswith("| loss_scale 0.5 | skipped 2")


def test_resume_drops_later_lines_and_a_partial_one(tmp_path: Path) -> None:
    with Metrics(tmp_path, steps=9, out=io.StringIO()) as metrics:
        for step in range(1, 7):
            metrics.step(record(step))
            metrics.evaluation(EvalRecord(step=step, loss=5.0, tokens=10, seconds=0.1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # died while writing
    with Metrics(tmp_path, steps=9, start=4, out=io.StringIO()) as metrics:
        metrics.step(record(5, loss=1.5))
    rows = lines(tmp_path / "metrics.jsonl")
    assert [f["step"] for f in rows] == [1, 2, 3, 4, 5]
    assert rows[-1]["loss"] == 1.5
    assert [f["step"] for f in lines(tmp_path / "eval.jsonl")] == [1, 2, 3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["eval.jsonl", "metrics.jsonl"]


def test_records_behind_a_broken_line_stay(tmp_path: Path) -> None:
    with Metrics(tmp_path, steps=3, every=100, out=io.StringIO()) as metrics:
        for step in (1, 2, 3):
            metrics.step(record(step))
    path = tmp_path / "metrics.jsonl"
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:20] + b"\0" * 8 + b"\n" + third)
    with Metrics(tmp_path, steps=3, start=3, out=io.StringIO()):
        pass
    assert [row["step"] for row in lines(path)] == [1, 3]


def test_resume_keeps_the_numbers_that_json_has_not(tmp_path: Path) -> None:
    with Metrics(tmp_path, steps=9, out=io.StringIO()) as metrics:
        metrics.step(record(1, loss=math.nan))
    before = (tmp_path / "metrics.jsonl").read_text()
    Metrics(tmp_path, steps=9, start=1, out=io.StringIO()).close()
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    with Metrics(tmp_path, steps=9, out=io.StringIO()) as metrics:
        metrics.step(record(1))
    Metrics(tmp_path, steps=9, out=io.StringIO()).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_plain_lines(tmp_path: Path) -> None:
    out = io.StringIO()
    with Metrics(tmp_path, steps=25, every=10, out=out) as metrics:
        for step in range(1, 26):
            metrics.step(record(step, mfu=0.1234, bubble=0.25) if step == 10 else record(step))
            if step == 20:
                metrics.evaluation(EvalRecord(step=20, loss=math.log(50), tokens=10, seconds=0.1))
        metrics.note("saved [bold]checkpoint[/bold]")
    plain = "grad_norm 1.234 | lr 3.0e-04 | 0.33 s/step | tokens/s 12345"
    assert out.getvalue().splitlines() == [
        f"step 1/25 | loss 7.9900 | {plain}",
        f"step 10/25 | loss 7.9000 | {plain} | mfu 12.3%",
        f"step 20/25 | loss 7.8000 | {plain}",
        "eval 20/25 | held-out loss 3.9120 | perplexity 50.00",
        f"step 25/25 | loss 7.7500 | {plain}",
        "saved [bold]checkpoint[/bold]",
    ]


def test_a_terminal_gets_a_bar_with_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    with Metrics(tmp_path, steps=4, every=4, start=1, out=out) as metrics:
        metrics.step(record(2))
        metrics.step(record(3))
        metrics.note("saved [bold]checkpoint[/bold]")
    shown = out.getvalue()
    assert "3/4" in shown, "the bar counts steps before, and those that print no line"
    for part in ("loss 7.9700", "12345 tokens/s", "ETA", "saved [bold]checkpoint[/bold]", "step 2/4 | loss"):
        assert part in shown
    assert "step 3/4 |" not in shown
    assert shown.rindex("\x1b[?25h") > shown.index("\x1b[?25l"), "the cursor is back"


def test_the_terminal_is_left_whole_by_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with pytest.raises(KeyboardInterrupt), Metrics(tmp_path, steps=4, out=out):
        raise KeyboardInterrupt
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")


def test_needs_no_torch() -> None:
    code = (
        "import sys; import stretto.run.train.metrics; "
        "assert not {'torch', 'rich', 'numpy'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
