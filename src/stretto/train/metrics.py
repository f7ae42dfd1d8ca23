"""Where a run's numbers go: the terminal, `metrics.jsonl`, `eval.jsonl` and TensorBoard.

One rank of the job has it; the numbers it is given are of the whole job.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from stretto.train.metrics_board import Board
from stretto.train.metrics_file import StepLines
from stretto.train.metrics_record import AnyEval, AnyStep, EvalRecord, StepRecord, Words
from stretto.train.metrics_terminal import TOKENS, display

__all__ = ["EvalRecord", "Metrics", "StepRecord"]


class Metrics:
    """Reports every step to the file; each `every`th, the first and the last to terminal and TensorBoard too.

    `folder` is the run's, `steps` are the whole run's, `start` are those a resumed run has behind it: what
    the files hold of later ones is dropped. `out` is stdout unless given (`--json` leaves stdout alone);
    `words` say how records are told.
    Use it in a `with`, so that the terminal is left as it was whatever happens.

    Raises:
        StrettoError: tensorboard is asked for and not installed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        start: int = 0,
        every: int = 1,
        tensorboard: bool = False,
        out: TextIO | None = None,
        words: Words = TOKENS,
    ) -> None:
        self._words = words
        self._steps, self._first, self._every = steps, start + 1, every
        self._board = Board(folder / "tensorboard", start) if tensorboard else None
        self._train = StepLines(folder / "metrics.jsonl", start)
        self._eval = StepLines(folder / "eval.jsonl", start)
        self._display = display(steps, start, sys.stdout if out is None else out, words)

    def step(self, record: AnyStep) -> None:
        """Report a training step."""
        self._train.write(record.facts())
        shown = record.step % self._every == 0 or record.step in (self._first, self._steps)
        self._display.step(record, shown)
        if self._board is not None and shown:
            self._board.step(record)

    def evaluation(self, record: AnyEval) -> None:
        """Report an evaluation."""
        self._eval.write(record.facts())
        self._display.line(self._words.evaluation(record, self._steps))
        if self._board is not None:
            self._board.evaluation(record)
            self._board.flush()

    def note(self, text: str) -> None:
        """Tell people something in between, such as that a checkpoint was saved."""
        self._display.line(text)

    def close(self) -> None:
        """Close the files and leave the terminal; more than once does no harm."""
        self._display.close()
        self._train.close()
        self._eval.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
