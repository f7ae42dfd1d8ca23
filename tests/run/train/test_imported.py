"""A published model becomes a run, is trained, and goes out again with all that came with it."""

from __future__ import annotations

import json
import runpy
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from pages import ROOT, run_here
from stretto.engine.checkpoint.huggingface.importing import import_huggingface
from stretto.engine.checkpoint.read import read_whole
from stretto.errors import StrettoError
from stretto.job.huggingface import shape_from_huggingface
from stretto.run.config.load import load
from stretto.run.config.required import check_required
from stretto.run.train.imported import import_model
from tiny_job import write_text

pytestmark = pytest.mark.apart

COPIED_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "Tiny Llama-3.1"
    runpy.run_path(str(ROOT / "examples" / "tiny_llama.py"))["main"](str(folder))
    return folder


@pytest.fixture
def source(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / published.name))


def body(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_config_describes_the_imported_model(source: Path, tmp_path: Path) -> None:
    imported = import_model(source, tmp_path / "run")
    config = load(imported.config, ["data.source=text"])
    want = shape_from_huggingface(body(source / "config.json"))
    assert imported.shape == config.shape() == want
    assert want.rope is not None
    assert (config.model.rope_theta, config.model.rope.type, config.model.rope.factor) == (5e5, "llama3", 8.0)
    assert config.train.dtype == imported.dtype == "bfloat16"
    assert config.data.sequence == 256
    assert config.run.name == "run-tuned"
    assert Path(config.checkpoint.resume) == imported.checkpoint
    assert config.data.tokenizer == str(tmp_path / "run" / "tokenizer.json")
    for name in COPIED_FILES:
        assert (tmp_path / "run" / name).read_bytes() == (source / name).read_bytes()
    with pytest.raises(StrettoError, match=r"data\.source"):
        check_required(load(imported.config))


def test_the_printed_command_trains_and_the_result_goes_out_whole(source: Path, tmp_path: Path) -> None:
    printed = run_here(["stretto", "checkpoint", "import", str(source), "--out", "runs/it"], tmp_path)
    command = shlex.split(printed.partition("next:\n")[2])
    assert command[:2] == ["stretto", "train"]
    write_text(tmp_path / "text.txt")
    small = [word.replace("python-stdlib", "text.txt") for word in command]
    assert small != command
    run_here([*small, "train.steps=2", "batch.global_size=2", "data.sequence=16"], tmp_path)
    for name in COPIED_FILES[1:]:
        assert (tmp_path / "runs" / "it-tuned" / name).read_bytes() == (source / name).read_bytes()
    export = ["stretto", "checkpoint", "export", "runs/it-tuned", "--out", "out", "--dtype", "bfloat16"]
    written = json.loads(run_here([*export, "--json"], tmp_path))
    assert sorted(written["files"]) == sorted(f"out/{path.name}" for path in (tmp_path / "out").iterdir())
    source_config, exported_config = body(source / "config.json"), body(tmp_path / "out" / "config.json")
    assert all(
        exported_config[name] == source_config[name]
        for name in (*IDS, "rope_parameters", "rms_norm_eps", "dtype")
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.dtype, model.generation_config.top_p) == (torch.bfloat16, 0.9)
    assert model.generation_config.eos_token_id == [1, 2]
    before = AutoModelForCausalLM.from_pretrained(source).state_dict()
    assert any(not torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    old, new = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "def f(x): return 'ä' <|eot_id|>"
    assert new(text)["input_ids"] == old(text)["input_ids"]
    assert (new.eos_token, new.chat_template) == (old.eos_token, old.chat_template)
    chat = [{"role": "user", "content": "hi"}]
    assert new.apply_chat_template(chat, tokenize=False) == old.apply_chat_template(chat, tokenize=False)


def test_import_and_export_bring_back_the_same_bits(source: Path, tmp_path: Path) -> None:
    run_here(["stretto", "checkpoint", "import", str(source), "--out", "run"], tmp_path)
    export = ["stretto", "checkpoint", "export", "run", "--out", "out", "--shard-gb", "0.001"]
    run_here(export, tmp_path)
    first, second = (AutoModelForCausalLM.from_pretrained(path) for path in (source, tmp_path / "out"))
    weights = second.state_dict()
    assert first.state_dict().keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in first.state_dict().items())
    assert first.config.to_dict()["rope_parameters"] == second.config.to_dict()["rope_parameters"]


def test_json_has_the_same_facts(source: Path, tmp_path: Path) -> None:
    report = json.loads(
        run_here(["stretto", "checkpoint", "import", str(source), "--out", "run", "--json"], tmp_path)
    )
    assert report["path"] == "run/checkpoints/step-00000000"
    assert report["config"] == "run/config.yaml"
    assert report["next"] == "stretto train run/config.yaml data.source=python-stdlib"
    assert (report["dtype"], report["bytes"]) == ("bfloat16", 2 * report["parameters"])
    assert (report["tokenizer"], report["notes"]) == ("run/tokenizer.json", [])


def test_a_run_of_our_own_goes_out_with_its_tokenizer(tmp_path: Path) -> None:
    """A byte-level BPE that training made needs no file that only Hugging Face writes."""
    write_text(tmp_path / "text.txt")
    overrides = "data.source=text.txt data.vocab=300"
    (tmp_path / "job.yaml").write_text("model: {family: llama, layers: 1, hidden: 16, heads: 2}\n")
    short = "train.steps=1 data.sequence=16 batch.global_size=2 batch.micro_size=2 sample.tokens=0"
    run_here(["stretto", "train", "job.yaml", *overrides.split(), *short.split()], tmp_path)
    run_here(["stretto", "checkpoint", "export", "runs/job", "--out", "out"], tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("some words")["input_ids"]) == "some words"
    assert tokenizer.eos_token == "<|endoftext|>"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert model.config.bos_token_id is None  # and not Llama's own
    assert GenerationConfig.from_pretrained(tmp_path / "out").pad_token_id is None


def test_training_with_another_tokenizer_is_refused(source: Path, tmp_path: Path) -> None:
    run_here(["stretto", "checkpoint", "import", str(source), "--out", "run"], tmp_path)
    write_text(tmp_path / "text.txt")
    arguments = ["run/config.yaml", "data.source=text.txt", "data.tokenizer=null", "data.vocab=384"]
    errors = run_here(["stretto", "train", *arguments, "train.steps=1"], tmp_path, code=2)
    assert "another tokenizer" in errors or "data's tokenizer has" in errors


def test_another_architecture_is_refused(source: Path, tmp_path: Path) -> None:
    run_here(["stretto", "checkpoint", "import", str(source), "--out", "run"], tmp_path)
    write_text(tmp_path / "text.txt")
    arguments = ["run/config.yaml", "data.source=text.txt", "model.rope.factor=4", "train.steps=1"]
    errors = run_here(["stretto", "train", *arguments], tmp_path, code=2)
    assert "its rope.factor is 8.0, the config's is 4.0" in errors
    assert "model.rope.factor=8.0" in errors


class TestWhatMayBeMissing:
    def test_without_a_tokenizer(self, source: Path, tmp_path: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (source / name).unlink()
        imported = import_model(source, tmp_path / "run")
        assert imported.tokenizer is None
        assert any("has no tokenizer.json" in note for note in imported.notes)
        assert load(imported.config).data.tokenizer is None

    def test_a_broken_tokenizer(self, source: Path, tmp_path: Path) -> None:
        (source / "tokenizer.json").write_text("{}")
        imported = import_model(source, tmp_path / "run")
        assert imported.tokenizer is None
        assert any("tokenizer is left out" in note for note in imported.notes)

    def test_without_generation_settings_the_ids_are_those_of_the_config(
        self, source: Path, tmp_path: Path
    ) -> None:
        (source / "generation_config.json").unlink()
        import_model(source, tmp_path / "run")
        generation = body(tmp_path / "run" / "generation_config.json")
        assert (generation["bos_token_id"], generation["eos_token_id"]) == (0, [1, 2])

    def test_a_key_that_is_not_known_is_said(self, source: Path, tmp_path: Path) -> None:
        config = body(source / "config.json")
        (source / "config.json").write_text(json.dumps({**config, "sideways_attention": True}))
        imported = import_model(source, tmp_path / "run")
        assert any("sideways_attention" in note for note in imported.notes)


def test_a_failed_import_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_model(source, tmp_path / "run", stop)
    assert not (tmp_path / "run").exists()
    import_model(source, tmp_path / "run")
    with pytest.raises(StrettoError, match="already holds checkpoints"):
        import_model(source, tmp_path / "run")
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy" / "metrics.jsonl").write_text("")
    with pytest.raises(StrettoError, match="already holds a run"):
        import_model(source, tmp_path / "busy")
    assert [path.name for path in (tmp_path / "busy").iterdir()] == ["metrics.jsonl"]


def test_the_weights_are_those_of_the_folder(source: Path, tmp_path: Path) -> None:
    imported = import_model(source, tmp_path / "run")
    plain = import_huggingface(source, tmp_path / "plain")
    imported_weights, expected = read_whole(imported.checkpoint)[0], read_whole(plain)[0]
    assert imported_weights.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in imported_weights.items())
