"""Claim: import and export of a 2 GiB model run at 80% of the disk's sequential rate or more.

python benchmarks/checkpoint_stream.py

The disk's rate is that of a plain copy of the same bytes in the same round: read in order with a cold page
cache, written in order, and synced. Import and export too begin with their source out of the page cache and
end with all files synced; export verifies every checksum first, as the command does. Before each measurement
all that was written earlier is synced, so that nothing else is on its way to the disk.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median, quantiles

import torch
from harness import where
from safetensors.torch import save_file

from stretto.engine.checkpoint.huggingface.folder import write_json
from stretto.engine.checkpoint.huggingface.importing import import_huggingface
from stretto.engine.checkpoint.manifest import problems
from stretto.engine.models.huggingface import rules
from stretto.job.huggingface import config_to_huggingface
from stretto.job.shape import ModelShape
from stretto.run.train.exported import export_model

BLOCK = 1 << 22
LLAMA = ModelShape(
    family="llama",
    layers=21,
    hidden=2048,
    heads=16,
    kv_heads=8,
    ffn=5504,
    vocab=32000,
    sequence=2048,
)


def published(folder: Path, shape: ModelShape) -> int:
    """Write a model of random weights as published folders are, in two files; returns their bytes."""
    folder.mkdir()
    sizes = {name: size for rule in rules(shape) for name, size in rule.sizes.items()}
    names = list(sizes)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file = f"model-{i:05d}-of-00002.safetensors"
        save_file(
            {name: torch.randn(sizes[name]).bfloat16() for name in part}, folder / file, {"format": "pt"}
        )
        weight_map |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    write_json(folder / "config.json", config_to_huggingface(shape))
    return sum(2 * torch.Size(size).numel() for size in sizes.values())


def forget(files: Iterable[Path]) -> None:
    """Write all that is on its way to the disk, and drop the files from the page cache."""
    os.sync()
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def copy(source: Path, target: Path) -> None:
    """Copy a folder's files in order, and sync them."""
    target.mkdir()
    buffer = memoryview(bytearray(BLOCK))
    for path in sorted(source.iterdir()):
        reading, writing = os.open(path, os.O_RDONLY), os.open(target / path.name, os.O_WRONLY | os.O_CREAT)
        while count := os.readv(reading, [buffer]):
            os.write(writing, buffer[:count])
        os.fsync(writing)
        os.close(reading)
        os.close(writing)


def export(checkpoint: Path, out: Path) -> None:
    assert not problems(checkpoint)
    export_model(checkpoint, out, shard_bytes=5 * 10**9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=LLAMA.layers)
    parser.add_argument("--dir", type=Path, help="A folder on the disk to measure; by default the system's.")
    arguments = parser.parse_args()
    from dataclasses import replace

    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        place = Path(folder)
        source, out = place / "published", place / "out"
        size = published(source, replace(LLAMA, layers=arguments.layers))
        checkpoint = import_huggingface(source, place / "run")
        contestants: dict[str, tuple[Path, Callable[[], object]]] = {
            "copy": (source, lambda: copy(source, out)),
            "import": (source, lambda: import_huggingface(source, out)),
            "export": (checkpoint, lambda: export(checkpoint, out)),
        }
        taken: dict[str, list[float]] = {name: [] for name in contestants}
        draw = random.Random(0)
        for _ in range(arguments.rounds + 1):
            for name in draw.sample(list(contestants), len(contestants)):
                read, act = contestants[name]
                forget(read.iterdir())
                started = time.perf_counter()
                act()
                taken[name].append(time.perf_counter() - started)
                shutil.rmtree(out)
    print(
        "| 2 GiB in bfloat16 | s, median | GB/s | of the copy's rate, median (quartiles) |\n|---|---|---|---|"
    )
    for name, times in taken.items():
        ratios = [
            copy_seconds / other for copy_seconds, other in zip(taken["copy"][1:], times[1:], strict=True)
        ]
        low, middle, high = quantiles(ratios, n=4)
        share = f"{100 * middle:.0f}% ({100 * low:.0f} to {100 * high:.0f})"
        print(f"| {name} | {median(times[1:]):.2f} | {size / median(times[1:]) / 1e9:.2f} | {share} |")
    print(f"\n{where()}")


if __name__ == "__main__":
    main()
