"""The `stretto` command with steps that take a while, so that a signal comes between two of them."""

from __future__ import annotations

import os
import time
from typing import Any

from stretto.cli.main import main
from stretto.run.train.session import Session

_step = Session._step


def _slow(self: Session, stop: Any) -> bool:
    time.sleep(float(os.environ["SLOW_STEPS"]))
    return _step(self, stop)


if __name__ == "__main__":
    Session._step = _slow
    main()
