"""Small models with torchtitan's names, written plainly, and their checkpoints as torchtitan writes them.

After torchtitan's models/llama3, models/qwen3 and models/common: its Llama turns neighbouring features of
queries and keys, its Qwen3 the two halves of a head. `kind` is "fused" for main of August 2026, where
queries, keys and values are one parameter, "apart" for the same with three, and "old" for the names of 0.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.job.shape import ModelShape


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class QKV(nn.Module):
    names = ("wq", "wk", "wv")

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        kv = shape.kv_heads * shape.head_dim
        self.wq = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.wk = nn.Linear(shape.hidden, kv, bias=False)
        self.wv = nn.Linear(shape.hidden, kv, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.wq(x), self.wk(x), self.wv(x)


class FusedQKV(nn.Module):
    """One parameter, by groups of heads with one key; apart in the state dict."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = (shape.heads // shape.kv_heads, 1, 1)
        self.width = shape.head_dim
        self.wqkv = nn.Linear(shape.hidden, shape.kv_heads * sum(self.heads) * shape.head_dim, bias=False)
        self.register_state_dict_post_hook(self.split)
        self.register_load_state_dict_pre_hook(self.merge)

    def groups(self, values: Tensor, dim: int) -> list[Tensor]:
        """Queries, keys and values of a tensor with all of them along a dimension."""
        apart = values.unflatten(dim, (-1, sum(self.heads), self.width)).split(self.heads, dim=dim + 1)
        return [part.flatten(dim, dim + 2) for part in apart]

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.groups(self.wqkv(x), 2)

    @staticmethod
    def split(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        parts = module.groups(state.pop(f"{prefix}wqkv.weight"), 0)
        state |= {f"{prefix}{name}.weight": part for name, part in zip(QKV.names, parts, strict=True)}

    @staticmethod
    def merge(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        parts = [state.pop(f"{prefix}{name}.weight") for name in QKV.names]
        heads = [
            part.unflatten(0, (-1, count, module.width))
            for part, count in zip(parts, module.heads, strict=True)
        ]
        state[f"{prefix}wqkv.weight"] = torch.cat(heads, dim=1).flatten(0, 2)


class Attention(nn.Module):
    def __init__(self, shape: ModelShape, kind: str) -> None:
        super().__init__()
        self.shape, self.old = shape, kind == "old"
        if self.old:
            inner = QKV(shape)
            self.wq, self.wk, self.wv = inner.wq, inner.wk, inner.wv
        else:
            self.qkv_linear = FusedQKV(shape) if kind == "fused" else QKV(shape)
        self.wo = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.normed = shape.attention.norm is not None
        if self.normed:
            self.q_norm = Norm(shape.head_dim, shape.norm_eps)
            self.k_norm = Norm(shape.head_dim, shape.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        shape = self.shape
        flat = (self.wq(x), self.wk(x), self.wv(x)) if self.old else self.qkv_linear(x)
        q, k, v = (values.unflatten(-1, (-1, shape.head_dim)) for values in flat)
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.turn(q), self.turn(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))

    def turn(self, x: Tensor) -> Tensor:
        """x: (batch, positions, heads, features)."""
        positions, features = x.shape[1], x.shape[3]
        powers = torch.arange(0, features, 2, dtype=torch.float64) / features
        angles = torch.outer(torch.arange(positions).double(), self.shape.rope_theta**-powers)
        cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
        if self.normed:
            first, second = x.chunk(2, dim=-1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)


class FeedForward(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, width, bias=False)
        self.w2 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, shape: ModelShape, kind: str) -> None:
        super().__init__()
        self.attention = Attention(shape, kind)
        self.feed_forward = FeedForward(shape.hidden, shape.ffn)
        self.attention_norm = Norm(shape.hidden, shape.norm_eps)
        self.ffn_norm = Norm(shape.hidden, shape.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    """A dense model of the sizes of a shape."""

    def __init__(self, shape: ModelShape, kind: str = "fused") -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleDict({str(i): Block(shape, kind) for i in range(shape.layers)})
        self.norm = Norm(shape.hidden, shape.norm_eps)
        head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if kind == "old":
            self.output = head
        else:
            self.lm_head = head
        if shape.tied:
            head.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x)
        head: Any = self.lm_head if hasattr(self, "lm_head") else self.output
        return head(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    """AdamW in two groups, since norms have no weight decay, with the names that torchtitan keeps in them."""
    named = list(model.named_parameters())
    decay = settings.pop("weight_decay", 0.1)
    groups = [
        {
            "params": [p for _, p in named if (p.dim() > 1) is matrix],
            "param_names": [n for n, p in named if (p.dim() > 1) is matrix],
            "weight_decay": decay if matrix else 0.0,
        }
        for matrix in (True, False)
    ]
    return torch.optim.AdamW(groups, **settings)


def optimiser_state(optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """The flat state dict of torchtitan's `components/optimizer`, of live tensors."""
    flat: dict[str, Any] = {}
    for group in optimiser.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            flat |= {f"state.{name}.{key}": value for key, value in optimiser.state[parameter].items()}
            rest = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            flat |= {f"param_groups.{name}.{key}": value for key, value in rest.items()}
    return flat


def state_of(model: nn.Module, optimiser: torch.optim.Optimizer | None, step: int) -> dict[str, Any]:
    """All that torchtitan gives to `dcp.save`."""
    state: dict[str, Any] = dict(model.state_dict())
    if optimiser is None:
        return state
    return state | {
        "optimizer": optimiser_state(optimiser),
        "lr_scheduler": {"last_epoch": step},
        "dataloader": {"dp_rank_0": b"\x80\x04not read", "world_size": 1},
        "train_state": {"step": step, "ntokens_seen": 1000 * step},
    }


def write(
    folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer | None = None, step: int = 0
) -> Path:
    """A checkpoint of torch.distributed.checkpoint, from this process alone."""
    dcp.save(state_of(model, optimiser, step), checkpoint_id=folder, no_dist=True)
    return folder


def batches(shape: ModelShape, count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Random tokens and targets, (2, sequence) each."""
    stream = torch.Generator().manual_seed(seed)
    sizes = (count, 2, 2, shape.sequence)
    return [(tokens[0], tokens[1]) for tokens in torch.randint(shape.vocab, sizes, generator=stream)]


def train(
    model: nn.Module, optimiser: torch.optim.Optimizer, steps: list[tuple[Tensor, Tensor]]
) -> Mapping[str, Tensor]:
    """Plain steps without clipping; the parameters afterwards."""
    for tokens, targets in steps:
        optimiser.zero_grad()
        model.loss(tokens, targets).backward()  # pyright: ignore
        optimiser.step()
    return dict(model.named_parameters())
