"""Weights to and from the names and layouts of Hugging Face's GPT2LMHeadModel, LlamaForCausalLM and
MixtralForCausalLM.

Theirs differ from ours in four ways: names; GPT-2's linears are stored transposed; Llama's q, k, v and its
gate and up are tensors of their own, where ours are stacked by rows; and so is every expert of Mixtral. The
order of heads and of rotary features is the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.engine.models.weights import check_weights
from stretto.errors import StrettoError
from stretto.spec.parameters import parameter_shapes
from stretto.spec.shape import ModelShape

ROUTER = "block_sparse_moe.gate.weight"
_LINEARS = {"gate_up": ("w1", "w3"), "down": ("w2",)}  # stacked by rows to give ours
_IN_MEMORY = re.compile(r"(layers\.\d+\.)mlp\.(gate\.weight|experts\.(gate_up|down)_proj)")


def expert_names(linear: str, experts: int) -> tuple[str, ...]:
    """What `gate_up` or `down` of all experts of a block is called, in the order of our rows."""
    return tuple(
        f"block_sparse_moe.experts.{e}.{part}.weight" for e in range(experts) for part in _LINEARS[linear]
    )


def unstack(weights: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Weights under the files' names, whether they come from a file or from a model in memory."""
    unstacked: dict[str, Tensor] = {}
    for name, weight in weights.items():
        match = _IN_MEMORY.fullmatch(name)
        if match is None:
            unstacked[name] = weight
        elif match[3] is None:
            unstacked[match[1] + ROUTER] = weight
        else:
            unstacked |= {match[1] + part: w for part, w in _parts(name, match[3], weight, shape).items()}
    return unstacked


def check_mixtral(shape: ModelShape) -> None:
    """Let pass only what MixtralForCausalLM can be. It has no z-loss and no capacity; both matter in training
    only, and are lost.

    Raises:
        StrettoError: naming what it has not.
    """
    moe = shape.moe
    assert moe is not None
    lacks = {
        "family": (shape.family, "llama"),
        "bias": (shape.bias, False),
        "moe.score": (moe.score, "softmax"),
        "moe.normalise": (moe.normalise, True),
        "moe.shared_ffn": (moe.shared_ffn, 0),
    }
    for name, (value, allowed) in lacks.items():
        if value != allowed:
            raise StrettoError(
                f"{name} {value!r} of a model with experts has no counterpart in MixtralForCausalLM",
                hint=f"only {name}: {allowed!r} exchanges",
            )


def _parts(name: str, linear: str, weight: Tensor, shape: ModelShape) -> dict[str, Tensor]:
    """The experts of a stacked tensor, as views of it."""
    assert shape.moe is not None
    experts, width = shape.moe.experts, shape.expert_ffn
    wide = (experts, 2 * width, shape.hidden)
    sizes = wide if linear == "gate_up" else (experts, shape.hidden, width)
    if tuple(weight.shape) != sizes:
        raise StrettoError(
            f"weight {name!r} is {list(weight.shape)}, but {list(sizes)} in the model",
            hint="set the model's sizes to those of the checkpoint",
        )
    count = len(_LINEARS[linear])
    return dict(zip(expert_names(linear, experts), weight.flatten(0, 1).chunk(experts * count), strict=True))


# the first part of all names but the head's; files of the body alone lack it
_BODY = {"gpt": "transformer.", "llama": "model."}
_HEAD = "lm_head.weight"
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # in older files; no parameters


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One of our tensors and what it is made of in theirs."""

    ours: str
    theirs: tuple[str, ...]  # stacked by rows to give ours
    rows: tuple[int, ...]  # of each
    columns: tuple[int, ...]  # of all; none for a bias or a norm
    transposed: bool = False
    experts: int | None = None  # how many lie one behind the other in ours, which has a dimension more

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Name and sizes of each of theirs."""
        plain = {name: (rows, *self.columns) for name, rows in zip(self.theirs, self.rows, strict=True)}
        return {name: sizes[::-1] if self.transposed else sizes for name, sizes in plain.items()}

    def join(self, parts: list[Tensor]) -> Tensor:
        """Theirs to ours."""
        turned = [part.t().contiguous() if self.transposed else part for part in parts]
        whole = turned[0] if len(turned) == 1 else torch.cat(turned)
        return whole if self.experts is None else whole.unflatten(0, (self.experts, -1))

    def split(self, whole: Tensor) -> list[Tensor]:
        """Ours to theirs."""
        parts = (whole if self.experts is None else whole.flatten(0, 1)).split(self.rows)
        return [part.t().contiguous() if self.transposed else part.contiguous() for part in parts]


def rules(shape: ModelShape) -> Iterator[Rule]:
    """How every parameter of the model is written there; a tied head is left out.

    Raises:
        StrettoError: the shape is one that their model cannot have.
    """
    _check_expressible(shape)
    for ours, (rows, *columns) in parameter_shapes(shape).items():
        if shape.family == "gpt":
            transposed = ours.startswith("blocks.") and bool(columns)
            yield Rule(
                ours=ours,
                theirs=(_gpt_name(ours),),
                rows=(rows,),
                columns=tuple(columns),
                transposed=transposed,
            )
        elif shape.moe is not None and ".experts." in ours:
            yield _experts(ours, shape)
        else:
            theirs = _llama_names(ours)
            yield Rule(
                ours=ours, theirs=theirs, rows=_llama_rows(ours, shape) or (rows,), columns=tuple(columns)
            )


