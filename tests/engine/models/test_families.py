"""Every family equals its model in `transformers`: logits, loss, every gradient, files and parameters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import CASES, SEQUENCE, compare, their_config, their_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from stretto.engine.models import build
from stretto.engine.models.huggingface import from_huggingface, plain_names, to_huggingface
from stretto.job.huggingface import config_to_huggingface, differences, read_config, shape_from_huggingface
from stretto.job.parameters import count_parameters
from stretto.job.presets import PRESETS, preset
from stretto.job.shape import ModelShape

BUILT = [name for name in PRESETS if not preset(name).unsupported_parts and preset(name).rotary]
# one of each family, with a tied head and without
FIRST = {(preset(name).family, preset(name).tied): name for name in reversed(BUILT)}.values()


@pytest.mark.parametrize("name", CASES)
def test_every_family_equals_transformers_in_float32(name: str) -> None:
    result = compare(name, torch.float32)
    assert max(result.logits, result.loss, result.gradients) < 1e-5, result
    assert result.parameters == result.transformers_parameters


@pytest.mark.parametrize("name", CASES)
def test_every_family_equals_transformers_in_float64(name: str) -> None:
    result = compare(name, torch.float64)
    assert max(result.logits, result.loss, result.gradients) < 1e-9, result


# what is special about a case, changed: the logits must differ, or the comparison would not see it
SPECIAL: dict[str, dict[str, tuple[str, Any]]] = {
    "llama, llama3 positions": {"rope": ("", None), "rope_theta": ("", 1e4)},
    "llama, linear positions": {"rope": ("", None)},
    "llama, dynamic positions": {"rope": ("", None)},
    "llama, yarn positions": {"rope": ("", None)},
    "mistral": {"window": ("attention", None)},
    "mixtral": {"window": ("attention", None), "normalise": ("moe", False)},
    "qwen2": {"window": ("attention", 8)},
    "qwen2_moe": {"normalise": ("moe", True)},
    "qwen3_moe": {"normalise": ("moe", False)},
    "gemma2": {
        "softcap": ("attention", None),
        "query_scale": ("attention", None),
        "full_every": ("attention", 0),
        "window": ("attention", 8),
        "logit_softcap": ("", 0.0),
        "embedding_scale": ("", 1.0),
        "norm": ("", "rms"),
        "mlp": ("", "swiglu"),
    },
    "gemma3_text": {
        "local_theta": ("attention", None),
        "full_every": ("attention", 3),
        "rope": ("", None),
        "query_scale": ("attention", None),
        "logit_softcap": ("", 0.0),
    },
    "gpt_oss": {"full_every": ("attention", 0), "mlp": ("", "swiglu"), "rope": ("", None)},
    "deepseek_v2": {
        "interleaved": ("attention", False),
        "rope": ("", None),
        "scale": ("moe", 1.0),
        "top_groups": ("moe", 4),
        "group_score": ("moe", "top2"),
        "normalise": ("moe", True),
    },
    "deepseek_v3": {
        "interleaved": ("attention", False),
        "scale": ("moe", 1.0),
        "top_groups": ("moe", 4),
        "group_score": ("moe", "max"),
        "normalise": ("moe", False),
    },
}


def changed(shape: ModelShape, field: str, part: str, value: Any) -> ModelShape:
    if not part:
        return replace(shape, **{field: value})
    return replace(shape, **{part: replace(getattr(shape, part), **{field: value})})


@pytest.mark.parametrize("name", SPECIAL)
def test_everything_special_about_a_case_counts(name: str) -> None:
    config = their_config(name)
    shape = shape_from_huggingface(config.to_dict())
    weights = from_huggingface(their_model(config, torch.float32).state_dict(), shape)
    ids = torch.randint(0, shape.vocab, (3, SEQUENCE), generator=torch.Generator().manual_seed(4))

    def logits(shape: ModelShape) -> torch.Tensor:
        model = build(shape).eval()
        model.load_state_dict(weights, strict=False)
        model.tie()
        with torch.no_grad():
            return model(ids)

    expected = logits(shape)
    for field, (part, value) in SPECIAL[name].items():
        other = changed(shape, field, part, value)
        assert other != shape, field
        assert differences(shape, other), field
        difference = (logits(other) - expected).abs().max() / expected.abs().max()
        assert difference > 1e-3, f"{field} does not count"


KINDS = [name for name in CASES if "," not in name]


@pytest.mark.parametrize("name", KINDS)
def test_files_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Exports equal the files of save_pretrained bit for bit, and from_pretrained reads them."""
    transformers_model = their_model(their_config(name), torch.float32)
    transformers_model.save_pretrained(tmp_path / "theirs")
    saved = load_file(tmp_path / "theirs" / "model.safetensors")
    reading = read_config(json.loads((tmp_path / "theirs" / "config.json").read_text()))
    assert reading.unknown == ()
    shape = reading.shape
    weights = from_huggingface(saved, shape)
    assert {key: tuple(w.shape) for key, w in weights.items()} == {
        key: tuple(p.shape) for key, p in build(shape).named_parameters()
    }
    written = to_huggingface(weights, shape)
    assert saved.keys() == written.keys()
    assert all(torch.equal(saved[key], weight) for key, weight in written.items())
    assert all(weight.is_contiguous() for weight in written.values())
    in_memory = from_huggingface(transformers_model.state_dict(), shape)
    assert all(torch.equal(in_memory[key], weight) for key, weight in weights.items())
    (tmp_path / "ours").mkdir()
    save_file(written, tmp_path / "ours" / "model.safetensors", {"format": "pt"})
    (tmp_path / "ours" / "config.json").write_text(json.dumps(config_to_huggingface(shape)))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert all(
        torch.equal(weight, loaded.state_dict()[key])
        for key, weight in transformers_model.state_dict().items()
    )
    ids = torch.arange(SEQUENCE)[None]
    with torch.no_grad():  # experts are computed another way there
        torch.testing.assert_close(
            loaded(ids).logits, transformers_model.eval()(ids).logits, rtol=1e-4, atol=1e-4
        )


