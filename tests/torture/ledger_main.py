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
from train_runs import around_step

SLOW_S = 0.25


def keep_a_ledger(path: Path) -> None:
    attempt = list[Any]()

    def step(inner: Any, self: Any, stop: Any) -> Any:
        if not attempt:
            attempt.append(gather_json([os.getpid(), time.time()])[0])
        if not path.with_suffix(".fast").exists():
            time.sleep(SLOW_S)
        number, stopped = self.progress.step + 1, inner(self, stop)
        if all(self.task.mesh.index(axis) == 0 for axis in ("tp", "cp", "pp")):
            seen = [i for microbatch in self.task.model.samples for i in microbatch]
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([*attempt, self.task.mesh.layout.world, number, seen]) + "\n")
        return stopped

    around_step(step)


if __name__ == "__main__":
    keep_a_ledger(Path(os.environ["LEDGER"]))
    main()
