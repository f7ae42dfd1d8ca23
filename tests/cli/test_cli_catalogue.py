"""`stretto catalogue`."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import CommandLine
from stretto.job.presets import PRESETS
from stretto.planner.machines.catalogue import clusters, entries


def test_everything_is_listed(stretto: CommandLine) -> None:
    listed = stretto.json("catalogue")
    assert [f["name"] for f in listed["devices"]] == [entry.device.name for entry in entries()]
    assert [f["name"] for f in listed["clusters"]] == [cluster.name for cluster in clusters()]
    assert [f["name"] for f in listed["models"]] == list(PRESETS)
    assert list(stretto.json("catalogue", "--only", "models")) == ["models"]


def test_the_text_names_all_of_them(stretto: CommandLine) -> None:
    text = stretto("catalogue")
    names = [entry.device.name for entry in entries()] + [cluster.name for cluster in clusters()]
    assert all(name in text for name in (*names, *PRESETS, "dlrm-dcnv2"))


def test_a_device_and_its_node(stretto: CommandLine) -> None:
    listed = stretto.json("catalogue", "NVIDIA H100 80GB HBM3")
    assert listed["device"]["tflops"]["bf16"] == 989
    assert listed["device"]["sustained_tflops"]["bf16"] == 794.5
    assert listed["cluster"]["name"] == "dgx-h100"
    assert listed["cluster"]["outer"] == {
        "kind": "InfiniBand NDR",
        "bandwidth_gbs": 50.0,
        "latency_us": 15.0,
        "sharp": False,
    }
    assert "ml-engineering" in listed["device"]["sources"]
    assert stretto.json("catalogue", "dgx-h100:64")["cluster"]["nodes"] == 8


def test_a_model(stretto: CommandLine) -> None:
    listed = stretto.json("catalogue", "DeepSeek-V3")["model"]
    assert listed["parameters"] == 671_026_419_200
    assert listed["trains_here"]
    listed = stretto.json("catalogue", "nemotron4-15b")["model"]
    assert not listed["trains_here"]
    assert "an MLP of kind relu2" in listed["not_built_yet"]
    assert stretto.json("catalogue", "llama3-8b")["model"]["trains_here"]
    assert "8,190,735,360" in stretto("catalogue", "qwen3-8b")


def test_a_recommender(stretto: CommandLine) -> None:
    assert stretto.json("catalogue", "dlrm-dcnv2")["recommender"]["dense_parameters"] == 16_044_545
    assert "and 18 more" in stretto("catalogue", "dlrm-dot")


def test_a_file(stretto: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("like: dgx-h100\nnodes: 4\nprice: 2.5\n")
    listed = stretto.json("catalogue", str(file))
    assert listed["cluster"]["nodes"] == 4
    assert listed["cluster"]["price"] == 2.5
    assert listed["device"]["name"] == "h100-80gb-sxm"
    assert "sources" not in listed["device"]


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("h1000", "no device, cluster or model is known as 'h1000'", "dgx-h100"),
        ("nemotronh-8b", "has blocks of Mamba", "can be planned"),
        ("none.yaml", "cannot read none.yaml", "check"),
        ("none.json", "cannot read none.json", "check"),
    ],
)
def test_what_is_not_known(stretto: CommandLine, name: str, message: str, hint: str) -> None:
    error = stretto.error("catalogue", name)
    assert message in error
    assert hint in error
