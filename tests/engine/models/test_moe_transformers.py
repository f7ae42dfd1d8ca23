"""Mixtures of experts of each family against `transformers`, in float64: outputs and gradients."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v2 import DeepseekV2Config, modeling_deepseek_v2
from transformers.models.deepseek_v3 import DeepseekV3Config, modeling_deepseek_v3
from transformers.models.gpt_oss import GptOssConfig, modeling_gpt_oss
from transformers.models.qwen2_moe import Qwen2MoeConfig, modeling_qwen2_moe
from transformers.models.qwen3_moe import Qwen3MoeConfig, modeling_qwen3_moe

from double_precision import in_float64
from stretto.engine.models import build
from stretto.engine.models.moe import MoE
from stretto.job.experts import ExpertShape
from stretto.job.shape import ModelShape

HIDDEN, WIDTH, SHARED, EXPERTS, K = 12, 10, 20, 8, 3


def stretto_layer(moe: dict[str, Any], **shape: Any) -> MoE:
    """A block's experts, in float64, every weight random."""
    experts = ExpertShape(**{"experts": EXPERTS, "top_k": K, "ffn": WIDTH, "balance": 0.0, **moe})
    sizes: dict[str, Any] = {
        "family": "llama",
        "layers": 1,
        "hidden": HIDDEN,
        "heads": 2,
        "vocab": 9,
        "sequence": 16,
    }
    layer = build(ModelShape(**{**sizes, **shape}, moe=experts)).double().get_submodule("blocks.0.mlp")
    assert isinstance(layer, MoE)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.6, generator=generator)
    return layer


def names_of(layer: MoE) -> dict[str, Tensor]:
    """Weights by the names that most modules of `transformers` give them."""
    w = dict(layer.named_parameters())
    named: dict[str, Tensor] = {
        "gate.weight": w["router.gate.weight"],
        "experts.gate_up_proj": w["experts.gate_up"],
        "experts.down_proj": w["experts.down"],
    }
    if "router.correction" in w:
        named["gate.e_score_correction_bias"] = w["router.correction"]
    if "shared.gate_up.weight" in w:
        gate, up = w["shared.gate_up.weight"].chunk(2)
        named |= {
            "shared_experts.gate_proj.weight": gate,
            "shared_experts.up_proj.weight": up,
            "shared_experts.down_proj.weight": w["shared.down.weight"],
        }
    return named


def as_qwen2(layer: MoE) -> dict[str, Tensor]:
    """The same, with one shared expert and its gate."""
    named = {name.replace("shared_experts", "shared_expert"): w for name, w in names_of(layer).items()}
    assert layer.shared_gate is not None
    return {**named, "shared_expert_gate.weight": layer.shared_gate.weight}


def as_gpt_oss(layer: MoE) -> dict[str, Tensor]:
    """Transposed, gates and ups in turn."""
    w = dict(layer.named_parameters())

    def in_turn(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=1)
        return torch.stack([gate, up], dim=2).flatten(1, 2)

    return {
        "router.weight": w["router.gate.weight"],
        "router.bias": w["router.gate.bias"],
        "experts.gate_up_proj": in_turn(w["experts.gate_up"]).transpose(1, 2),
        "experts.gate_up_proj_bias": in_turn(w["experts.gate_up_bias"]),
        "experts.down_proj": w["experts.down"].transpose(1, 2),
        "experts.down_proj_bias": w["experts.down_bias"],
    }


def config_of(kind: type, **fields: Any) -> Any:
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": K, "moe_intermediate_size": WIDTH}
    config = kind(**{**sizes, "num_attention_heads": 2, **fields})
    config._experts_implementation = "eager"
    return config


def deepseek(kind: type, **fields: Any) -> Any:
    """Two shared experts of WIDTH each."""
    return config_of(kind, n_routed_experts=EXPERTS, n_shared_experts=2, **fields)


GROUPED = {"groups": 4, "top_groups": 2, "shared_ffn": SHARED}
V2 = (modeling_deepseek_v2, modeling_deepseek_v2.DeepseekV2Moe, names_of)
V3 = (modeling_deepseek_v3, modeling_deepseek_v3.DeepseekV3MoE, names_of)
CASES: dict[str, Any] = {
    "deepseek_v2-lite": (
        *V2,
        deepseek(DeepseekV2Config, topk_method="greedy", routed_scaling_factor=1.0),
        stretto_layer({"normalise": False, "shared_ffn": SHARED}),
    ),
    "deepseek_v2": (
        *V2,
        deepseek(
            DeepseekV2Config,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=16.0,
        ),
        stretto_layer({**GROUPED, "normalise": False, "scale": 16.0}),
    ),
    "deepseek_v3": (
        *V3,
        deepseek(DeepseekV3Config, n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True),
        stretto_layer(
            {**GROUPED, "score": "sigmoid", "group_score": "top2", "correction": True, "scale": 2.5}
        ),
    ),
    "deepseek_v3-not-normalised": (
        *V3,
        deepseek(DeepseekV3Config, n_group=1, topk_group=1, routed_scaling_factor=1.5, norm_topk_prob=False),
        stretto_layer(
            {
                "shared_ffn": SHARED,
                "score": "sigmoid",
                "group_score": "top2",
                "correction": True,
                "normalise": False,
                "scale": 1.5,
            }
        ),
    ),
    "qwen2_moe": (
        modeling_qwen2_moe,
        modeling_qwen2_moe.Qwen2MoeSparseMoeBlock,
        as_qwen2,
        config_of(
            Qwen2MoeConfig,
            num_experts=EXPERTS,
            shared_expert_intermediate_size=SHARED,
            norm_topk_prob=False,
        ),
        stretto_layer({"normalise": False, "shared_ffn": SHARED, "shared_gate": True}),
    ),
    "qwen3_moe": (
        modeling_qwen3_moe,
        modeling_qwen3_moe.Qwen3MoeSparseMoeBlock,
        names_of,
        config_of(Qwen3MoeConfig, num_experts=EXPERTS, norm_topk_prob=True),
        stretto_layer({}),
    ),
    "gpt_oss": (
        modeling_gpt_oss,
        modeling_gpt_oss.GptOssMLP,
        as_gpt_oss,
        config_of(GptOssConfig, num_local_experts=EXPERTS, intermediate_size=WIDTH),
        stretto_layer({"router_bias": True}, mlp="swiglu_clamped", bias=True),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: ModuleType
    module, kind, renamed, config, layer = CASES[case]
    in_float64(monkeypatch, module)
    transformers_layer: nn.Module = kind(config).double()
    names = set(transformers_layer.state_dict())
    generator = torch.Generator().manual_seed(5)
    # clamped gates see values on both sides of their bounds
    x = 4 * torch.randn(2, 16, HIDDEN, generator=generator, dtype=torch.float64)
    dy = torch.randn(2, 16, HIDDEN, generator=generator, dtype=torch.float64)
    weights = renamed(layer)
    assert set(weights) == names
    x_theirs, x_ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected: Any = torch.func.functional_call(transformers_layer, weights, (x_theirs,), strict=True)
    expected = expected[0] if isinstance(expected, tuple) else expected
    trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    dx, *gradients = torch.autograd.grad(expected, [x_theirs, *trained.values()], dy)
    y = layer(x_ours)
    (y * dy).sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-11)
    assert x_ours.grad is not None
    torch.testing.assert_close(x_ours.grad, dx, rtol=1e-9, atol=1e-10)
    for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(
            parameter.grad, gradient, rtol=1e-9, atol=1e-10, msg=lambda text, of=name: f"{of}: {text}"
        )
