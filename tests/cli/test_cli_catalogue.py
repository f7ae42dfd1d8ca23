"""`stretto catalogue`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.cli import main
from stretto.planner.machines.catalogue import clusters, entries
from stretto.spec.presets import PRESETS


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main.run(["catalogue", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_everything_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = run_json(capsys)
    assert [f["name"] for f in listed["devices"]] == [entry.device.name for entry in entries()]
    assert [f["name"] for f in listed["clusters"]] == [cluster.name for cluster in clusters()]
    assert [f["name"] for f in listed["models"]] == list(PRESETS)
    assert list(run_json(capsys, "--only", "models")) == ["models"]


def test_the_text_names_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["catalogue"]) == 0
    text = capsys.readouterr().out
    names = [entry.device.name for entry in entries()] + [cluster.name for cluster in clusters()]
    assert all(name in text for name in (*names, *PRESETS, "dlrm-dcnv2"))


def test_a_device_and_its_node(capsys: pytest.CaptureFixture[str]) -> None:
    listed = run_json(capsys, "NVIDIA H100 80GB HBM3")
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
    assert run_json(capsys, "dgx-h100:64")["cluster"]["nodes"] == 8


def test_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    listed = run_json(capsys, "DeepSeek-V3")["model"]
    assert listed["parameters"] == 671_026_419_200
    assert listed["trains_here"]
    listed = run_json(capsys, "nemotron4-15b")["model"]
    assert not listed["trains_here"]
    assert "an MLP of kind relu2" in listed["not_built_yet"]
    assert run_json(capsys, "llama3-8b")["model"]["trains_here"]
    assert main.run(["catalogue", "qwen3-8b"]) == 0
    assert "8,190,735,360" in capsys.readouterr().out


def test_a_recommender(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "dlrm-dcnv2")["recommender"]["dense_parameters"] == 16_044_545
    assert main.run(["catalogue", "dlrm-dot"]) == 0
    assert "and 18 more" in capsys.readouterr().out


def test_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("like: dgx-h100\nnodes: 4\nprice: 2.5\n")
    listed = run_json(capsys, str(file))
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
def test_what_is_not_known(capsys: pytest.CaptureFixture[str], name: str, message: str, hint: str) -> None:
    assert main.run(["catalogue", name]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert hint in error
