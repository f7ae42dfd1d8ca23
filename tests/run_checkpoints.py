"""A checkpoint as two ranks of a language model's run write it, without training one; and its metadata forged
with right checksums.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stretto.engine.checkpoint.files import dump_json
from stretto.engine.checkpoint.index import read_index, write_index
from stretto.engine.checkpoint.manifest import MANIFEST, load_manifest, tally, write_manifest
from stretto.engine.checkpoint.save import save
from stretto.engine.parallel.fragment import ShardPlacement
from stretto.job.parameters import parameter_shapes
from stretto.job.shape import shape_to_record
from stretto.run.config.load import parse
from stretto.run.config.section import plain_section

CONFIG = """
model: {family: llama, layers: 2, hidden: 8, heads: 2, kv_heads: 1, ffn: 8, vocab: 16}
data: {sequence: 8}
layout: {dp: 2}
batch: {global_size: 4, micro_size: 1}
train: {steps: 90, seed: 1}
guard: {on_spike: skip}
"""
JOB = parse(CONFIG)
SHAPE = JOB.shape()
META: dict[str, Any] = {
    "step": 80,
    "samples": 324,
    "counted_from": {"step": 40, "samples": 164},
    "tokens": 2560,
    "targets": 2500,
    "loss": 1.5,
    "held_out_loss": None,
    "updates": 79,
    "skipped": [[4, 8], [160, 164]],
    "history": [[1.5, 0.25], [1.25, None]],
    "seed": 1,
    "loss_scale": {"value": 65536.0, "good": 3, "skipped": 0},
    "model": shape_to_record(SHAPE),
    "layout": JOB.layout.to_layout().describe(),
    "schedule": "1f1b",
    "tokenizer": "0123456789abcdef",
    "text": {"sha256": "0123", "sequence": 8, "mixture": [{"sha256": "0123", "weight": 0.5}]},
    "config": plain_section(JOB),
}


def run_checkpoint(folder: Path, meta: dict[str, Any] = META) -> Path:
    """The checkpoint of step 80, with the random states of two ranks."""
    tensors = {
        f"{kind}.{name}": (torch.zeros(sizes), ShardPlacement.unsharded(name, sizes))
        for name, sizes in parameter_shapes(SHAPE).items()
        for kind in ("model", "optim.exp_avg", "optim.exp_avg_sq")
    }
    per_rank = {"cpu": torch.zeros(4, dtype=torch.uint8)}
    path = save(folder, 80, tensors, {}, per_rank=per_rank)
    manifest, index = load_manifest(path), read_index(path, load_manifest(path).files)
    # the second rank's random state lies in the first one's file, as those of one process do
    index["per_rank.00001.cpu"] = index["per_rank.00000.cpu"]
    (path / "metadata.json").unlink()
    files = {**manifest.files, "metadata.json": write_index(path, index)}
    (path / MANIFEST).unlink()
    count, dtypes = tally(index)
    write_manifest(path, replace(manifest, files=files, tensors=count, dtypes=dtypes, world=2))
    forge(path, meta=meta)
    return path


def forge(path: Path, **fields: Any) -> None:
    """Change fields of the manifest, as an attacker would."""
    body: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())
    body.pop("crc32")
    body |= fields
    (path / MANIFEST).write_bytes(dump_json({**body, "crc32": f"{zlib.crc32(dump_json(body)):08x}"}))
