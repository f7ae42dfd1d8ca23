"""What the campaign counted, one entry a torture in counts.json; its table is docs/evidence/torture.md.

python tests/torture/counts.py    # writes the table
"""

from __future__ import annotations

import fcntl
import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COUNTS, PAGE = HERE / "counts.json", ROOT / "docs" / "evidence" / "torture.md"
BEGIN = "<!-- written by tests/torture/counts.py; run the campaign, do not edit this table -->"
END = "<!-- end of the table -->"


def record(torture: str, *, tried: int, passed: int, command: str, note: str = "") -> None:
    """Keep what a whole torture came to, in place of what it came to before.

    Args:
        torture: what was done, as a row of the table says it.
        command: that repeats it.
        note: what else was measured, such as the longest time.
    """
    entry = {
        "tried": tried,
        "passed": passed,
        "command": command,
        "note": note,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "processor": _processor(),
    }
    with (HERE / "counts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = json.loads(COUNTS.read_text()) if COUNTS.is_file() else {}
        entries[torture] = entry
        COUNTS.write_text(json.dumps(dict(sorted(entries.items())), indent=1) + "\n")


def table() -> str:
    """The counts as a table in Markdown."""
    rows = [
        "| torture | passed of tried | note | command | date, commit, processor |",
        "|---|---|---|---|---|",
    ]
    for torture, entry in json.loads(COUNTS.read_text()).items():
        where = f"{entry['date']}, {entry['commit']}, {entry['processor']}"
        count = f"{entry['passed']:,} of {entry['tried']:,}"
        rows.append(f"| {torture} | {count} | {entry['note']} | `{entry['command']}` | {where} |")
    return "\n".join(rows)


def write_page() -> None:
    """Put the table where the page has it."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("vendor_id"):
            return line.split(":")[1].strip()
    return platform.machine()


if __name__ == "__main__":
    write_page()
