"""Published weights in 8-bit and 4-bit blocks are the numbers that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from stretto.engine.checkpoint.huggingface.blocks import PlainWeights, from_float8, from_mxfp4
from stretto.engine.checkpoint.huggingface.exporting import export_huggingface
from stretto.engine.checkpoint.huggingface.folder import PublishedWeights
from stretto.engine.checkpoint.huggingface.importing import Importing, import_huggingface
from stretto.engine.checkpoint.read import read_whole
from stretto.errors import StrettoError
from stretto.run.generate.text import load_model
from stretto.run.train.imported import import_model

GENERATOR = torch.Generator().manual_seed(5)


def bytes_of(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=GENERATOR)


def test_four_bits_are_what_transformers_reads() -> None:
    blocks, scales = bytes_of(3, 10, 4, 16), bytes_of(3, 10, 4, low=2, high=250)
    assert torch.equal(from_mxfp4(blocks, scales), _convert_moe_packed_tensors(blocks, scales))


def test_eight_bits_are_what_transformers_reads() -> None:
    weight = torch.randn(256, 384, generator=GENERATOR).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=GENERATOR)
    by_transformers = Fp8Dequantize(None)._dequantize_one(weight, scales, torch.bfloat16)
    assert torch.equal(from_float8(weight, scales), by_transformers)


@pytest.mark.parametrize("shape", [(200, 130), (576, 128), (1, 300)])
def test_the_last_blocks_may_be_cut_off(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=GENERATOR).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=GENERATOR)
    plain = from_float8(weight, scales).float()
    for row in (0, shape[0] // 2, shape[0] - 1):
        for column in (0, shape[1] // 2, shape[1] - 1):
            exact = weight[row, column].float() * scales[row // 128, column // 128]
            assert plain[row, column] == exact.bfloat16()


def folder(path: Path, tensors: dict[str, Tensor]) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return path


def plain(path: Path, **config: Any) -> PlainWeights:
    return PlainWeights(PublishedWeights(path), config)


def test_both_stand_under_their_plain_names(tmp_path: Path) -> None:
    weight = torch.randn(256, 128, generator=GENERATOR).to(torch.float8_e4m3fn)
    tensors = {
        "a.weight": weight,
        "a.weight_scale_inv": torch.rand(2, 1, generator=GENERATOR),
        "e.down_proj_blocks": bytes_of(2, 6, 3, 16),
        "e.down_proj_scales": bytes_of(2, 6, 3, low=100, high=140),
        "norm.weight": torch.ones(4),
    }
    weights = plain(folder(tmp_path / "in", tensors))
    assert {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()} == {
        "a.weight": (256, 128),
        "e.down_proj": (2, 96, 6),
        "norm.weight": (4,),
    }
    assert torch.equal(weights.read("a.weight"), from_float8(weight, tensors["a.weight_scale_inv"]))
    assert weights.read("e.down_proj").shape == (2, 96, 6)
    assert sorted(weights.notes) == [
        "weights in 4-bit blocks (MXFP4) are converted to bfloat16",
        "weights in 8-bit blocks (float8_e4m3) are converted to bfloat16",
    ]


def test_the_size_of_blocks_is_as_configured(tmp_path: Path) -> None:
    weight, scales = torch.ones(8, 8).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    source = folder(tmp_path / "in", {"w": weight, "w_scale_inv": scales})
    read = plain(source, quantization_config={"weight_block_size": [4, 4]}).read("w")
    assert [read[0, 0], read[0, 7], read[7, 0], read[7, 7]] == [1, 2, 3, 4]
    with pytest.raises(StrettoError, match="weight_block_size is 'big'"):
        plain(source, quantization_config={"weight_block_size": "big"})


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"w": torch.ones(8, 8).to(torch.float8_e4m3fn)}, "has type float8_e4m3fn and no w_scale_inv"),
        ({"w_blocks": bytes_of(1, 2, 1, 16)}, "no w_scales"),
        ({"w_scale_inv": torch.ones(1, 1)}, "w_scale_inv is the scale of no weight"),
        (
            {"w": torch.ones(200, 8).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(1, 1)},
            r"w_scale_inv is \[1, 1\], which does not fit w of \[200, 8\]",
        ),
        ({"w_blocks": bytes_of(1, 2, 1, 16), "w_scales": bytes_of(1, 2, 2)}, "does not fit w_blocks"),
    ],
)
def test_blocks_and_scales_must_fit(tmp_path: Path, tensors: dict[str, Tensor], says: str) -> None:
    with pytest.raises(StrettoError, match=says):
        plain(folder(tmp_path / "in", tensors))


def test_a_model_in_8_bit_blocks_is_imported(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=31,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    weights = load_file(file)
    want = dict(weights)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        packed, scales = weights[name].to(torch.float8_e4m3fn), torch.rand(1, 1, generator=GENERATOR)
        weights |= {name: packed, f"{name}_scale_inv": scales}
        want[name] = from_float8(packed, scales)
    save_file(weights, file, {"format": "pt"})
    described = json.loads((tmp_path / "in" / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "in" / "config.json").write_text(json.dumps(described))
    with Importing(tmp_path / "in") as model:
        assert any("8-bit" in note for note in model.notes)
        assert model.dtype == "bfloat16"
    tensors, _ = read_whole(import_huggingface(tmp_path / "in", tmp_path / "run"))
    down = want["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(tensors["blocks.1.mlp.down.weight"], down)
    parts = [want[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(tensors["blocks.0.attn.qkv.weight"], torch.cat(parts))


def to_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales of matrices [experts, in, out], rounded to the nearest numbers of e2m1 as in gpt-oss:
    the largest of each 32 gets the largest exponent.
    """
    groups = weight.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2
    scaled = groups / torch.exp2(exponents)[..., None]
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nearest = (scaled.abs()[..., None] - levels).abs().argmin(-1) + 8 * (scaled < 0)
    low, high = nearest[..., 0::2], nearest[..., 1::2]
    return (low + 16 * high).to(torch.uint8), (exponents + 127).to(torch.uint8)


