"""The blocks of every family of models beside those of `transformers`: time of forward and backward.

Both have the same weights, read from the same config, and must give the same output before they are timed.
Two blocks each, so that of alternating ones both kinds are there, and the last norm; one thread, float32.
Times are those that the thread was on the CPU. `transformers` runs with its own attention ("eager") and with
torch's ("sdpa"), where it has that for the family; Stretto as plain modules, and with the linear layers that
replace them in training ("trained"), which use oneDNN on some CPUs.

    python benchmarks/families.py [--sequence 512] [--family gemma2]
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from harness import Laps, Step, arguments, compare, laps, report
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

from stretto.engine.models import LanguageModel, build
from stretto.engine.models.huggingface import from_huggingface
from stretto.engine.parallel.tensor.linear import ParallelLinear
from stretto.job.huggingface import shape_from_huggingface

_SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_GEMMA = {**_SIZES, "num_key_value_heads": 4, "head_dim": 128, "query_pre_attn_scalar": 128}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 352}
_LATENT = {
    **{name: value for name, value in _SIZES.items() if name != "head_dim"},
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 352,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_GROUPS = {"n_group": 4, "topk_group": 2}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}

CONFIGS: dict[str, Mapping[str, Any]] = {
    "llama": _SIZES,
    "mistral": {**_SIZES, "sliding_window": 256},
    "mixtral": {**_SIZES, "intermediate_size": 352, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": _SIZES,
    "qwen3": _SIZES,
    "qwen3_moe": {**_SIZES, **_EXPERTS},
    "gemma2": {**_GEMMA, "sliding_window": 256},
    "gemma3_text": {**_GEMMA, **_LAYERS, "sliding_window": 256},
    "gpt_oss": {**_SIZES, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 352},
    "deepseek_v2": {**_LATENT, **_GROUPS, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_LATENT, **_GROUPS},
}


def transformers_model(kind: str, attention: str) -> nn.Module:
    """A model of `transformers` with random weights, the same for the same kind."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **CONFIGS[kind])
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def stretto_model(model: nn.Module) -> LanguageModel:
    """Stretto's model with the weights of theirs."""
    config: Any = model.config
    shape = shape_from_huggingface(config.to_dict())
    built = build(shape)
    built.load_state_dict(from_huggingface(model.state_dict(), shape), strict=False)  # not tied ones
    built.tie()
    return built


def trained(model: LanguageModel) -> LanguageModel:
    """The model with the linears that `parallelize` makes on one rank; experts stay as they are."""
    for module in list(model.blocks.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, ParallelLinear(nn.Parameter(child.weight), child.bias))
    return model


def our_blocks(model: LanguageModel, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return model.head.norm(x)


def their_blocks(model: nn.Module, x: Tensor) -> Tensor:
    body: Any = model.model
    return body(inputs_embeds=x, use_cache=False).last_hidden_state


def contestants(kind: str, sequence: int) -> dict[str, Step]:
    """A step of each: the blocks' forward and backward on one sample."""
    torch.manual_seed(1)
    x, dy = torch.randn(2, 1, sequence, CONFIGS[kind]["hidden_size"])
    runs: dict[str, tuple[Any, Any]] = {}
    for attention in ("eager", "sdpa"):
        try:
            runs[f"transformers, {attention}"] = their_blocks, transformers_model(kind, attention)
        except ValueError:  # the family has no such attention there
            continue
    runs["Stretto"] = our_blocks, stretto_model(runs["transformers, eager"][1])
    runs["Stretto, trained"] = our_blocks, trained(stretto_model(runs["transformers, eager"][1]))
    with torch.no_grad():
        outputs = {name: blocks(model, x) for name, (blocks, model) in runs.items()}
    plain = outputs["transformers, eager"]
    for name, y in outputs.items():
        error = float((y - plain).abs().max() / plain.abs().max())
        assert error < 1e-4, f"{kind}: {name} is {error:.1e} off"

    def step(blocks: Any, model: nn.Module) -> None:
        model.zero_grad()
        blocks(model, x.clone().requires_grad_()).backward(dy)

    return {name: lambda run=run: step(*run) for name, run in runs.items()}


def main() -> None:
    args = arguments(__doc__, rounds=9, sequence=512, family="all")
    torch.set_num_threads(1)
    summary = [
        f"| {args.sequence} tokens | Stretto, CPU ms | over eager | over sdpa "
        "| trained, over eager | trained, over sdpa |",
        "|---|---|---|---|---|---|",
    ]
    for kind in CONFIGS if args.family == "all" else [args.family]:
        cpu = laps(contestants(kind, args.sequence), args.rounds, warmup=1).cpus
        times, eager = Laps(cpu, cpu), "transformers, eager"
        report(f"two blocks of {kind}, {args.sequence} tokens", compare(times, eager), eager, args.out)
        cells = [f"{median(cpu['Stretto']):.0f}"]
        for name in ("Stretto", "Stretto, trained"):
            for reference in (eager, "transformers, sdpa"):
                cells.append(_speed(times, name, reference) if reference in cpu else "-")
        summary.append(f"| {kind} | {' | '.join(cells)} |")
    print("\n".join(summary))


def _speed(times: Laps, name: str, reference: str) -> str:
    mine = next(t for t in compare(times, reference) if t.name == name)
    return f"{mine.speedup:.2f} ({mine.low:.2f} to {mine.high:.2f})"


if __name__ == "__main__":
    main()
