from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest

from command_line import CommandLine
from stretto.engine.checkpoint.manifest import read_manifest
from stretto.engine.checkpoint.save import save
from stretto.engine.models.build import build
from stretto.engine.parallel.fragment import ShardPlacement
from stretto.job.families import FAMILIES
from stretto.job.shape import ModelShape, shape_to_record

SHAPE = ModelShape(family="gpt", layers=1, hidden=8, heads=2, vocab=11, sequence=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with steps 10 and 20."""
    weights = dict(build(SHAPE).named_parameters())
    state = {f"model.{n}": (w, ShardPlacement.unsharded(n, tuple(w.shape))) for n, w in weights.items()}
    for step in (10, 20):
        save(tmp_path / "run" / "checkpoints", step, state, {"model": shape_to_record(SHAPE)})
    return tmp_path / "run"


def damage(folder: Path) -> None:
    file = folder / "checkpoints" / "step-00000020" / "shard-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("inner", ["", "checkpoints"])
@pytest.mark.parametrize("command", ["list", "verify"])
def test_whole(folder: Path, stretto: CommandLine, command: str, inner: str) -> None:
    answered = stretto.json("checkpoint", command, folder / inner)
    assert answered["ok"]
    assert [
        (checkpoint["step"], checkpoint["ok"], checkpoint["world"]) for checkpoint in answered["checkpoints"]
    ] == [
        (20, True, 1),
        (10, True, 1),
    ]
    assert answered["checkpoints"][0]["meta"] == {"model": shape_to_record(SHAPE)}


def test_damage(folder: Path, stretto: CommandLine) -> None:
    damage(folder)
    answered = stretto.json("checkpoint", "verify", folder, code=1)
    assert [checkpoint["ok"] for checkpoint in answered["checkpoints"]] == [False, True]
    assert "shard-00000.safetensors: crc32 is" in answered["checkpoints"][0]["problems"][0]
    assert stretto.json("checkpoint", "list", folder)["ok"], "list does not read contents"
    assert stretto.json("checkpoint", "verify", folder / "checkpoints" / "step-00000010")["ok"]
    (folder / "checkpoints" / "step-00000020" / "manifest.json").unlink()
    answered = stretto.json("checkpoint", "list", folder)
    assert not answered["ok"]
    assert answered["checkpoints"][0]["problems"] == ["file manifest.json is missing"]
    assert (
        stretto.json("checkpoint", "verify", folder / "checkpoints" / "step-00000020", code=1)["ok"] is False
    )


def test_text(folder: Path, stretto: CommandLine) -> None:
    damage(folder)
    lines = [
        line for line in stretto("checkpoint", "verify", str(folder), code=1).splitlines() if line.strip(" ─")
    ]
    assert lines[0].split() == ["step", "size", "ranks", "saved", "state"]
    assert (lines[1].split()[0], lines[1].split()[-1]) == ("20", "damaged")
    assert (lines[2].split()[0], lines[2].split()[-1]) == ("10", "whole")
    assert lines[3].startswith(f"{folder}/checkpoints/step-00000020: file shard-00000.safetensors: crc32 is")


def test_export_takes_the_newest_whole_checkpoint_and_import_restores_it(
    folder: Path, tmp_path: Path, stretto: CommandLine
) -> None:
    damage(folder)
    answered = stretto.json("checkpoint", "export", folder, "--out", tmp_path / "hf")
    assert answered["checkpoints"][0]["path"].endswith("step-00000010")
    assert all(Path(file).is_file() for file in answered["files"])
    answered = stretto.json("checkpoint", "import", tmp_path / "hf", "--out", tmp_path / "new")
    assert (
        stretto.json("checkpoint", "verify", tmp_path / "new")["checkpoints"][0]["path"] == answered["path"]
    )
    assert "step-00000020 is damaged" in stretto.error(
        "checkpoint", "export", str(folder), "--out", str(tmp_path / "hf2"), code=0
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "nowhere"], "no checkpoint at nowhere"),
        (["verify", "."], "no checkpoint at ."),
        (["export", "nowhere", "--out", "x"], "no checkpoint at nowhere"),
        (["import", "nowhere", "--out", "x"], "nowhere/config.json does not exist"),
        (["export", "nowhere"], "Missing option '--out'"),
        (["export", "nowhere", "--out", "x", "--shard-gb", "0"], "--shard-gb"),
        (["export", "nowhere", "--out", "x", "--shard-gb", "nan"], "--shard-gb is nan"),
    ],
)
def test_bad_input(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stretto: CommandLine,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = stretto.error("checkpoint", *arguments).splitlines()
    assert message in lines[0]
    assert lines[0].startswith("error: ")
    assert len(lines) == 2


def test_a_folder_of_runs_is_answered_with_their_names(
    folder: Path, tmp_path: Path, stretto: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    for number in range(10):
        copytree(folder / "checkpoints", home / "runs" / f"run{number}" / "checkpoints")
    (home / "runs" / "empty").mkdir()
    monkeypatch.chdir(home)
    names = "hint: name one of the runs there: runs/run0, runs/run1, runs/run2,"
    for path in ("runs", "."):
        for command in (["checkpoint", "list"], ["checkpoint", "verify"], ["generate"], ["evaluate"]):
            assert names in (error := stretto.error(*command, path))
            assert "runs/run7 and 2 more" in error
            assert "empty" not in error


# how the help calls each family
NAMES = {
    "gpt": "GPT-2",
    "qwen2_moe": "with and without experts",
    "qwen3_moe": "with and without experts",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 2 and 3",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V2 and V3",
    "t5": "T5",
    "bart": "BART",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_help_of_import_names_every_family(family: str, stretto: CommandLine) -> None:
    printed = " ".join(stretto("checkpoint", "import", "--help").split())
    assert NAMES.get(family, family.capitalize()) in printed


def test_list_and_verify_import_no_torch(folder: Path) -> None:
    code = (
        "import sys; from stretto.cli.main import run\n"
        f"assert [run(['checkpoint', name, {str(folder)!r}]) for name in ('list', 'verify')] == [0, 0]\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_distributed_checkpoints_go_out_and_come_back(tmp_path: Path, stretto: CommandLine) -> None:
    shape = ModelShape(family="llama", layers=1, hidden=8, heads=2, ffn=8, vocab=300, sequence=16)
    weights = dict(build(shape).named_parameters())
    state = {f"model.{n}": (w, ShardPlacement.unsharded(n, tuple(w.shape))) for n, w in weights.items()}
    save(tmp_path / "run" / "checkpoints", 10, state, {"model": shape_to_record(shape)})
    model = tmp_path / "model.yaml"
    model.write_text(
        "model: {family: llama, layers: 1, hidden: 8, heads: 2, ffn: 8}\n"
        "data: {source: python-stdlib, vocab: 300, sequence: 16}\n"
    )
    out = tmp_path / "dcp"
    answered = stretto.json("checkpoint", "export", tmp_path / "run", "--format", "dcp", "--out", out)
    assert [Path(file).name for file in answered["files"]] == [".metadata", "__0_0.distcp"]
    assert answered["notes"] == ["the checkpoint has no states of an optimiser: the model alone was written"]
    back = stretto.json(
        "checkpoint", "import", out, "--format", "dcp", "--model", model, "--out", tmp_path / "back"
    )
    assert (back["path"], back["dtype"]) == (str(tmp_path / "back/checkpoints/step-00000000"), "float32")
    assert stretto.json("checkpoint", "verify", tmp_path / "back")["ok"]
    for arguments, message in (
        (["--format", "dcp"], "--format dcp needs --model"),
        (["--format", "dcp", "--model", "llama3-8b"], "tok_embeddings.weight has shape [300, 8] in"),
        (["--model", str(model)], "--model and --weights-only are of --format dcp"),
        ([], "is a checkpoint of torch.distributed.checkpoint"),
    ):
        assert message in stretto.error(
            "checkpoint", "import", str(out), *arguments, "--out", str(tmp_path / "no")
        )
        assert not (tmp_path / "no").exists()


def test_checkpoints_of_megatron_go_out_and_come_back(tmp_path: Path, stretto: CommandLine) -> None:
    shape = ModelShape(family="llama", layers=2, hidden=8, heads=2, ffn=8, vocab=300, sequence=16)
    weights = dict(build(shape).named_parameters())
    state = {f"model.{n}": (w, ShardPlacement.unsharded(n, tuple(w.shape))) for n, w in weights.items()}
    save(tmp_path / "run" / "checkpoints", 10, state, {"model": shape_to_record(shape)})
    out = tmp_path / "megatron"
    answered = stretto.json("checkpoint", "export", tmp_path / "run", "--format", "megatron", "--out", out)
    names = [Path(file).name for file in answered["files"]]
    assert names == [
        ".metadata",
        "__0_0.distcp",
        "common.pt",
        "metadata.json",
        "latest_checkpointed_iteration.txt",
    ]
    back = stretto.json("checkpoint", "import", out, "--format", "megatron", "--out", tmp_path / "back")
    assert (back["path"], back["dtype"]) == (str(tmp_path / "back/checkpoints/step-00000000"), "float32")
    assert stretto.json("checkpoint", "verify", tmp_path / "back")["ok"]
    shapes = [read_manifest(path).meta["model"] for path in (tmp_path / "back/checkpoints").glob("step-*")]
    assert shapes[0]["ffn"] == 8
    for arguments, message in (
        ([], "is a checkpoint of Megatron"),
        (["--format", "megatron", "--model", "llama3-8b"], "has shape"),
    ):
        assert message in stretto.error(
            "checkpoint", "import", str(out), *arguments, "--out", str(tmp_path / "no")
        )
        assert not (tmp_path / "no").exists()
