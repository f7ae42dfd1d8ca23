"""What people see while it trains: a progress bar in a terminal, plain lines anywhere else."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Protocol, TextIO

from stretto.train.metrics_record import AnyStep, EvalRecord, StepRecord, Words

if TYPE_CHECKING:
    from rich.console import Console


class Display(Protocol):
    """Where records are shown."""

    def step(self, record: AnyStep, line: bool) -> None:
        """Show a step; `line` asks for a line that stays."""
        ...

    def line(self, text: str) -> None:
        """Show a line of text that stays."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


def display(steps: int, start: int, out: TextIO, words: Words | None = None) -> Display:
    """A progress bar where `out` is a terminal, plain lines where it is a file or a pipe."""
    words = words or TOKENS
    if not out.isatty():
        return Lines(steps, out, words)
    from rich.console import Console

    console = Console(file=out, highlight=False)
    return Bar(steps, start, console, words) if console.is_terminal else Lines(steps, out, words)


def step_line(record: StepRecord, steps: int) -> str:
    """Such as `step 10/300 | loss 7.123 | grad_norm 1.20 | lr 3.0e-04 | tokens/s 12345 | mfu 12.3%`."""
    parts = [
        f"step {record.step}/{steps}",
        f"loss {number(record.loss, 4)}",
        *([] if record.grad_norm is None else [f"grad_norm {number(record.grad_norm, 3)}"]),
        f"lr {record.lr:.1e}",
        f"tokens/s {number(record.tokens_per_s, 0)}",
    ]
    if record.mfu is not None:
        parts.append(f"mfu {percent(record.mfu)}")
    if record.memory_gib is not None:
        parts.append(f"memory {record.memory_gib:.2f} GiB")
    if record.bubble is not None:
        parts.append(f"bubble {percent(record.bubble)}")
    if record.expert_busiest is not None:
        parts.append(f"busiest expert {record.expert_busiest:.2f}x")
    if record.expert_dropped:
        parts.append(f"dropped {percent(record.expert_dropped)}")
    return " | ".join(parts)


def eval_line(record: EvalRecord, steps: int) -> str:
    """Such as `eval 100/300 | loss 4.2000 | perplexity 66.69`."""
    loss, perplexity = number(record.loss, 4), number(record.perplexity, 2)
    return f"eval {record.step}/{steps} | loss {loss} | perplexity {perplexity}"


TOKENS = Words(step_line, eval_line, "tokens/s")


def number(value: float, digits: int) -> str:
    """A number with so many digits after the point; NaN and infinity in the words that metrics.jsonl has."""
    if isfinite(value):
        return f"{value:.{digits}f}"
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def percent(ratio: float) -> str:
    """A ratio in percent."""
    return f"{100 * ratio:.1f}%"


class Lines:
    """One plain line for each step that is asked to stay, flushed, so that logs can be followed."""

    def __init__(self, steps: int, out: TextIO, words: Words) -> None:
        self._steps, self._words = steps, words
        self._out = out

    def step(self, record: AnyStep, line: bool) -> None:
        if line:
            self.line(self._words.step(record, self._steps))

    def line(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def close(self) -> None:
        pass


class Bar:
    """A bar that moves with every step, with the lines that stay above it."""

    def __init__(self, steps: int, start: int, console: Console, words: Words) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._steps, self._words = steps, words
        # the last minute of steps tells the time that is left better than a start with its warm-up
        self._progress = Progress(
            TextColumn("train"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} " + words.unit),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=60,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("train", total=steps, completed=start, loss="-", speed="-")
        self._progress.start()

    def step(self, record: AnyStep, line: bool) -> None:
        loss, speed = number(record.loss, 4), number(record.speed, 0)
        self._progress.update(self._task, completed=record.step, loss=loss, speed=speed)
        if line:
            self.line(self._words.step(record, self._steps))

    def line(self, text: str) -> None:
        # the text may hold brackets that rich would take for its markup
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()
