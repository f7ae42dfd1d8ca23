from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.job.huggingface import shape_from_huggingface
from stretto.recommender.config.load import load_config, parse_config
from stretto.run.config.load import dump, load, parse
from stretto.run.config.schema import TrainConfig
from stretto.run.config.source import DEEPEST
from stretto.run.config.validation import read_section

MODEL = "model: {family: gpt, layers: 2, hidden: 64, heads: 4}\n"


def fails(text: str, *overrides: str) -> StrettoError:
    with pytest.raises(StrettoError) as caught:
        parse(text, "job.yaml", overrides)
    return caught.value


def test_defaults_and_set_values() -> None:
    config = parse(MODEL + "layout: {dp: 2, pp: 4}\nbatch:\n  global_size: 64\n  micro_size: 4\n")
    assert config.microbatches == 8
    assert config.layout.to_layout().world == 8
    assert config.optim.betas == (0.9, 0.95)
    assert config.optim.rate.schedule == "cosine"
    shape = config.shape()
    assert (shape.ffn, shape.vocab, shape.sequence, shape.tied) == (256, 4096, 128, True)
    assert config.shape(vocab=300).vocab == 300


def test_the_run_is_named_after_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my first run.v2.yaml"
    path.write_text(MODEL)
    assert load(path).run.name == "my-first-run.v2"
    assert load(path, ["run.name=other"]).run.name == "other"
    assert load(path, ["run.dir=there"]).run.folder == Path("there/my-first-run.v2")


def test_a_preset_with_changed_sizes() -> None:
    config = parse("model: {preset: llama3-8b, hidden: 2048, heads: 16, layers: 4}\ndata: {vocab: 512}\n")
    shape = config.shape()
    assert (shape.family, shape.layers, shape.hidden, shape.kv_heads) == ("llama", 4, 2048, 16)
    assert (shape.head_dim, shape.ffn) == (128, 5632), "the family's usual values, not those of 8b"
    assert (shape.rope_theta, shape.sequence, shape.vocab) == (500000.0, 8192, 512)
    plain = parse("model: {preset: llama3-8b}").shape(128256)
    assert (plain.kv_heads, plain.ffn, plain.tied) == (8, 14336, False)


