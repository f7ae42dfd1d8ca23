"""The `stretto` command with steps that take a while, so that a signal comes between two of them."""

from __future__ import annotations

import os
import time
from typing import Any

from stretto.cli.main import main
from train_runs import around_step


def _slow(step: Any, trainer: Any, stop: Any) -> Any:
    time.sleep(float(os.environ["SLOW_STEPS"]))
    return step(trainer, stop)


if __name__ == "__main__":
    around_step(_slow)
    main()
