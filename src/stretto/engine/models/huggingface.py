"""Weights and `config.json` to and from Hugging Face's GPT2LMHeadModel, LlamaForCausalLM and
MixtralForCausalLM.

Their weights differ from ours in four ways: names; GPT-2's linears are stored transposed; Llama's q, k, v and
its gate and up are separate tensors, where ours are stacked by rows; and Mixtral's experts are separate,
where ours are stacked. Heads and rotary features have the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.engine.models.weights import check_weights
from stretto.errors import StrettoError, nearest
from stretto.spec.experts import ExpertShape
from stretto.spec.huggingface import rope_of
from stretto.spec.huggingface import shape_from_huggingface as planned
from stretto.spec.parameters import parameter_shapes
from stretto.spec.shape import ModelShape, check_built

ROUTER = "block_sparse_moe.gate.weight"
_LINEARS = {"gate_up": ("w1", "w3"), "down": ("w2",)}  # of an expert, stacked by rows in ours
_IN_MEMORY = re.compile(r"(layers\.\d+\.)mlp\.(gate\.weight|experts\.(gate_up|down)_proj)")


def expert_names(linear: str, experts: int) -> tuple[str, ...]:
    """The names of `gate_up` or `down` of all experts of a block, in the order of our rows."""
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
    """Check that MixtralForCausalLM can represent the shape. It has no z-loss and no capacity, which are
    lost; both affect only training.

    Raises:
        StrettoError: naming the first field that it cannot represent.
    """
    moe = shape.moe
    assert moe is not None
    required = {
        "family": (shape.family, "llama"),
        "bias": (shape.bias, False),
        "moe.score": (moe.score, "softmax"),
        "moe.normalise": (moe.normalise, True),
        "moe.shared_ffn": (moe.shared_ffn, 0),
    }
    for name, (value, allowed) in required.items():
        if value != allowed:
            raise StrettoError(
                f"{name} {value!r} of a model with experts has no counterpart in MixtralForCausalLM",
                hint=f"it needs {name}: {allowed!r}",
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


# the first part of all names except the head's; files of the body alone lack it
_BODY = {"gpt": "transformer.", "llama": "model."}
_HEAD = "lm_head.weight"
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # in older files; not parameters


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One of our tensors, and the tensors of theirs that make it up."""

    ours: str
    theirs: tuple[str, ...]  # stacked by rows in ours
    rows: tuple[int, ...]  # of each of theirs
    columns: tuple[int, ...]  # of all; empty for a bias or a norm
    transposed: bool = False
    experts: int | None = None  # number of experts stacked in ours, as another first dimension

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of theirs."""
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
    """A rule for every parameter of the model; a tied head is left out.

    Raises:
        StrettoError: their model cannot represent the shape.
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
    """Our weights from theirs, one for every parameter, in their dtype; the tensors may share memory.

    Args:
        weights: a state dict, or the tensors of a published file, which may lack the tied head and the first
            part of names.

    Raises:
        StrettoError: a weight is missing, unknown, or of another size than in the shape.
    """
    mapping = list(rules(shape))
    checked = _without_extras(weights, shape)
    check_weights(checked, {name: sizes for rule in mapping for name, sizes in rule.sizes.items()})
    return {rule.ours: rule.join([checked[name] for name in rule.theirs]) for rule in mapping}


def to_huggingface(weights: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Their weights from ours, contiguous; a tied head is left out, as in their files. Their GPT-2 always has
    biases: for a shape without, these are zeros.

    Raises:
        StrettoError: their model cannot represent the shape; or a weight is missing, unknown or of another
            size.
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
    """The rule of one linear of all experts of a block, such as blocks.3.mlp.experts.down."""
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
            hint="of the two families, only llama has grouped-query attention there",
        )
    if shape.attention_width != shape.hidden:
        raise StrettoError(
            f"head_dim {shape.head_dim} * heads {shape.heads} is not hidden {shape.hidden}: "
            "GPT2LMHeadModel requires it",
            hint=f"head_dim: {shape.hidden // shape.heads}",
        )


def _full_name(name: str, shape: ModelShape) -> str:
    return name if name == _HEAD else _BODY[shape.family] + name