def test_vocab_and_positions_of_the_model_win() -> None:
    config = parse("model: {preset: gpt2, vocab: 50304, positions: 2048, dropout: 0.1}\n")
    shape = config.shape(vocab=50257)
    assert (shape.vocab, shape.sequence, shape.dropout) == (50304, 2048, 0.1)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (MODEL + "optim:\n  lrr: 1.0\n", "job.yaml:3: there is no field optim.lrr", "did you mean optim.lr?"),
        (MODEL + "optm:\n  lr: 1.0\n", "job.yaml:2: there is no field optm", "did you mean optim?"),
        (MODEL + "lr: 1.0\n", "job.yaml:2: there is no field lr", "did you mean optim.lr?"),
        (
            MODEL + "optim:\n  rate:\n    warmup: 1.5\n",
            "job.yaml:4: optim.rate.warmup is 1.5: a fraction of the steps must be below 1",
            "2 for 2 steps",
        ),
        (
            MODEL + "train:\n  warmup: 3\n",
            "there is no field train.warmup",
            "did you mean optim.rate.warmup?",
        ),
        (
            MODEL + "optim:\n  rate:\n    min_ration: 0.1\n",
            "job.yaml:4: there is no field optim.rate.min_ration",
            "did you mean optim.rate.min_ratio?",
        ),
        (
            MODEL + "train:\n  steps: many\n",
            "job.yaml:3: train.steps is 'many', must be a whole number above 0",
            None,
        ),
        (MODEL + "train:\n  steps: 0\n", "train.steps is 0, must be a whole number above 0", None),
        (MODEL + "train:\n  steps: 1e3\n", "train.steps is 1000.0, must be", "write 1000"),
        (MODEL + "train:\n  steps: 1_000\n", "train.steps is '1_000', must be", "write 1000"),
        (MODEL + "train:\n  steps: true\n", "train.steps is true, must be a whole number above 0", None),
        (MODEL + "optim: {lr: -1}\n", "optim.lr is -1, must be a number above 0", None),
        (MODEL + "optim: {lr: .inf}\n", "optim.lr is inf, must be finite", None),
        (MODEL + "optim: {lr: .nan}\n", "optim.lr is nan, must be", None),
        (
            MODEL + "optim: {clip: off}\n",
            "optim.clip is 'off', must be a number above 0, or null",
            "write null",
        ),
        (
            MODEL + "optim: {name: adam}\n",
            "optim.name is 'adam', must be one of",
            "did you mean adamw?",
        ),
        (MODEL + "optim: {betas: [0.9]}\n", "optim.betas is [0.9], must be a list of two numbers", None),
        (MODEL + "optim: {betas: [0.9, '1']}\n", "optim.betas is [0.9, '1'], must be a list of two", None),
        (MODEL + "checkpoint: {async_save: yes}\n", "is 'yes', must be true or false", "write true or false"),
        (MODEL + "run: {name: 12}\n", "run.name is 12, must be a text", "write it in quotes: '12'"),
        (MODEL + "run: {name: ../up}\n", "run.name is '../up', must be a text such as", None),
        (MODEL + "data: {source: [a, 3]}\n", "data.source is ['a', 3], must be a text or a list of", None),
        (MODEL + "data: {split: '1,2'}\n", "data.split is '1,2', must be a text such as 949,50,1", None),
        (MODEL + "data: 3\n", "job.yaml:2: data is 3, must be a mapping of fields", None),
        ("data: {vocab: 300}\n", "job.yaml: model is missing", "stretto config --reference"),
        ("model: {family: gpt, layers: 2}\n", "job.yaml:1: model has no hidden, no heads", "give a preset"),
        ("model: {preset: gtp2}\n", "model.preset is 'gtp2', which is not a known", "did you mean 'gpt2'?"),
        ("model: {preset: mine/config.json}\n", "'mine/config.json': cannot read mine/config.json: No", None),
        (MODEL + "dp: {mode: fsdp}\n", "dp.mode is 'fsdp', must be one of", "did you mean zero3?"),
        (MODEL + "dp: {mode: ZeRO-2}\n", "dp.mode is 'ZeRO-2', must be one of", "did you mean zero2?"),
        (MODEL + "dp: {mode: dp}\n", "dp.mode is 'dp', must be one of", "did you mean ddp?"),
        (MODEL + "train: {dtype: bf16}\n", "train.dtype is 'bf16', must be", "did you mean bfloat16?"),
        (MODEL + "dp: {offload: ssd}\n", "dp.offload is 'ssd', must be one of", "did you mean nvme?"),
        (MODEL + "seed: 1\nseed: 2\n", "job.yaml:3: seed is given twice, first in line 2", "keep one"),
        (MODEL + "train: {seed: 1, seed: 1}\n", "job.yaml:2: train.seed is given twice", "keep one"),
        ("- a\n- b\n", "job.yaml: holds a list, must hold sections", None),
        ("just text", "job.yaml: holds a single value", None),
        ("", "job.yaml: model is missing", None),
        (MODEL + "train: [1\n", "not valid YAML", "indentation"),
        (MODEL + "train:\n\tsteps: 1\n", "job.yaml:3: not valid YAML", None),
        (MODEL + "---\n" + MODEL, "job.yaml:2: not valid YAML", None),
        ("a: \x00", "job.yaml: not valid YAML", None),
        (MODEL + "run: !!python/name:os.system {}\n", "job.yaml:2: tag", "plain values only"),
        (MODEL + "run: {name: !thing x}\n", "job.yaml:2: tag '!thing' is not allowed", None),
        (MODEL + "train: {seed: !!int x}\n", "job.yaml:2: 'x' is no whole number", None),
        (MODEL + "train: {seed: " + "9" * 5000 + "}\n", "job.yaml:2: number of 5000 digits", None),
        (MODEL + "a: &x {seed: 1}\ntrain:\n  <<: *x\n", "job.yaml:4: merge keys (<<) are not", None),
        ("model: &m\n  family: *m\n", "job.yaml:1: an alias inside what it stands for", None),
        ("? [a, b]\n: 1\n", "job.yaml:1: a key must be a name", None),
        ("[" * 1500, "nested too deeply", None),
    ],
)
def test_errors_name_the_field_and_the_rule(text: str, message: str, hint: str | None) -> None:
    error = fails(text)
    assert message in error.message
    assert error.message.startswith("job.yaml")
    assert hint is None or (error.hint is not None and hint in error.hint)


def test_every_problem_of_a_file_once_with_its_line() -> None:
    error = fails("train: {steps: no}\nbatch: {micro_sizes: 1}\nmodel: {family: bert}\n")
    assert error.message.startswith("job.yaml:1: train.steps is 'no'")
    batch, model = error.others
    assert batch.message == "job.yaml:2: there is no field batch.micro_sizes"
    assert batch.hint == "did you mean batch.micro_size?"
    assert model.message.startswith("job.yaml:3: model.family is 'bert'")
    error = fails(MODEL + "data: {source: {a: b}}\n")
    assert not error.others, "a value that fits no member of a union is one problem"
    wrong = fails(MODEL, "optim.lrr=1", "layout.tp", "layout.pp=2")
    assert wrong.message.startswith("override 'optim.lrr=1'")
    assert [other.message.partition(" is ")[0] for other in wrong.others] == ["override 'layout.tp'"]


