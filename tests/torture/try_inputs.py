"""For a process of its own: parsers read hostile inputs; prints two lines of JSON for each.

python try_inputs.py FOLDER FIRST COUNT PARSER...

Input number n is made from the seed n. Memory is limited to 1 GiB above what valid input takes; each line
says by how much its peak has grown since then, in MiB.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
import traceback
from pathlib import Path

from framework_parsers import PARSERS
from parsers import Parser

from stretto.errors import StrettoError

MEMORY = 1 << 30
LONGEST = 6 * 2 * 2100  # characters of a message with its hint, and of five others


def outcome(parser: Parser, path: Path, data: bytes) -> str:
    """What came of one input: "accepted", "refused", or what must not be."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    try:
        parser.read(path)
    except StrettoError as error:
        return "refused" if len(str(error)) <= LONGEST else f"a message of {len(str(error))} characters"
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:200]} ({Path(last.filename).name}:{last.lineno})"
    return "accepted"


def memory(field: str) -> float:
    """MiB of this process: `VmRSS` now, `VmHWM` at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def main() -> None:
    root, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    parsers = dict[str, tuple[Parser, Path]]()
    for name in sys.argv[4:]:
        folder = root / name.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        parser = PARSERS[name](folder)
        path = folder / parser.file
        path.write_bytes(parser.valid)
        parser.read(path)
        parsers[name] = parser, path
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, in_use + MEMORY))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory("VmRSS")
    for name, (parser, path) in parsers.items():
        for seed in range(first, first + count):
            data = parser.make(random.Random(f"{name} {seed}"))
            print(json.dumps({"parser": name, "seed": seed}), flush=True)
            began = time.process_time()
            verdict = outcome(parser, path, data)
            seconds, mib = time.process_time() - began, memory("VmHWM") - before
            print(json.dumps({"came": verdict, "seconds": seconds, "mib": mib}), flush=True)


if __name__ == "__main__":
    main()
