"""The models of the campaign as one would write them in torch alone, and their training step: the contestant.

Nothing here is Stretto's but the names of the parameters, by which a test gives both the same weights and
compares the losses. GPT-2 and Llama as in their papers; experts in a loop over the rows of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.job.job import Job
from stretto.job.shape import ModelShape


class Embedding(nn.Module):
    """Of tokens, and in GPT of positions."""

    def __init__(self, shape: ModelShape, vocab: int) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, shape.hidden)
        self.pos = nn.Embedding(shape.sequence, shape.hidden) if shape.learned else None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        return x if self.pos is None else x + self.pos.weight[: ids.shape[1]]


def norm(shape: ModelShape) -> nn.Module:
    if shape.norm == "rms":
        return nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
    return nn.LayerNorm(shape.hidden, eps=shape.norm_eps, bias=shape.bias)


class Attention(nn.Module):
    """Causal, with grouped keys and values and rotary positions where the model has them."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = shape.heads, shape.kv_heads, shape.head_dim
        self.qkv = nn.Linear(shape.hidden, (self.heads + 2 * self.kv_heads) * self.width, bias=shape.bias)
        self.proj = nn.Linear(self.heads * self.width, shape.hidden, bias=shape.bias)
        self.rotary = shape.rotary
        half = torch.arange(0, self.width, 2) / self.width
        angles = torch.outer(torch.arange(shape.sequence), shape.rope_theta**-half).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        parts = self.qkv(x).split([n * self.width for n in sizes], dim=-1)
        q, k, v = (p.unflatten(-1, (-1, self.width)).transpose(1, 2) for p in parts)
        if self.rotary:
            q, k = self.turned(q), self.turned(k)
        gqa = self.kv_heads != self.heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        return self.proj(y.transpose(1, 2).flatten(2))

    def turned(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[2]].to(x.dtype), self.sin[: x.shape[2]].to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-right, left), dim=-1) * sin


class MLP(nn.Module):
    """GELU, or SwiGLU with gate and up in one product."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        if shape.gated:
            self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=shape.bias)
        else:
            self.up = nn.Linear(shape.hidden, shape.ffn, bias=shape.bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=shape.bias)
        self.gated = shape.gated

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Router(nn.Module):
    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.gate.weight.float())


class Experts(nn.Module):
    """SwiGLU experts, stacked."""

    def __init__(self, count: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(count, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, width))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Rows x [n, hidden] with their experts [n, k] and these weights [n, k]."""
        y = torch.zeros_like(x)
        for e in range(len(self.down)):
            rows, place = (chosen == e).nonzero(as_tuple=True)
            gate, up = F.linear(x[rows], self.gate_up[e]).chunk(2, dim=-1)
            out = F.linear(F.silu(gate) * up, self.down[e]) * weights[rows, place, None]
            y.index_add_(0, rows, out.to(y.dtype))
        return y


class MoE(nn.Module):
    """Each token to its likeliest experts, their weights normalised over those."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        assert shape.moe is not None
        self.top_k = shape.moe.top_k
        self.router = Router(shape.hidden, shape.moe.experts)
        self.experts = Experts(shape.moe.experts, shape.hidden, shape.expert_ffn)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores, chosen = self.router(rows).topk(self.top_k, dim=-1)
        return self.experts(rows, chosen, scores.softmax(-1)).view_as(x)


class Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = norm(shape), Attention(shape), norm(shape)
        self.mlp = MLP(shape) if shape.moe is None else MoE(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    def __init__(self, shape: ModelShape, vocab: int) -> None:
        super().__init__()
        self.norm = norm(shape)
        self.out = nn.Linear(shape.hidden, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Model(nn.Module):
    """Tokens [b, s] and targets [b, s] to the mean loss.

    Args:
        vocab: entries of the embedding, those of the shape or more: an even number makes products faster.
    """

    def __init__(self, shape: ModelShape, vocab: int) -> None:
        super().__init__()
        self.embed = Embedding(shape, vocab)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = Head(shape, vocab)
        if shape.tied:
            self.head.out.weight = self.embed.tok.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def build(shape: ModelShape, device: torch.device, vocab: int) -> Model:
    """The model with initial values of the usual size."""
    with torch.device(device):
        model = Model(shape, vocab)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_() if name.endswith("bias") else parameter.normal_(std=0.02)
    return model


def padded(vocab: int, multiple: int = 128) -> int:
    """The vocabulary rounded up, as a trained GPT-2's is."""
    return -(-vocab // multiple) * multiple


class PlainStep:
    """Forward and backward of each microbatch, clipping, fused AdamW: the work of Stretto's step, without
    reading a loss.

    Args:
        half: weights, gradients and states in bfloat16; else float32 under autocast.
        compiler: of torch.compile; None: eager.
        convert: changes the model before it is compiled, as for 8-bit products.
    """

    def __init__(
        self,
        job: Job,
        data: Sequence[tuple[Tensor, Tensor]],
        device: torch.device,
        *,
        half: bool,
        compiler: str | None,
        convert: Callable[[nn.Module], Any] | None = None,
    ) -> None:
        model: nn.Module = build(job.shape, device, padded(job.shape.vocab))
        if half:
            model.bfloat16()
        if convert is not None:
            convert(model)
        self.parameters = list(model.parameters())
        self.model: Any = torch.compile(model, backend=compiler) if compiler else model
        how = job.optimiser
        decay = [p for p in self.parameters if p.dim() > 1]
        others = [p for p in self.parameters if p.dim() <= 1]
        groups = [
            {"params": decay, "weight_decay": how.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=how.lr, betas=how.betas, eps=how.eps, fused=True)
        self.clip = how.clip
        self.data, self.device, self.half = list(data), device, half
        self.losses: list[Tensor] = []
        self._count, self._microbatches = 0, job.microbatches or 1

    def step(self) -> None:
        """The next step."""
        total = torch.zeros((), device=self.device)
        for _ in range(self._microbatches):
            ids, targets = self.data[self._count % len(self.data)]
            self._count += 1
            with torch.autocast(self.device.type, torch.bfloat16, enabled=not self.half):
                loss = self.model(ids, targets) / self._microbatches
            loss.backward()
            total += loss.detach()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(total)