def test_a_preset_from_the_command_line_is_not_changed_by_the_file() -> None:
    error = fails(MODEL, "model.preset=gpt2")
    assert error.message.startswith("override 'model.preset=gpt2': job.yaml sets model.")
    assert error.hint is not None
    assert error.hint.startswith("'model={preset: gpt2}' takes the preset alone")
    assert parse(MODEL, overrides=["model={preset: gpt2}"]).shape().layers == 12
    config = parse("model: {preset: gpt2, dropout: 0.0}", overrides=["model.preset=gpt2-medium"])
    assert config.shape().layers == 24
    changed = "model: {preset: gpt2, attention: {window: 8}}"
    assert "sets model.attention.window," in fails(changed, "model.preset=gpt2-medium").message
    both = ["model.preset=gpt2-medium", "model.attention.window=4"]  # the command line says both
    assert parse(changed, overrides=both).shape().attention.window == 4


def test_a_config_that_is_not_there_is_looked_for_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/first-job.yaml").touch()
    Path(".pre-commit-config.yaml").touch()
    for name, hint in (
        ("first-job", "did you mean configs/first-job.yaml?"),
        ("configs/first-jb.yaml", "did you mean configs/first-job.yaml?"),
        ("mine.yaml", "there is configs/first-job.yaml"),
    ):
        with pytest.raises(StrettoError) as caught:
            load(name)
        assert caught.value.hint == hint


def test_what_a_config_sets_reads_back_equal() -> None:
    configs = [*(Path(__file__).parents[3] / "configs").glob("*.yaml")]
    assert configs
    for path in configs:
        config = load_config(path)
        short = dump(config, defaults=False)
        assert parse_config(short) == config
        assert len(short.splitlines()) < len(dump(config).splitlines()) / 2
    unlimited = parse(MODEL + "optim: {clip: null}\n")
    assert "clip: null" in dump(unlimited, defaults=False)  # which is not its default


def test_aliases_do_not_blow_up() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    for i in range(1, 12):
        bomb += f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n"
    assert "more than 10000 values" in fails(bomb).message


def test_an_alias_may_repeat_a_value() -> None:
    config = parse(MODEL + "eval: {every: &n 50}\ncheckpoint: {every: *n}\n")
    assert config.eval.every == config.checkpoint.every == 50


def test_scalars_are_those_of_yaml_1_2() -> None:
    config = parse(MODEL + "optim: {lr: 3e-4, weight_decay: 1E-1}\nrun: {name: no}\ndata: {cache: 1:30}\n")
    assert (config.optim.lr, config.optim.weight_decay) == (3e-4, 0.1)
    assert (config.run.name, config.data.cache) == ("no", "1:30")
    train = parse(MODEL + "train: {seed: 0x10, steps: 010}\n").train
    assert (train.seed, train.steps) == (16, 10)


def test_a_section_with_all_its_fields_commented_out_is_empty() -> None:
    assert parse(MODEL + "eval:\n  # every: 10\n").eval.every is None


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(MODEL)
    with pytest.raises(StrettoError, match="does not exist") as caught:
        load(tmp_path / "smal.yaml")
    assert "small.yaml" in str(caught.value.hint)
    with pytest.raises(StrettoError, match="does not exist"):
        load(tmp_path / "no" / "x.yaml")
    with pytest.raises(StrettoError, match="does not exist") as caught:
        load(tmp_path / "configs" / "quickstart.yaml")  # a page's path, typed outside a clone
    assert "quickstart, without a folder" in str(caught.value.hint)
    with pytest.raises(StrettoError, match="is a folder"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: caf\xe9}")
    with pytest.raises(StrettoError, match="not UTF-8"):
        load(tmp_path / "latin.yaml")
    (tmp_path / "huge.yaml").write_bytes(b"#" * 2_000_000)
    with pytest.raises(StrettoError, match="larger than"):
        load(tmp_path / "huge.yaml")


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("optim.lr=3e-4", "optim.lr", 3e-4),
        ("optim.lr=1", "optim.lr", 1.0),
        ("optim.clip=null", "optim.clip", None),
        ("optim.betas=[0.8, 0.9]", "optim.betas", (0.8, 0.9)),
        ("optim.rate.schedule=wsd", "optim.rate.schedule", "wsd"),
        ("metrics.to=[tensorboard]", "metrics.to", ["tensorboard"]),
        ("data.source=[a, b]", "data.source", ["a", "b"]),
        ("data.tokenizer=null", "data.tokenizer", None),
        ("run.name=123", "run.name", "123"),
        ("sample.prompt=def foo: return 1", "sample.prompt", "def foo: return 1"),
        ("sample.prompt=a=b", "sample.prompt", "a=b"),
        ("sample.prompt=", "sample.prompt", ""),
        ("sample.prompt='it''s '", "sample.prompt", "it's "),
        ("eval={every: 7}", "eval.every", 7),
    ],
)
def test_overrides(override: str, field: str, value: object) -> None:
    config: Any = parse(MODEL + "eval: {batches: 3}\noptim: {lr: 0.5}\n", overrides=[override])
    for name in field.split("."):
        config = getattr(config, name)
    assert config == value


