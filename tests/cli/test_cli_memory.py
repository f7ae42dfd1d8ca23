"""`stretto memory`."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import CommandLine

CONFIGS = Path(__file__).parents[2] / "configs"
QUICK = str(CONFIGS / "quickstart.yaml")


def test_json_adds_up(stretto: CommandLine) -> None:
    report = stretto.json("memory", QUICK)
    assert len(report["ranks"]) == 2
    for rank in report["ranks"]:
        kinds = ("weights", "gradients", "optimizer", "activations", "ends", "messages", "transient")
        assert rank["total"] == sum(rank[kind] for kind in (*kinds, "versions", "batch"))
        assert rank["states"] == rank["weights"] + rank["gradients"] + rank["optimizer"]
        assert rank["states"] < rank["held"] <= rank["total"]
    assert report["fullest"] == 0
    assert report["modes"] == ["none"] * 4
    assert report["measured"] is None
    assert {suggestion["setting"] for suggestion in report["advice"]} == {"recompute.mode=full"}
    names = [tensor["name"] for tensor in report["block"]]
    assert "mlp.down input" in names


def test_a_paper_s_formula_stands_beside_the_tensors(stretto: CommandLine) -> None:
    overrides = ["model.dropout=0.1", "layout.dp=1", "layout.tp=2", "layout.pp=1"]
    report = stretto.json("memory", QUICK, *overrides)
    assert report["published"] is None  # of 32 bits
    text = stretto("memory", QUICK, *overrides)
    assert "attn.core probabilities" in text
    assert "4as^2b/t" in text
    assert "recompute.mode=selective saves" in text
    assert "layout.sequence_parallel=true saves" in text


@pytest.mark.parametrize(
    "name", ["gpt2-124m", "llama-1b-64gpu", "llama-tiny-tp2", "pipedream-2bw", "quickstart", "zero-bubble"]
)
def test_shipped_configs(name: str, stretto: CommandLine) -> None:
    text = stretto("memory", str(CONFIGS / f"{name}.yaml"))
    assert "one block keeps" in text
    assert "fullest: pipeline rank" in text


def test_auto_chooses_within_the_budget(stretto: CommandLine) -> None:
    free = stretto.json("memory", QUICK)
    most = max(rank["total"] for rank in free["ranks"])
    budget = 0.8 * most / 2**30
    report = stretto.json("memory", QUICK, "recompute.mode=auto", f"recompute.memory_gib={budget}")
    assert max(rank["total"] for rank in report["ranks"]) <= 0.8 * most
    assert set(report["modes"]) > {"none"}


def test_what_does_not_fit_or_is_not_legal_is_refused(stretto: CommandLine) -> None:
    error = stretto.error("memory", QUICK, "recompute.mode=auto", "recompute.memory_gib=0.001")
    assert "recompute.memory_gib is 0.001: pipeline rank" in error
    assert "hint: recompute.memory_gib=" in error
    assert "layout.tp is 3" in stretto.error("memory", QUICK, "layout.tp=3")


def test_measured_beside_predicted(stretto: CommandLine) -> None:
    sizes = ["layout.dp=1", "layout.pp=1", "model.hidden=64", "model.layers=2", "batch.global_size=8"]
    report = stretto.json("memory", QUICK, *sizes, "data.vocab=300", "--measure")
    (rank,) = report["measured"]
    assert rank["predicted_peak"] == report["ranks"][0]["total"]
    assert abs(rank["error"]) < 0.03
    assert rank["kinds"]["weights"] == report["ranks"][0]["weights"]
    assert rank["kinds"]["gradients"] == report["ranks"][0]["gradients"]
    assert rank["kinds"]["optimizer"] == report["ranks"][0]["optimizer"]


def test_modes_side_by_side(stretto: CommandLine) -> None:
    report = stretto.json("memory", QUICK, "--modes", "train.dtype=bfloat16", "optim.name=adamw")
    assert report["copies"] == 2
    by_mode = {row["mode"]: row for row in report["modes"]}
    assert list(by_mode) == ["server", "ddp", "zero1", "zero2", "zero3"]
    assert by_mode["ddp"]["states"] == by_mode["server"]["states"] > by_mode["zero1"]["states"]
    assert by_mode["zero3"]["weights"] < 0.51 * by_mode["zero2"]["weights"]
    # 32 bits of gradients where the paper has 16
    gradients = by_mode["ddp"]["gradients"]
    assert by_mode["ddp"]["states"] - gradients / 2 == pytest.approx(by_mode["ddp"]["published"], rel=1e-2)
    text = stretto(
        "memory", QUICK, "--modes", "schedule.name=pipedream", "optim.clip=null", "model.tied=false"
    )
    assert "ZeRO paper" in text
    assert "2 ranks have the same parameters" in text
    assert "zero3: dp.mode is zero3: schedule pipedream updates each stage" in text


def test_sharded_bytes_are_those_of_the_configured_mode(stretto: CommandLine) -> None:
    report = stretto.json(
        "memory", QUICK, "dp.mode=zero3", "train.dtype=bfloat16", "train.device=cuda", "dp.offload=cpu"
    )
    rank = report["ranks"][0]
    assert rank["masters"] == rank["optimizer"] == 0 < rank["host"]
    assert rank["gathered"] > 0
    kinds = ("weights", "gradients", "optimizer", "activations", "ends", "messages", "transient", "batch")
    assert rank["total"] == sum(rank[kind] for kind in (*kinds, "gathered", "open", "versions", "masters"))
    headers = [
        line
        for line in stretto(
            "memory", QUICK, "dp.mode=zero3", "dp.offload=cpu", "train.device=cuda"
        ).splitlines()
        if line.strip().startswith("rank ")
    ]
    assert headers[1].split() == ["rank", "gathered", "open", "host"]


def test_modes_of_a_job_that_is_not_legal(stretto: CommandLine) -> None:
    assert "layout.tp is 3" in stretto.error("memory", QUICK, "--modes", "layout.tp=3")
