"""TensorBoard files."""

from __future__ import annotations

from pathlib import Path

from stretto.errors import StrettoError
from stretto.train.metrics_record import AnyEval, AnyStep


class Board:
    """Writes every number of a record under `train/` and `eval/`.

    Raises:
        StrettoError: tensorboard is not installed.
    """

    def __init__(self, folder: Path, start: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise StrettoError(
                "metrics.tensorboard is true: tensorboard is not installed",
                hint="pip install 'stretto[tensorboard]', or metrics.tensorboard=false",
            ) from None
        # TensorBoard hides what an earlier, ended run has written from this step on
        purge = start + 1 if start else None
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def step(self, record: AnyStep) -> None:
        self._scalars("train", record.step, record.facts())

    def evaluation(self, record: AnyEval) -> None:
        self._scalars("eval", record.step, record.facts())

    def _scalars(self, group: str, step: int, facts: dict[str, float | None]) -> None:
        for name, value in facts.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(f"{group}/{name}", value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
