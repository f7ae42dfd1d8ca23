"""Runs of sharded layouts, exported: `transformers` computes what the run's model computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from stretto.cli.main import run
from stretto.engine.checkpoint.read import read_whole
from stretto.engine.models.build import build
from tiny_job import GPT, LLAMA, job
from train_runs import train

MIXTRAL = "{family: llama, layers: 2, hidden: 32, heads: 4, ffn: 32, moe: {experts: 4}}"
LAYOUTS = {
    "zero3": (LLAMA, "layout.dp=2", "dp.mode=zero3"),
    "pp2": (GPT, "layout.pp=2"),
    "pp2 with a shared embedding": (LLAMA.replace("}", ", tied: true}"), "layout.pp=2", "schedule.name=zb-v"),
    "tp2 zero3": (LLAMA, "layout.tp=2", "layout.dp=2", "dp.mode=zero3"),
    "tp2 zero3 experts": (MIXTRAL, "layout.tp=2", "layout.dp=2", "layout.ep=2",
                          "dp.mode=zero3"),
}  # fmt: skip


QUICK = ("pp2 with a shared embedding", "tp2 zero3 experts")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_the_export_of_a_sharded_run_computes_the_same(name: str, tmp_path: Path) -> None:
    model, *layout = LAYOUTS[name]
    config = job(tmp_path, *layout, "train.steps=3", "run.name=sharded", model=model)
    train(config)
    out = tmp_path / "out"
    assert run(["checkpoint", "export", str(config.run.folder), "--out", str(out)]) == 0
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    weights, _ = read_whole(config.run.folder / "checkpoints" / "step-00000003")
    trained = build(config.shape(300)).eval()
    trained.load_state_dict(weights, strict=False)
    trained.tie()
    ids = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, logits = trained(ids), exported(ids).logits
    assert float((logits - want).abs().max() / want.abs().max()) < 1e-5
    fresh = build(config.shape(300)).eval()
    with torch.no_grad():
        assert float((fresh(ids) - want).abs().max() / want.abs().max()) > 0.1
