"""How commands tell that a rank has failed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from stretto.cli.face import print_error

if TYPE_CHECKING:
    from stretto.run.launch.failure import Failure

# exceptions that say all there is to say in one line
PLAIN = ("TrainingFailed", "CheckpointError", "OffloadError")


def print_failure(failure: Failure, hint: str | None = None) -> None:
    """The rank's traceback where it helps, then one `error:` line; `hint` where the failure has none."""
    _leave_bar()
    hint = failure.hint or hint
    if failure.name in PLAIN and failure.kind == "error":
        print_error(failure.message, hint)
    elif failure.name == "BrokenPipeError":
        print_error("nobody reads the output any more; the job was ended", hint)
    elif failure.kind == "silent":
        print_error(f"{failure.message}; the job was ended", hint)
    elif failure.kind == "died":
        print_error(f"rank {failure.rank} {failure.message}; the job was ended", hint)
    else:
        print(failure.traceback, file=sys.stderr)
        said = f"{failure.name}: {failure.message}"
        print_error(f"rank {failure.rank} failed: {said}; the job was ended", hint)


def _leave_bar() -> None:
    """Take the terminal back from a rank that was ended in the middle of its progress bar."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            stream.write("\x1b[?25h\n")  # show the cursor
            stream.flush()
            return