def test_a_gpt_oss_folder_in_4_bit_blocks_is_imported_and_exported(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    config = GptOssConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=96,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        vocab_size=53,
        max_position_embeddings=64,
        eos_token_id=1,
        pad_token_id=None,
    )
    model = GptOssForCausalLM(config).bfloat16()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.empty(weight.shape).normal_(std=0.2, generator=GENERATOR))
    source = tmp_path / "in"
    model.save_pretrained(source)
    file = source / "model.safetensors"
    weights = load_file(file)
    packed = [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]
    assert len(packed) == 4
    for name in packed:
        weight = weights.pop(name)
        weights[f"{name}_blocks"], weights[f"{name}_scales"] = to_mxfp4(weight)
        coarse = from_mxfp4(weights[f"{name}_blocks"], weights[f"{name}_scales"]).float() - weight.float()
        assert 0.01 < float(coarse.abs().mean() / weight.float().abs().mean()) < 0.2, "rounded to 4 bits"
    save_file(weights, file, {"format": "pt"})
    described = json.loads((source / "config.json").read_text())
    unquantised = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    described["quantization_config"] = {"modules_to_not_convert": unquantised, "quant_method": "mxfp4"}
    (source / "config.json").write_text(json.dumps(described))
    transformers_model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    ).eval()
    imported = import_model(source, tmp_path / "run")
    assert imported.dtype == "bfloat16"
    ids = torch.randint(0, 53, (2, 20), generator=GENERATOR)
    with torch.no_grad():
        want = transformers_model(ids).logits
        logits = load_model(imported.checkpoint)(ids)
        assert float((logits - want).abs().max() / want.abs().max()) < 1e-5
        export_huggingface(imported.checkpoint, tmp_path / "out")
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
        assert torch.equal(back(ids).logits, want)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