def test_later_overrides_win() -> None:
    assert parse(MODEL, overrides=["train.seed=1", "train.seed=2"]).train.seed == 2


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("optim.lrr=1", "override 'optim.lrr=1': there is no field optim.lrr", "did you mean optim.lr?"),
        ("lr=1", "there is no field lr", "did you mean optim.lr?"),
        ("optim.lr.x=1", "there is no field optim.lr.x", "optim.lr"),
        ("optim.lr", "override 'optim.lr' is not of the form", "optim.lr=3e-4"),
        ("=1", "there is no field", None),
        ("optim.lr=fast", "override 'optim.lr=fast': optim.lr is 'fast', must be a number above 0", None),
        ("optim.betas=[", "override 'optim.betas=[': not valid YAML", None),
        ("optim=3", "override 'optim=3': optim is 3, must be a mapping of fields", None),
        ("optim={lr: 1, lr: 2}", "lr is given twice", None),
    ],
)
def test_bad_overrides(override: str, message: str, hint: str | None) -> None:
    error = fails(MODEL + "optim: {lr: 1.0}\n", override)
    assert message in error.message
    assert hint is None or (error.hint is not None and hint in error.hint)


NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,8}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)


@given(
    name=NAMES,
    prompt=TEXTS,
    sources=st.lists(TEXTS, min_size=1),
    lr=st.floats(1e-300, 1e300),
    clip=st.none() | st.floats(1e-9, 1e9),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=8)
def test_what_is_dumped_loads_back_equal(
    name: str, prompt: str, sources: list[str], lr: float, clip: float | None, seed: int
) -> None:
    config = read_section(
        TrainConfig,
        {
            "model": {"preset": "gpt2", "dropout": 0.1},
            "run": {"name": name},
            "sample": {"prompt": prompt},
            "data": {"source": sources},
            "optim": {"lr": lr, "clip": clip},
            "train": {"seed": seed},
        },
    )
    assert parse(dump(config)) == config


def test_the_dump_has_every_field() -> None:
    text = dump(parse(MODEL))
    assert "  clip: 1.0\n" in text
    assert "  rate:\n    schedule: cosine\n" in text


def test_needs_no_torch_and_no_numpy() -> None:
    code = (
        "import sys, stretto.run.config, stretto.run.config.check, stretto.run.config.reference; "
        "assert not {'torch', 'numpy', 'rich', 'typer'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_config_names_the_one_that_was_meant(tmp_path: Path) -> None:
    for name in (*"abcdefghi", "quickstart"):
        (tmp_path / f"{name}.yaml").touch()
    with pytest.raises(StrettoError) as caught:
        load(tmp_path / "quickstat.yaml")
    assert caught.value.hint == f"did you mean {tmp_path / 'quickstart.yaml'}?"
    with pytest.raises(StrettoError) as caught:
        load(tmp_path / "zzzzzz.yaml")
    assert str(caught.value.hint).endswith("and 2 more")


def test_nesting_is_refused_at_a_depth_that_is_read_at_once() -> None:
    assert "nested too deeply" in fails("model: " + "[" * DEEPEST + "]" * DEEPEST).message
    assert "model is [[[" in fails("model: " + "[" * (DEEPEST - 2) + "]" * (DEEPEST - 2)).message


def test_the_preset_may_be_a_config_json_which_is_not_needed_again(tmp_path: Path) -> None:
    sizes = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "vocab_size": 500,
        "max_position_embeddings": 64,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-6,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(sizes))
    shape = shape_from_huggingface(sizes)
    for place in (file, tmp_path):
        config = parse(f"model: {{preset: {place}, init_std: 0.01}}\n", overrides=["lora.rank=2"])
        assert replace(config.shape(500), lora=None) == shape
        assert config.model.preset is None
        assert config.model.init_std == 0.01
    assert parse(f"model: {{preset: {file}, vocab: 600, layers: 3}}\n").shape(7) == replace(
        shape, vocab=600, layers=3
    )
    text = dump(config)
    file.write_text(json.dumps({**sizes, "model_type": "nothing"}))
    with pytest.raises(StrettoError, match=f"model.preset is '{file}': ") as error:
        parse(f"model: {{preset: {file}}}\n")
    assert "'nothing'" in error.value.message
    file.unlink()
    assert parse(text) == config
    with pytest.raises(StrettoError) as error:
        parse(f"model: {{preset: {tmp_path}}}\n")
    assert error.value.hint == f"there is no {file}"
