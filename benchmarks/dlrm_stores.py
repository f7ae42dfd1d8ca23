"""The cost of keeping rows outside the device's memory, and tables of 8 GiB under a limit of 4 GiB.

First: a step of one store fetches, looks up, updates (row-wise Adagrad) and releases 53,248 rows of 2
million, with uniform ids and with ids as popular as 1 / rank. All rows in memory are compared with caches
of 1% and 10% of them over host memory and over files. The next step's rows are requested before the
current step's are updated. The device is the CPU, so a move costs as much as a copy within host memory.

Then, with --gib 8: rows and states in files, in a separate process that may hold --limit GiB. Two
mechanisms enforce that: RLIMIT_DATA, by which the system refuses memory that is not backed by files, and a
watchdog that ends the process if its resident memory, file pages included, exceeds the limit. The system's
page cache of the file is not limited.

    python benchmarks/dlrm_stores.py [--gib 8 --limit 4 --steps 30 --folder /fast/disk]
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import Step, arguments, race, report
from torch import Tensor

from stretto.recommender.optim.rules import build_rule
from stretto.recommender.optim.updater import update_rows
from stretto.recommender.placement import Place
from stretto.recommender.stores.cached import CachedStore, build_store
from stretto.recommender.stores.store import FetchedRows, RowStore
from stretto.recommender.tables.kernels.cpu import kernels_for

ROWS, DIM, LOOKUPS, LR = 2_000_000, 64, 26 * 2048, 0.01
PLACES: dict[str, tuple[Place, float]] = {
    "all in memory": ("device", 1.0),
    "host memory, cache of 10%": ("cpu", 0.1),
    "host memory, cache of 1%": ("cpu", 0.01),
    "files, cache of 10%": ("disk", 0.1),
    "files, cache of 1%": ("disk", 0.01),
}
RULE = build_rule("rowwise_adagrad")
KERNELS = kernels_for("cpu", torch.float32)


def main() -> None:
    args = arguments(__doc__, rounds=15, gib=0, limit=4, steps=30, folder="", child=0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder or None) as folder:
        if args.child:
            print(json.dumps(_large(args.gib, args.limit, args.steps, Path(folder))))
        elif args.gib:
            _watched(args.gib, args.limit, args.steps, folder)
        else:
            for skew in (0.0, 1.0):
                _race(skew, args.rounds, Path(folder), args.out)


def _race(skew: float, rounds: int, folder: Path, out: Path | None) -> None:
    draw = _Ids(ROWS, skew)
    steps, stores = dict[str, Step](), dict[str, RowStore]()
    for name, (place, cache) in PLACES.items():
        stores[name] = _store(place, ROWS, cache, folder)
        steps[name] = _Steps(stores[name], draw)
    timings = race(steps, "all in memory", rounds=rounds, warmup=40)
    report(
        f"{LOOKUPS} lookups of {ROWS} rows, ids as popular as 1 / rank^{skew:g}",
        timings,
        "all in memory",
        None,
    )
    for name, store in stores.items():
        if isinstance(store, CachedStore):
            print(f"{name}: {store.hits:.1%} of lookups needed no move, {store.slots} slots")
        store.close()


def _store(place: Place, rows: int, cache: float, folder: Path) -> RowStore:
    store = build_store(
        place=place,
        rows=rows,
        width=DIM,
        dtype=torch.float32,
        states=RULE.state_specs(torch.float32),
        device="cpu",
        cache=cache,
        folder=folder,
    )
    values = torch.randn(1 << 16, DIM) * 0.01
    for start in range(0, rows, len(values)):
        store.write(start, {"weight": values[: rows - start]})
    return store


class _Ids:
    """Batches of ids; the popularity rank of an id is independent of its number."""

    def __init__(self, rows: int, skew: float) -> None:
        self.rows, self.skew = rows, skew

    def __call__(self) -> Tensor:
        u = torch.rand(LOOKUPS, dtype=torch.float64)
        # inverse transform sampling of 1 / rank, as a continuous distribution
        rank = u * self.rows if not self.skew else torch.exp(u * torch.log(torch.tensor(self.rows * 1.0)))
        return (rank.long() * 2_654_435_761) % self.rows


class _Steps:
    """Runs steps, with the next step's rows in transit while the current one is updated."""

    def __init__(self, store: RowStore, draw: _Ids) -> None:
        self.store, self.draw = store, draw
        self.offsets, self.gradient = torch.arange(LOOKUPS + 1), torch.randn(LOOKUPS, DIM) * 0.01
        self.ahead: FetchedRows = store.fetch(draw())

    def __call__(self) -> None:
        store, now, self.ahead = self.store, self.ahead, self.store.fetch(self.draw())
        slots = now.slots()
        KERNELS.lookup(store.weight, slots, self.offsets)
        update_rows(
            rule=RULE,
            kernels=KERNELS,
            weight=store.weight,
            states=store.states,
            slots=slots,
            offsets=self.offsets,
            gradient=self.gradient,
            lr=LR,
        )
        store.release(now)


def _large(gib: int, limit: int, steps: int, folder: Path) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_DATA, (limit << 30, limit << 30))
    rows = (gib << 30) // (DIM * 4)
    began = time.perf_counter()
    store = _store("disk", rows, 0.05, folder)
    written = time.perf_counter() - began
    assert isinstance(store, CachedStore)
    middle = store.read(rows // 2, rows // 2 + 1)["weight"]
    step, times = _Steps(store, _Ids(rows, 1.0)), list[float]()
    for _ in range(steps):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    store.release(step.ahead)
    report = {
        "rows": rows,
        "file_gib": round(store.backing.rows * store.backing.record / 2**30, 2),
        "written_s": round(written, 1),
        "step_ms": round(median(times) * 1e3, 1),
        "first_ms": round(times[0] * 1e3, 1),
        "hits": round(store.hits, 3),
        "finite": bool(middle.isfinite().all()),
    }
    store.close()
    return report


def _watched(gib: int, limit: int, steps: int, folder: str) -> None:
    command = [
        "--child",
        "1",
        "--gib",
        str(gib),
        "--limit",
        str(limit),
        "--steps",
        str(steps),
        "--folder",
        folder,
    ]
    child = subprocess.Popen([sys.executable, __file__, *command], stdout=subprocess.PIPE, text=True)
    status, peak = Path(f"/proc/{child.pid}/status"), dict[str, int]()
    while child.poll() is None:
        for line in status.read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "RssAnon", "RssFile"):
                peak[name] = max(peak.get(name, 0), int(value.split()[0]))
        if peak.get("VmRSS", 0) > limit << 20:
            child.kill()
            sys.exit(f"more than {limit} GiB were resident: {peak}")
        time.sleep(0.02)
    if child.returncode:
        sys.exit(f"it ended with {child.returncode}")
    assert child.stdout is not None
    print(json.dumps(json.loads(child.stdout.read()) | {f"peak_{k}_mib": v >> 10 for k, v in peak.items()}))


if __name__ == "__main__":
    main()
