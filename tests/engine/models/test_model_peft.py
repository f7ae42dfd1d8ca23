"""Adapters beside those of `peft`: the same logits, loss and gradients, and the same files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.loss import loss_utils
from transformers.models.llama import modeling_llama

from double_precision import in_float64
from stretto.engine.models.build import build
from stretto.engine.models.huggingface import from_huggingface
from stretto.engine.models.peft import from_peft, merged, to_peft
from stretto.engine.models.weights import freeze
from stretto.errors import StrettoError
from stretto.job.finetune import TrainedParameters
from stretto.job.huggingface import shape_from_huggingface
from stretto.job.lora import LoraShape, is_adapter
from stretto.job.shape import ModelShape

LLAMA = transformers.LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
GPT2 = transformers.GPT2Config(
    vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
LORA = LoraShape(rank=3, alpha=6.0)
CASES = {
    "llama": (LLAMA, LORA),
    "llama, some": (LLAMA, LoraShape(rank=2, alpha=5.0, targets=("v_proj", "down_proj"), rslora=True)),
    "gpt2": (GPT2, LORA),
    "gpt2, rslora": (GPT2, LoraShape(rank=2, alpha=3.0, targets=("c_attn",), rslora=True)),
    "gpt2, MLP": (GPT2, LoraShape(rank=2, alpha=3.0, targets=("mlp.*",))),
}


def models(config: Any, lora: LoraShape) -> tuple[Any, Any, ModelShape]:
    """Theirs without adapters, ours with random ones, in float64, and the shape."""
    torch.manual_seed(0)
    transformers_model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    base = shape_from_huggingface(json.loads(config.to_json_string(use_diff=False)))
    shape = replace(base, lora=lora)
    stretto_model = build(shape).double()
    weights = from_huggingface(transformers_model.state_dict(), base)
    for name, parameter in stretto_model.named_parameters():
        # theirs are made in float32 before they are read
        parameter.data.copy_(parameter.to(torch.float32) if is_adapter(name) else weights[name])
    freeze(stretto_model, TrainedParameters(adapters=True))
    return transformers_model, stretto_model, shape


def adapters(model: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if is_adapter(name)}


def written(folder: Path, shape: ModelShape, weights: dict[str, Tensor]) -> None:
    config, tensors = to_peft(shape, weights)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_are_those_of_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    in_float64(monkeypatch, modeling_llama, loss_utils)
    transformers_model, stretto_model, shape = models(*CASES[case])
    written(tmp_path, shape, adapters(stretto_model))
    peft = PeftModel.from_pretrained(transformers_model, str(tmp_path), is_trainable=True).double()
    ids = torch.randint(61, (2, 9))
    logits = stretto_model(ids)
    torch.testing.assert_close(peft(ids).logits, logits, rtol=1e-9, atol=1e-9)
    loss = stretto_model.loss(logits[:, :-1], ids[:, 1:])
    loss.backward()
    their_loss = peft(ids, labels=ids).loss
    torch.testing.assert_close(their_loss * 16, loss, rtol=1e-9, atol=1e-9)
    (their_loss * 16).backward()
    gradients = {name: p.grad for name, p in stretto_model.named_parameters() if is_adapter(name)}
    _, expected = to_peft(shape, gradients)
    gradients_here = {
        name.replace(".default", ""): p.grad for name, p in peft.named_parameters() if p.grad is not None
    }
    assert gradients_here.keys() == expected.keys()
    for name, gradient in expected.items():
        mask = gradient != 0  # off the diagonal of several projections theirs would learn too
        assert mask.any()
        torch.testing.assert_close(gradients_here[name][mask], gradient[mask], rtol=1e-9, atol=1e-9)
        assert bool((gradients_here[name][~mask] == 0).all()) or "c_attn.lora_B" in name


@pytest.mark.parametrize("case", CASES)
def test_files_come_back_to_the_bit(tmp_path: Path, case: str) -> None:
    _, stretto_model, shape = models(*CASES[case])
    written(tmp_path, shape, adapters(stretto_model))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    base = replace(shape, lora=None)
    lora, weights = from_peft(config, load_file(tmp_path / "adapter_model.safetensors"), base)
    again = replace(shape, lora=lora)
    assert shape.lora is not None
    assert (lora.rank, lora.scale) == (shape.lora.rank, shape.lora.scale)
    expected = adapters(stretto_model)
    assert weights.keys() == expected.keys()
    assert weights.keys() == {n for n, _ in build(again).named_parameters() if is_adapter(n)}
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_merged_weights_compute_what_adapters_do() -> None:
    _, stretto_model, shape = models(LLAMA, LORA)
    plain = build(replace(shape, lora=None)).double()
    weights = dict(stretto_model.named_parameters())
    for name, parameter in plain.named_parameters():
        module = name.removesuffix(".weight").split(".", 2)[-1]
        pairs = {
            p: (weights[f"{name[:-7]}.lora.{p}.A.weight"], weights[f"{name[:-7]}.lora.{p}.B.weight"])
            for p in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
            if f"{name[:-7]}.lora.{p}.A.weight" in weights
        }
        value = weights[name].detach()
        parameter.data.copy_(merged(value, module, pairs, shape) if pairs else value)
    ids = torch.randint(61, (2, 9))
    torch.testing.assert_close(plain(ids), stretto_model(ids), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 2}, "rank"),
    ],
)
def test_adapters_without_a_counterpart_are_refused(change: dict[str, Any], message: str) -> None:
    _, stretto_model, shape = models(LLAMA, LORA)
    config, tensors = to_peft(shape, adapters(stretto_model))
    with pytest.raises(StrettoError, match=message):
        from_peft({**config, **change}, tensors, replace(shape, lora=None))
