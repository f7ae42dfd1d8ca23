from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from stretto.errors import StrettoError
from stretto.job.parameters import count_parameters
from stretto.job.presets import ALIASES, PRESETS, find_shape, normalised_name, preset


def test_every_preset_is_a_valid_shape():
    assert len(set(PRESETS)) == len(PRESETS)
    for name in PRESETS:
        assert preset(name).layers > 0


def test_case_does_not_matter():
    assert preset("Llama3-8B") == preset("llama3-8b")


def test_unknown_name_gets_the_nearest():
    with pytest.raises(StrettoError, match="'llama3-8'") as caught:
        preset("llama3-8")
    assert "llama3-8b" in (caught.value.hint or "")


def test_unlike_anything_lists_all():
    with pytest.raises(StrettoError) as caught:
        preset("???")
    assert "gpt2-xl" in (caught.value.hint or "")


# model cards and the sizes of the published safetensors files
PUBLISHED = {
    "llama1-65b": 65_285_660_672,
    "mistral-7b": 7_241_732_096,
    "smollm3-3b": 3_075_098_624,
    "falcon-180b": 179_522_565_120,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "gpt-neox-20b": 20_554_567_680,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,  # without the module that predicts a further token
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str):
    assert count_parameters(preset(name)).total == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "billions"),
    [  # what the names and the reports say of a token's share
        ("qwen3-30b-a3b", 3.3),
        ("qwen3-235b-a22b", 22.2),
        ("deepseek-v2", 21.4),
        ("deepseek-v3", 37.6),
        ("llama4-e16", 17.2),
        ("llama4-e128", 17.2),
    ],
)
def test_parameters_that_a_token_meets(name: str, billions: float):
    assert count_parameters(preset(name)).active / 1e9 == pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize(
    ("name", "embedding", "rest"), [("nemotron4-15b", 3.1, 12.5), ("nemotron4-340b", 9.4, 331.6)]
)
def test_nemotron_as_its_reports_split_it(name: str, embedding: float, rest: float):
    """arXiv 2402.16819, section 2, and 2406.11704, table 1."""
    count = count_parameters(preset(name))
    assert (count.embedding + count.output) / 1e9 == pytest.approx(embedding, abs=0.05)
    assert count.non_embedding / 1e9 == pytest.approx(rest, abs=0.05)


# the counts of Llama 2 are of its files, which keep head_dim / 2 rotary frequencies a layer
STORED = {"llama2-7b": 32 * 64, "llama2-13b": 40 * 64, "llama2-70b": 80 * 64}
TABLE = Path(__file__).parents[2] / "../shared/tables/models.csv"


@pytest.mark.skipif(not TABLE.is_file(), reason=f"no measured tables at {TABLE.parent}")
def test_every_row_of_the_table_of_models():
    """Under the name that it has there, with the sizes that it has there; hybrids of Mamba are refused."""
    rows = list(csv.DictReader(TABLE.read_text().splitlines()))
    hybrids = [row["name"] for row in rows if "Mamba" in row["notes"]]
    assert len(rows) == 60
    assert len(hybrids) == 3
    for row in rows:
        if row["name"] in hybrids:
            with pytest.raises(StrettoError, match="Mamba"):
                preset(row["name"])
            continue
        shape = preset(row["name"])
        for field in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"):
            assert not row[field] or getattr(shape, field) == int(row[field]), (row["name"], field)
        if row["params_exact"]:
            counted = count_parameters(shape).total + STORED.get(row["name"], 0)
            assert counted == int(row["params_exact"]), row["name"]


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("LLAMA3-70B", "llama3-70b"),
        ("Llama-3.3-70B-Instruct", "llama3.1-70b"),
        ("GPT3-175B", "gpt3-175b"),
        ("MPT-7b", "mpt-7b"),
        ("mixtral_8x7b", "mixtral-8x7b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("Llama-3.1-405B", "llama3.1-405b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3-8b"),
        ("Nemotron-340B", "nemotron4-340b"),
        ("GPT-3 175B", "gpt3-175b"),
        ("gpt-1t", "korthikanti-1000b"),
    ],
)
def test_other_spellings(spelling: str, name: str):
    assert preset(spelling) == preset(name)


def test_no_two_names_are_spelt_alike():
    names = [normalised_name(name) for name in (*PRESETS, *ALIASES)]
    assert len(set(names)) == len(names)
    assert set(ALIASES.values()) <= set(PRESETS)


def test_a_shape_by_its_config_json(tmp_path: Path):
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert find_shape(file) == find_shape(tmp_path) == find_shape("llama3-8b")
    file.write_text(json.dumps({**config, "model_type": "llama4"}))
    with pytest.raises(
        StrettoError, match=r"model_type 'llama4' is not one of .*, nor of olmo2, .* only be"
    ) as error:
        find_shape(str(file))
    assert "did you mean" not in str(error.value)  # Llama 4 read as a Llama is another model
    file.write_text("{")
    with pytest.raises(StrettoError, match="is not JSON"):
        find_shape(file)
    with pytest.raises(StrettoError, match="cannot read"):
        find_shape(tmp_path / "none.json")
