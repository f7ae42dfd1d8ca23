"""`stretto` with ranks that write down, for each step, the attempt, the number of ranks and the samples;
steps are slow until a file appears.

LEDGER=FILE torchrun ... tests/torture/ledger_main.py train CONFIG
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from stretto.cli.main import main
from stretto.engine.parallel.control import gather_json
from stretto.run.train.session import Session

SLOW_S = 0.25


def keep_a_ledger(path: Path) -> None:
    inner, attempt = Session._step, list[Any]()

    def step(self: Session, stop: Any) -> bool:
        if not attempt:
            attempt.append(gather_json([os.getpid(), time.time()])[0])
        if not path.with_suffix(".fast").exists():
            time.sleep(SLOW_S)
        number, stopped = self.position.step + 1, inner(self, stop)
        if all(self.mesh.index(axis) == 0 for axis in ("tp", "cp", "pp")):
            seen = [i for microbatch in self.replica.samples for i in microbatch]
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([*attempt, self.mesh.layout.world, number, seen]) + "\n")
        return stopped

    Session._step = step


if __name__ == "__main__":
    keep_a_ledger(Path(os.environ["LEDGER"]))
    main()
