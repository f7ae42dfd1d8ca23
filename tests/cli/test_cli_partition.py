"""`stretto partition`: layers from a file, from a profile, of a known model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from command_line import CommandLine
from stretto.job.rules import problems
from stretto.run.config import load
from stretto.run.config.job import job_of
from tiny_job import write_text

MODEL = """
import torch
from torch import nn

def model():
    return [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)], torch.randn(2, 4)

def wrong():
    return 3
"""


def layers(*seconds: float) -> str:
    each = [
        {
            "name": f"l{at}",
            "forward_s": s,
            "backward_s": 2 * s,
            "parameter_bytes": 100,
            "activation_bytes": 10,
        }
        for at, s in enumerate(seconds)
    ]
    return json.dumps({"layers": each})


def test_a_profile_is_cut_and_the_answer_written(tmp_path: Path, stretto: CommandLine) -> None:
    file, out = tmp_path / "p.json", tmp_path / "cut.json"
    file.write_text(layers(1, 1, 1, 1, 4, 4))
    arguments = (
        "--profile",
        str(file),
        "--ranks",
        "2",
        "--microbatches",
        "4",
        "--states",
        "3",
        "--out",
        str(out),
    )
    partition = stretto.json("partition", *arguments)
    assert partition["cut"] == [[0, 5], [5, 6]]
    # rank 0 works through 4 microbatches of 24 and waits 4 for its first gradient
    assert partition["step_s"] == 4 * 24 + 4
    assert partition["busy_s"] == [96, 48]
    assert partition["step_s"] < partition["beside"]["layers"] == 3 * (12 + 3 * 9)
    assert partition["proved"]
    assert partition["stages"][0]["layers"][0] == "l0"
    assert sum(s["forward_s"] for s in partition["stages"]) == 12
    assert json.loads(out.read_text()) == partition
    first = partition["cut"][0][1]
    assert partition["memory_bytes"] == [300 * first + 2 * 10 * first, 300 * (6 - first) + 10 * (6 - first)]
    shown = stretto("partition", *arguments)
    assert "no cut is better" in shown
    assert "equal numbers of layers" in shown


def test_too_little_memory_is_the_answer_no(tmp_path: Path, stretto: CommandLine) -> None:
    file = tmp_path / "p.json"
    file.write_text(layers(1, 1, 1, 1).replace("100", str(2**30)))
    arguments = ["partition", "--profile", str(file), "--ranks", "2", "--microbatches", "4"]
    printed = stretto(*arguments, "--memory-gib", "7", code=1)
    assert "does not fit the 7.00 GiB of a rank: rank 0 (stage 0) needs 8.00 GiB, rank 1" in printed
    stretto(*arguments, "--memory-gib", "8.1")


def test_a_file_s_layers_are_measured(tmp_path: Path, stretto: CommandLine) -> None:
    file, saved = tmp_path / "mine.py", tmp_path / "saved.json"
    file.write_text(MODEL)
    how = ("--ranks", "2", "--microbatches", "2")
    partition = stretto.json("partition", f"{file}:model", *how, "--save-profile", str(saved))
    assert [name for s in partition["stages"] for name in s["layers"]] == ["0 Linear", "1 ReLU", "2 Linear"]
    assert [s["parameter_bytes"] for s in partition["stages"]] in ([80, 80], [80, 80][::-1])
    again = stretto.json("partition", "--profile", str(saved), *how)
    assert again == partition


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("mine.py:mode", "did you mean 'model'"),
        ("mine.py:wrong", "returns 1 thing"),
        ("mine.py", "does not name a function in a file"),
        ("other.py:model", "there is no file"),
        ("broken.py:model", "broken.py, line 1: NameError: name 'what' is not defined"),
    ],
)
def test_errors_in_a_file_are_named(source: str, message: str, tmp_path: Path, stretto: CommandLine) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "broken.py").write_text("what\ndef model(): ...")
    command = ["partition", f"{tmp_path}/{source}", "--ranks", "2", "--microbatches", "2"]
    assert message in stretto.error(*command)


def test_the_memory_of_the_device_counts(stretto: CommandLine) -> None:
    model = ["partition", "--model", "llama3-8b", "--ranks", "4", "--microbatches", "8"]
    arguments = [*model, "--cluster", "dgx-a100-80gb", "--sequence", "8192"]
    limited = stretto.json("partition", *arguments[1:])
    assert max(limited["memory_bytes"]) < limited["memory_limit_bytes"] < 80 * 2**30
    free = stretto.json("partition", *arguments[1:], "--memory-gib", "200", code=1)  # more than the card
    assert max(free["memory_bytes"]) > 80 * 2**30
    assert limited["step_s"] > free["step_s"]
    assert "MiB of a100-80gb-sxm, without what the allocator" in stretto(*arguments)


@pytest.mark.parametrize(
    ("more", "over", "room"),
    [  # no cut has room on the card; a limit that the user raises above the card
        (["--sequence", "32768"], [0, 1, 2, 3], "73.70"),
        (["--sequence", "8192", "--memory-gib", "200"], [0], "79.15"),
    ],
)
def test_a_cut_that_does_not_fit_is_named_by_rank(
    more: list[str], over: list[int], room: str, tmp_path: Path, stretto: CommandLine
) -> None:
    arguments = ["partition", "--model", "llama3-8b", "--ranks", "4", "--microbatches", "8"]
    arguments += ["--cluster", "dgx-a100-80gb", *more, "--write", str(tmp_path / "cut.yaml")]
    printed = stretto(*arguments, code=1)
    assert f"does not fit the {room} GiB of a rank: " in printed
    found = re.findall(r"rank (\d) \(stage (\d)\) needs ([0-9.]+) GiB", printed)
    assert [int(rank) for rank, _, _ in found] == over
    assert all(rank == stage and float(size) > float(room) for rank, stage, size in found)
    assert "--micro-batch" in printed
    assert not (tmp_path / "cut.yaml").exists()
    assert stretto.json(*arguments, code=1)["fits"] is False


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_known_model_s_head_weighs(schedule: str, stretto: CommandLine) -> None:
    arguments = ("--model", "llama3-8b", "--cluster", "a100-80gb-sxm", "--ranks", "4", "--microbatches", "16")
    partition = stretto.json("partition", *arguments, "--schedule", schedule, "--sequence", "2048")
    assert partition["cut"][0][0] == 0
    assert partition["cut"][-1][1] == 34  # embedding, 32 blocks, head
    assert partition["step_s"] <= min(partition["beside"].values())
    assert partition["step_s"] < partition["beside"]["layers"]
    assert partition["bound_s"] <= partition["step_s"] < 1.1 * partition["bound_s"]
    assert sum(s["parameter_bytes"] for s in partition["stages"]) == pytest.approx(2 * 8.03e9, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "2", "--microbatches", "2"], "no layers to cut"),
        (["x.py:f"], "needs --ranks and --microbatches"),
        (["x.py:f", "--model", "y", "--ranks", "2", "--microbatches", "2"], "both x.py:f and y"),
        (["--model", "llama3-8b", "--ranks", "2", "--microbatches", "2"], "needs a cluster"),
    ],
)
def test_missing_arguments_are_named(arguments: list[str], message: str, stretto: CommandLine) -> None:
    assert message in stretto.error("partition", *arguments)


def test_a_cut_is_written_as_a_config_that_training_takes(tmp_path: Path, stretto: CommandLine) -> None:
    path = tmp_path / "cut.yaml"
    arguments = ["--model", "llama3-8b", "--cluster", "h100", "--ranks", "4", "--microbatches", "8"]
    partition = stretto.json("partition", *arguments, "--write", str(path))
    job = job_of(load(str(path)))
    assert list(job.stage_layers or ()) == [stop - start for start, stop in partition["cut"]]
    assert (job.layout.pp, job.microbatches, problems(job)) == (4, 8, [])
    assert job.shape.vocab == 128256
    assert f"wrote {path}: stretto train {path} data.source=PATH" in stretto(
        "partition", *arguments, "--write", str(path)
    )
    assert "--write" in stretto.error("partition", "nowhere.py:model", "--write", str(path))


def test_a_written_cut_is_trained_equal_to_one_process(tmp_path: Path, stretto: CommandLine) -> None:
    """On two ranks; the wide head makes the cut uneven."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    model, path = tmp_path / "config.json", tmp_path / "cut.yaml"
    model.write_text(json.dumps({"model_type": "llama", "vocab_size": 600, **sizes}))
    arguments = ["--model", str(model), "--cluster", "h100", "--ranks", "2", "--microbatches", "4"]
    partition = stretto.json("partition", *arguments, "--sequence", "16", "--write", str(path))
    counts = [stop - start for start, stop in partition["cut"]]
    assert sum(counts) == 6
    text = write_text(tmp_path / "text.txt")
    data = [f"data.source={text}", f"data.cache={tmp_path}", "train.device=cpu"]
    (case,) = stretto.json("verify", str(path), *data)["layouts"]
    assert case["equal"], case
    assert f"stages={counts[0]}-{counts[1]}" in case["layout"]
