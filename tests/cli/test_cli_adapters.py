"""From a published model through LoRA to adapters and merged weights, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from typer.testing import CliRunner

from stretto.cli.main import app
from stretto.engine.checkpoint.read import read_whole
from stretto.job.lora import is_adapter
from tiny_job import write_text


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of transformers', without a tokenizer."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("published")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def stretto(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def tuned(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has trained adapters on two tensor-parallel ranks."""
    runs = tmp_path_factory.mktemp("runs")
    imported = stretto("checkpoint", "import", str(base), "--out", str(runs / "base"))
    text = write_text(runs / "text.txt")
    stretto(
        "train",
        imported["config"],
        *(f"data.source={text}", "data.vocab=300", f"data.cache={runs / 'cache'}", "data.sequence=16"),
        *(
            "lora.rank=4",
            "lora.alpha=16",
            "layout.tp=2",
            "train.steps=4",
            "train.device=cpu",
            "optim.lr=0.05",
        ),
        *("train.vocab_multiple=1", "run.name=tuned"),
    )
    return runs / "tuned"


def test_adapters_and_merged_weights_compute_what_the_run_does(
    base: Path, tuned: Path, tmp_path: Path
) -> None:
    stretto("checkpoint", "export", str(tuned), "--adapters", "--out", str(tmp_path / "adapters"))
    stretto("checkpoint", "export", str(tuned), "--merge", "--out", str(tmp_path / "merged"))
    ids = torch.randint(300, (2, 16))
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    before = plain(ids).logits
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    adapted = PeftModel.from_pretrained(plain, str(tmp_path / "adapters"))(ids).logits
    assert (adapted - before).abs().max() > 0.1
    torch.testing.assert_close(adapted, merged, rtol=1e-5, atol=1e-5)


def test_adapters_come_back_with_their_base(base: Path, tuned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    stretto("checkpoint", "export", str(tuned), "--adapters", "--out", str(folder))
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    imported = stretto(
        "checkpoint", "import", str(base), "--adapters", str(folder), "--out", str(tmp_path / "back")
    )
    trained, _ = read_whole(tuned / "checkpoints" / "step-00000004")
    reimported, _ = read_whole(imported["path"])
    assert trained.keys() == reimported.keys()
    assert all(torch.equal(trained[name], reimported[name]) for name in trained)
    assert sum(map(is_adapter, trained)) == 2 * 2 * 7
    size = sum(tensor.nbytes for tensor in load_file(folder / "adapter_model.safetensors").values())
    assert size == sum(tensor.nbytes for name, tensor in trained.items() if is_adapter(name))
    text = write_text(tmp_path / "text.txt")
    stretto(
        "train",
        imported["config"],
        *(f"data.source={text}", "data.vocab=300", f"data.cache={tmp_path / 'cache'}", "data.sequence=16"),
        *("train.steps=1", "train.device=cpu", "run.name=further"),
    )


@pytest.mark.parametrize(
    ("options", "phrase"),
    [((), "has adapters"), (("--adapters", "--merge"), "--adapters and --merge")],
)
def test_an_export_says_what_becomes_of_adapters(
    tuned: Path, tmp_path: Path, options: tuple[str, ...], phrase: str
) -> None:
    result = CliRunner().invoke(
        app, ["checkpoint", "export", str(tuned), "--out", str(tmp_path / "out"), *options]
    )
    assert result.exit_code != 0
    assert phrase in result.output + str(result.exception)