def _without_extras(weights: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """The weights by name without the body's prefix, without buffers, and without the head if it is tied."""
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
    """Rows of each of theirs, where ours is stacked."""
    _, module, _ = _parse(ours)
    if module == "attn.qkv":
        return shape.attention_width, shape.kv_width, shape.kv_width
    return (shape.ffn, shape.ffn) if module == "mlp.gate_up" else None


def _parse(ours: str) -> tuple[str | None, str, str]:
    """`blocks.3.attn.qkv.weight` to ("3", "attn.qkv", "weight"); block None for embedding and head."""
    module, kind = ours.rsplit(".", 1)
    if module.startswith("blocks."):
        _, block, module = module.split(".", 2)
        return block, module, kind
    return None, module, kind


Config = Mapping[str, Any]
_KINDS = ("gpt2", "llama", "mixtral")


def shape_from_huggingface(config: Config) -> ModelShape:
    """The shape in a parsed `config.json`, of a model that can be built here and gives the same logits with
    the same weights. `stretto.spec.huggingface` reads more kinds of models, for planning.

    Raises:
        StrettoError: another kind of model, or one with parts that our models do not have.
    """
    kind = config.get("model_type")
    if kind not in _KINDS:
        near = nearest(str(kind), _KINDS)
        hint = f"did you mean {near!r}?" if near else None
        raise StrettoError(f"model_type {kind!r} is not one of {', '.join(_KINDS)}", hint=hint)
    if kind == "gpt2":
        _check_gpt(config)
    else:
        _check_llama(config)
    if kind == "mixtral":
        _require(config, "sliding_window", None)
        _require(config, "router_jitter_noise", 0, 0.0)
    shape = planned(config)
    check_built(shape)
    return shape


def config_to_huggingface(shape: ModelShape) -> dict[str, Any]:
    """The `config.json` for the weights of `to_huggingface`, without the tokeniser's special tokens.

    Raises:
        StrettoError: experts that MixtralForCausalLM cannot represent.
    """
    if shape.moe is not None:
        check_mixtral(shape)
        return _mixtral_config(shape, shape.moe)
    return _gpt_config(shape) if shape.family == "gpt" else _llama_config(shape)


def _check_gpt(config: Config) -> None:
    _require(config, "activation_function", "gelu_new", "gelu_pytorch_tanh")
    _require(config, "scale_attn_weights", True)
    _require(config, "scale_attn_by_inverse_layer_idx", False)
    _require(config, "add_cross_attention", False)
    rates = {name: config.get(name, 0.1) for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop")}
    if len(set(rates.values())) > 1:
        listed = ", ".join(f"{name} {rate}" for name, rate in rates.items())
        raise StrettoError(f"{listed}: our models have one dropout rate", hint="make the three equal")


def _check_llama(config: Config) -> None:
    _require(config, "hidden_act", "silu", "swish")
    _require(config, "attention_dropout", 0, 0.0)
    _, kind = rope_of(config)
    if kind != "default":
        raise StrettoError(
            f"rope_type {kind!r}: our models have unscaled rotary positions, scaled ones give other logits",
            hint="models before Llama 3.1 have unscaled rotary positions",
        )


def _require(config: Config, name: str, *allowed: object) -> None:
    """Check that a field has a value that our models implement; if left out, it is the first of `allowed`."""
    value = config.get(name, allowed[0])
    if value not in allowed:
        raise StrettoError(
            f"{name} {value!r} is not what our model implements",
            hint=f"only {name}: {allowed[0]!r} can be imported",
        )


def _gpt_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": shape.layers,
        "n_embd": shape.hidden,
        "n_head": shape.heads,
        "n_inner": shape.ffn,
        "vocab_size": shape.vocab,
        "n_positions": shape.sequence,
        "tie_word_embeddings": shape.tied,
        "activation_function": "gelu_new",
        "embd_pdrop": shape.dropout,
        "attn_pdrop": shape.dropout,
        "resid_pdrop": shape.dropout,
        "layer_norm_epsilon": shape.norm_eps,
    }


def _mixtral_config(shape: ModelShape, moe: ExpertShape) -> dict[str, Any]:
    plain = _llama_config(shape)
    del plain["attention_bias"], plain["mlp_bias"]
    return plain | {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": shape.expert_ffn,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.balance,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    }


def _llama_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.sequence,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": shape.bias,
        "mlp_bias": shape.bias,
    }
