"""What the campaign verifies: jobs of a few thousand parameters, by name."""

from __future__ import annotations

from pathlib import Path

from tiny_job import GPT, LLAMA, MOE, job_file

_MODELS = {"gpt": GPT, "llama": LLAMA, "moe": MOE}
_CLICKS = """
model:
  family: dlrm
  dense: 4
  bottom: [6, 8]
  top: [7, 1]
  tables: {tables}
data: {synthetic: {samples: 2000}}
layout: {ranks: 2}
batch: {global_size: 33}
optim: {dense: {lr: 0.02}, tables: {lr: 0.05}}
train: {steps: 6, device: cpu, seed: 3, timeout_s: 60}
"""
_WIDE = "[{rows: 300}, {rows: 90, pooling: mean}, {rows: 40, ids: quotient-remainder, divisor: 7}"
_HASHED = (
    "{rows: 12, ids: hash, evict_every: 2}, {rows: 6, ids: hash, admit: 2, evict_every: 2, pooling: mean}, "
    "{rows: 200, ids: hash, evict: age, max_age: 1, evict_every: 1}"
)
_TABLES = {
    "clicks": f"{_WIDE}, {_HASHED}]",
    "wide": f"{_WIDE}]",  # hash tables are not copied or moved
    "large": "[{rows: 3000}, {rows: 2000, pooling: mean}]",  # ids seldom repeat: copies send bags
}
JOBS = (*_MODELS, *_TABLES)


def write_job(name: str, folder: Path) -> Path:
    """The config of a job; its text, cache and runs lie in `folder`."""
    if name in _MODELS:
        return job_file(folder, _MODELS[name])
    path = folder / "clicks.yaml"
    path.write_text(_CLICKS.replace("{tables}", _TABLES[name]), encoding="utf-8")
    return path