def test_names_of_a_model_that_sees_pictures_too() -> None:
    """As published, and as transformers 5 writes them."""
    config = their_config("gemma3_text")
    shape = shape_from_huggingface(config.to_dict())
    weights = their_model(config, torch.float32).state_dict()
    weights = {key: weight for key, weight in weights.items() if key != "lm_head.weight"}
    expected = from_huggingface(weights, shape)
    extras = {"vision_tower.a.weight": torch.ones(1), "multi_modal_projector.b": torch.ones(1)}
    for body, other in (("language_model.model.", ""), ("model.language_model.", "model.")):
        named = {body + key.removeprefix("model."): weight for key, weight in weights.items()}
        result = from_huggingface(named | {other + key: w for key, w in extras.items()}, shape)
        assert all(torch.equal(result[key], weight) for key, weight in expected.items())


def test_layers_that_predict_further_tokens_are_left_out() -> None:
    shape = shape_from_huggingface(their_config("deepseek_v3").to_dict())
    after = f"model.layers.{shape.layers}"
    names = ["model.norm.weight", f"{after}.eh_proj.weight", f"{after}.self_attn.o_proj.weight"]
    assert list(plain_names(names, shape)) == ["model.norm.weight"]
    unmarked = [names[0], names[2]]  # of a deeper model: it shows as unknown
    assert list(plain_names(unmarked, shape)) == unmarked


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in BUILT]
)
def test_presets_have_the_parameters_of_theirs(name: str) -> None:
    shape = preset(name)
    config = config_to_huggingface(shape)
    with torch.device("meta"):
        transformers_model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config, pad_token_id=None)
        )
    transformers_model.tie_weights()
    count = sum(p.numel() for p in transformers_model.parameters())
    count += sum(
        b.numel() for key, b in transformers_model.named_buffers() if key.endswith("correction_bias")
    )
    assert count_parameters(shape).total == count
