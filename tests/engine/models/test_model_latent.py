"""Latent attention against the modules of `transformers`, in float64: outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import modeling_rope_utils
from transformers.masking_utils import create_causal_mask
from transformers.models.deepseek_v2 import DeepseekV2Config, modeling_deepseek_v2
from transformers.models.deepseek_v3 import DeepseekV3Config, modeling_deepseek_v3

from double_precision import in_float64
from stretto.engine.models import build
from stretto.engine.models.latent import LatentAttention
from stretto.job.attention import AttentionShape, LatentShape, RopeScaling
from stretto.job.shape import ModelShape

YARN: dict[str, Any] = {
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}


def stretto_attention(q_rank: int | None, bias: bool, rope: RopeScaling | None) -> LatentAttention:
    """A block's attention, in float64, every weight random."""
    shape = ModelShape(
        family="deepseek_v3",
        layers=1,
        hidden=32,
        heads=4,
        head_dim=14,
        vocab=9,
        sequence=24,
        rope=rope,
        attention=AttentionShape(
            latent=LatentShape(kv_rank=10, rope_dim=6, value_dim=5, q_rank=q_rank),
            interleaved=True,
            qkv_bias=bias,
            proj_bias=bias,
        ),
    )
    layer = build(shape).double().get_submodule("blocks.0.attn")
    assert isinstance(layer, LatentAttention)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.6, generator=generator)
    return layer


def transformers_attention(kind: str, q_rank: int | None, bias: bool, yarn: bool) -> tuple[Any, Any, Any]:
    """Attention, rotary tables and config."""
    module: Any = modeling_deepseek_v2 if kind == "V2" else modeling_deepseek_v3
    config_type: Any = DeepseekV2Config if kind == "V2" else DeepseekV3Config
    config = config_type(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=q_rank,
        kv_lora_rank=10,
        qk_rope_head_dim=6,
        qk_nope_head_dim=8,
        v_head_dim=5,
        attention_bias=bias,
        max_position_embeddings=24,
        rope_parameters={
            "rope_theta": 10000.0,
            "rope_type": "yarn" if yarn else "default",
            **({"original_max_position_embeddings": 8, **YARN} if yarn else {}),
        },
    )
    config._attn_implementation = "eager"
    attention = getattr(module, f"Deepseek{kind}Attention")(config, 0).double()
    return attention, getattr(module, f"Deepseek{kind}RotaryEmbedding")(config), config


def renamed(layer: LatentAttention) -> dict[str, Tensor]:
    names = {
        "q.": "q_proj.",
        "q_down.": "q_a_proj.",
        "q_down_norm.": "q_a_layernorm.",
        "q_up.": "q_b_proj.",
        "kv_down.": "kv_a_proj_with_mqa.",
        "kv_down_norm.": "kv_a_layernorm.",
        "kv_up.": "kv_b_proj.",
        "proj.": "o_proj.",
    }
    weights = dict[str, Tensor]()
    for name, parameter in layer.named_parameters():
        start, _, leaf = name.partition(".")
        weights[names[f"{start}."] + leaf] = parameter
    return weights


@pytest.mark.parametrize("kind", ["V2", "V3"])
@pytest.mark.parametrize(
    ("q_rank", "bias", "yarn"), [(12, False, True), (None, False, False), (12, True, False)]
)
def test_outputs_and_gradients(
    kind: str, q_rank: int | None, bias: bool, yarn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_float64(monkeypatch, modeling_deepseek_v2, modeling_deepseek_v3, modeling_rope_utils)
    rope = RopeScaling(type="yarn", original_positions=8, **YARN) if yarn else None
    layer = stretto_attention(q_rank, bias, rope)
    attention, rotary, config = transformers_attention(kind, q_rank, bias, yarn)
    generator = torch.Generator().manual_seed(5)
    x, dy = torch.randn(2, 2, 20, 32, generator=generator, dtype=torch.float64)
    positions = torch.arange(20)[None].expand(2, -1)
    mask = create_causal_mask(config, x, None, None, positions)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    tables = rotary(x, positions)
    if isinstance(tables, tuple):
        tables = tuple(table.double() for table in tables)
    (expected, _) = torch.func.functional_call(
        attention,
        renamed(layer),
        (xs[0],),
        {"position_embeddings": tables, "attention_mask": mask},
        strict=True,
    )
    dx, *gradients = torch.autograd.grad(expected, [xs[0], *layer.parameters()], dy)
    y = layer(xs[1])
    (y * dy).sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(xs[1].grad, dx, rtol=1e-9, atol=1e-10)
    for (name, parameter), gradient in zip(layer.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(
            parameter.grad, gradient, rtol=1e-9, atol=1e-10, msg=lambda text, of=name: f"{of}: {text}"
        )
