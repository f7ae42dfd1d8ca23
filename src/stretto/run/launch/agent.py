"""torchrun, with the exit code of its ranks: `python -m stretto.run.launch.agent` and torchrun's arguments.

Ranks that were asked to stop end with code 75 ("stopped after saving, start me again"). torchrun ends with 1
whatever happened to them, so that no batch system could tell a stop from a failure.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from stretto.run.launch.progress import report_progress
from stretto.run.launch.stop import SAVED


def run(arguments: Sequence[str]) -> int:
    """Run torchrun in this process, and return the exit code.

    Returns:
        0; 75 if a signal asked this process to stop, after its ranks have ended; otherwise the code of the
        rank that ended first with another code than 0, or 128 and the signal's number if a signal killed it.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        with report_progress():
            torchrun(list(arguments))
    except SignalException:
        return SAVED
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        if code != SAVED:
            print(error, file=sys.stderr)
        return code if code > 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
