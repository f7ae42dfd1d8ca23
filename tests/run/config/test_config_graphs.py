"""What `train.graphs` does not go with is told before a process starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stretto.engine.device import has_graphs
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.pipeline import Pipeline
from stretto.errors import StrettoError
from stretto.layout.layout import Layout
from stretto.program import schedule
from stretto.run.config.check import check
from stretto.run.train.language_job import LANGUAGE
from stretto.run.train.launch import run_job
from tiny_job import LLAMA, job


@pytest.mark.parametrize(
    ("overrides", "rule", "fix"),
    [
        (("train.device=cpu",), "this torch has no graphs for device cpu", "train.device=auto"),
        (
            ("train.device=npu", "data.packing=documents"),
            "data.packing=documents attends by where documents begin",
            "data.packing=stream",
        ),
        (("train.device=npu", "metrics.trace=2"), "metrics.trace=2 times forward and backward apart", "=0"),
        (
            ("train.device=npu", "train.backend=gloo", "layout.tp=2"),
            "layout.tp=2 communicates within the graph",
            "train.backend=auto",
        ),
    ],
)
def test_what_graphs_do_not_go_with(tmp_path: Path, overrides: tuple[str, ...], rule: str, fix: str) -> None:
    with pytest.raises(StrettoError, match=rf"train\.graphs is microbatch: {rule}") as found:
        check(job(tmp_path, "train.graphs=microbatch", *overrides, model=LLAMA))
    assert str(found.value.hint).startswith("train.graphs=off, or ")
    assert fix in str(found.value.hint)
    check(job(tmp_path, *overrides, model=LLAMA))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="auto is no CPU here")
def test_auto_that_turns_out_to_be_a_cpu_is_refused_before_ranks_start(tmp_path: Path) -> None:
    assert not has_graphs("cpu")
    with pytest.raises(StrettoError, match="no graphs for device cpu"):
        run_job(
            LANGUAGE, job(tmp_path, "train.graphs=microbatch", "train.device=auto", model=LLAMA), quiet=True
        )


def test_a_pipeline_refuses_graphs_that_it_cannot_make() -> None:
    layers = [torch.nn.Linear(2, 2)]
    with pytest.raises(StrettoError, match="this torch has no graphs for device cpu"):
        Pipeline(layers, schedule("1f1b", 1, 1), Mesh(Layout(), "cpu"), graphs=True)