def from_huggingface(weights: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Our weights from theirs, one for every parameter, in their dtype; tensors may share memory.

    Takes a state dict, or the tensors of a published file, which may lack the tied head and the first part of
    names.

    Raises:
        StrettoError: a weight is missing, unknown, or of a size that the shape does not have.
    """
    mapping = list(rules(shape))
    checked = _without_extras(weights, shape)
    check_weights(checked, {name: sizes for rule in mapping for name, sizes in rule.sizes.items()})
    return {rule.ours: rule.join([checked[name] for name in rule.theirs]) for rule in mapping}


def to_huggingface(weights: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Their weights from ours, contiguous; a tied head is left out, as in their files.

    GPT-2 has biases there always: a shape without gets zeros.

    Raises:
        StrettoError: their model cannot have that shape; or a weight is missing, unknown or of another size.
    """
    check_weights(weights, parameter_shapes(shape))
    converted: dict[str, Tensor] = {}
    for rule in rules(shape):
        for name, part in zip(rule.theirs, rule.split(weights[rule.ours]), strict=True):
            converted[_full_name(name, shape)] = part
            if shape.family == "gpt" and not shape.bias and name.startswith(("h.", "ln_f.")):
                bias = _full_name(name.removesuffix("weight") + "bias", shape)
                converted[bias] = part.new_zeros(part.shape[-1])
    return converted


def _experts(ours: str, shape: ModelShape) -> Rule:
    """One linear of all experts of a block; ours is called blocks.3.mlp.experts.down, say."""
    assert shape.moe is not None
    _, block, _, _, linear = ours.split(".")
    theirs = tuple(f"layers.{block}.{name}" for name in expert_names(linear, shape.moe.experts))
    rows, columns = (shape.hidden, shape.expert_ffn)
    if linear == "gate_up":
        rows, columns = columns, rows
    return Rule(
        ours=ours, theirs=theirs, rows=(rows,) * len(theirs), columns=(columns,), experts=shape.moe.experts
    )


def _check_expressible(shape: ModelShape) -> None:
    if shape.moe is not None:
        check_mixtral(shape)
    if shape.family != "gpt":
        return
    if shape.kv_heads != shape.heads:
        raise StrettoError(
            f"kv_heads {shape.kv_heads} below heads {shape.heads} has no counterpart in GPT2LMHeadModel",
            hint="grouped-query attention exchanges as family: llama only",
        )
    if shape.attention_width != shape.hidden:
        raise StrettoError(
            f"head_dim {shape.head_dim} * heads {shape.heads} is not hidden {shape.hidden}: "
            "GPT2LMHeadModel has no such heads",
            hint=f"head_dim: {shape.hidden // shape.heads}",
        )


def _full_name(name: str, shape: ModelShape) -> str:
    return name if name == _HEAD else _BODY[shape.family] + name


def _without_extras(weights: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Names without the body's prefix; without buffers, and without a head that is truly tied."""
    prefix = _BODY[shape.family]
    kept = {name.removeprefix(prefix): w for name, w in weights.items() if not name.endswith(_BUFFERS)}
    if shape.moe is not None:
        kept = unstack(kept, shape)
    if shape.tied and _HEAD in kept:
        head = kept.pop(_HEAD)
        embedding = kept.get("wte.weight" if shape.family == "gpt" else "embed_tokens.weight")
        if embedding is not None and not torch.equal(head, embedding):
            raise StrettoError(
                f"weight {_HEAD!r} differs from the embedding, but the model's head is tied to it",
                hint="tied: false",
            )
    return kept


_GPT = {
    "embed.tok": "wte",
    "embed.pos": "wpe",
    "norm1": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "norm2": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "head.norm": "ln_f",
    "head.out": "lm_head",
}

_LLAMA = {
    "embed.tok": ("embed_tokens",),
    "norm1": ("input_layernorm",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.proj": ("self_attn.o_proj",),
    "norm2": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
    "mlp.router.gate": (ROUTER.removesuffix(".weight"),),
    "head.norm": ("norm",),
    "head.out": ("lm_head",),
}


def _gpt_name(ours: str) -> str:
    block, module, kind = _parse(ours)
    prefix = "" if block is None else f"h.{block}."
    return f"{prefix}{_GPT[module]}.{kind}"


def _llama_names(ours: str) -> tuple[str, ...]:
    block, module, kind = _parse(ours)
    prefix = "" if block is None else f"layers.{block}."
    return tuple(f"{prefix}{name}.{kind}" for name in _LLAMA[module])


def _llama_rows(ours: str, shape: ModelShape) -> tuple[int, ...] | None:
    """Rows of each part where ours is stacked."""
    _, module, _ = _parse(ours)
    if module == "attn.qkv":
        return shape.attention_width, shape.kv_width, shape.kv_width
    return (shape.ffn, shape.ffn) if module == "mlp.gate_up" else None


def _parse(ours: str) -> tuple[str | None, str, str]:
    """`blocks.3.attn.qkv.weight` to ("3", "attn.qkv", "weight"); no block for embedding and head."""
    module, kind = ours.rsplit(".", 1)
    if module.startswith("blocks."):
        _, block, module = module.split(".", 2)
        return block, module, kind
    return None, module, kind
