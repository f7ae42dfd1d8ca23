"""Convert weights from and to Hugging Face's models: names and forms of the tensors of every kind of model.

Their weights differ from the plain model's in names and forms: GPT-2's linears are transposed; queries, keys
and values, and gate and up, are separate tensors, which the plain model stacks by rows; experts are separate
tensors in files, and stacked in memory like the plain model's; gpt-oss's experts are transposed, with gate
and up interleaved; T5's relative position biases are transposed; BART's learned positions begin with two
unused rows. Heads and rotary features have the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stretto.engine.models.weights import check_weights
from stretto.errors import StrettoError
from stretto.job.huggingface import kind_of
from stretto.job.parameters import Sizes, parameter_shapes
from stretto.job.shape import ModelShape

HEAD = "lm_head.weight"
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # in older files; not parameters
# repeated or unused weights of models with an encoder; all published values of the first are zero
_REPEATED = frozenset(
    {
        "final_logits_bias",
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    }
)
# prefixes of names in a model with vision: of its language model, and of the other weights
_LANGUAGE = ("language_model.model.", "model.language_model.", "language_model.")
_PICTURES = ("vision_tower.", "multi_modal_projector.")
_FURTHER = (".eh_proj.", ".enorm.", ".hnorm.", ".shared_head.")  # in a layer that predicts further tokens


class WeightForm(Protocol):
    """Conversion of Hugging Face's tensors to one plain tensor, and back."""

    def join(self, parts: list[Tensor]) -> Tensor:
        """Convert Hugging Face's tensors to the plain tensor."""
        ...

    def split(self, full: Tensor) -> list[Tensor]:
        """Convert the plain tensor to Hugging Face's tensors, contiguous."""
        ...


@dataclass(frozen=True)
class StackedRows:
    """Hugging Face's tensors are stacked by rows; the plain tensor of experts has another first dimension."""

    rows: tuple[int, ...]
    experts: int | None = None

    def join(self, parts: list[Tensor]) -> Tensor:
        full = parts[0] if len(parts) == 1 else torch.cat(parts)
        return full if self.experts is None else full.unflatten(0, (self.experts, -1))

    def split(self, full: Tensor) -> list[Tensor]:
        flat = full if self.experts is None else full.flatten(0, 1)
        return [part.contiguous() for part in flat.split(self.rows)]


@dataclass(frozen=True)
class Gpt2Linear:
    """A GPT-2 linear: input features first, always with a bias, which is zero if the plain model has none."""

    transposed: bool
    zeros: int | None = None

    def join(self, parts: list[Tensor]) -> Tensor:
        if self.zeros is not None and not parts[1].is_meta and bool(parts[1].any()):
            raise StrettoError(
                "a bias of the checkpoint is not zero, but the model has none", hint="bias: true"
            )
        return parts[0].t().contiguous() if self.transposed else parts[0]

    def split(self, full: Tensor) -> list[Tensor]:
        part = full.t().contiguous() if self.transposed else full.contiguous()
        return [part] if self.zeros is None else [part, part.new_zeros(self.zeros)]


@dataclass(frozen=True)
class GptOssExperts:
    """Experts of gpt-oss, also stacked in files: input features first, gate and up interleaved."""

    gated: bool

    def join(self, parts: list[Tensor]) -> Tensor:
        full = parts[0].transpose(1, 2) if parts[0].dim() == 3 else parts[0]
        return torch.cat([full[:, ::2], full[:, 1::2]], dim=1) if self.gated else full.contiguous()

    def split(self, full: Tensor) -> list[Tensor]:
        turns = torch.stack(full.chunk(2, dim=1), dim=2).flatten(1, 2) if self.gated else full
        return [(turns.transpose(1, 2) if turns.dim() == 3 else turns).contiguous()]


@dataclass(frozen=True)
class Transposed:
    """Hugging Face's tensor is the transpose."""

    def join(self, parts: list[Tensor]) -> Tensor:
        return parts[0].t().contiguous()

    def split(self, full: Tensor) -> list[Tensor]:
        return [full.t().contiguous()]


@dataclass(frozen=True)
class RowOffset:
    """Hugging Face's tensor begins with unused rows."""

    rows: int

    def join(self, parts: list[Tensor]) -> Tensor:
        return parts[0][self.rows :].contiguous()

    def split(self, full: Tensor) -> list[Tensor]:
        return [torch.cat([full.new_zeros(self.rows, full.shape[1]), full])]


@dataclass(frozen=True, kw_only=True)
class WeightRule:
    """One plain tensor, and the tensors of Hugging Face that it consists of.

    sizes: names and shapes of Hugging Face's tensors, in the order of `join` and `split`.
    """

    plain_name: str
    sizes: Mapping[str, Sizes]
    form: WeightForm

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Names of Hugging Face's tensors."""
        return tuple(self.sizes)

    def join(self, parts: list[Tensor]) -> Tensor:
        """Convert Hugging Face's tensors to the plain tensor."""
        return self.form.join(parts)

    def split(self, full: Tensor) -> list[Tensor]:
        """Convert the plain tensor to Hugging Face's tensors, contiguous."""
        return self.form.split(full)


def rules(shape: ModelShape, present: Collection[str] = ()) -> Iterator[WeightRule]:
    """Yield a rule for every parameter of the model; a tied head is left out.

    Args:
        present: names in a source, from `plain_names`; if names differ between models in memory and files,
            a rule uses those that are present.

    Raises:
        StrettoError: no model of Hugging Face can represent the shape.
    """
    kind = kind_of(shape).name
    for plain_name, sizes in parameter_shapes(shape).items():
        if kind == "gpt2":
            yield _gpt2_rule(plain_name, sizes, shape)
        elif kind in _STACKS:
            yield _stacks_rule(plain_name, sizes, kind, shape)
        elif ".experts." in plain_name:
            yield _experts_rule(plain_name, sizes, kind=kind, present=present)
        else:
            prefix, module, suffix = _parse(plain_name, "model.layers.")
            names = _OF_KIND.get(kind, {}).get(module) or _NAMES[module]
            if kind == "mixtral" and f"{prefix}mlp.gate.weight" in present and module == "mlp.router.gate":
                names = _NAMES[module]
            rows = (sizes[0] // len(names),) * len(names)
            if module == "attn.qkv":
                rows = (shape.attention_width, shape.kv_width, shape.kv_width)
            ends = f".{suffix}" if suffix else ""
            hf_name = {
                f"{prefix}{name}{ends}": (count, *sizes[1:]) for name, count in zip(names, rows, strict=True)
            }
            yield WeightRule(plain_name=plain_name, sizes=hf_name, form=StackedRows(rows))


def plain_names(names: Iterable[str], shape: ModelShape) -> dict[str, str]:
    """Map the names that `rules` uses for the language model's weights to their names in the source.

    Files without a head lack the prefix of names; models with vision have another prefix. Buffers, copies of
    the embedding, vision towers and layers that predict further tokens are left out.
    """
    kind = kind_of(shape).name
    prefix = {"gpt2": "transformer.", "t5": ""}.get(kind, "model.")  # of all names but the head's
    weights = [name for name in names if not name.endswith(_BUFFERS) and name not in _REPEATED]
    further = tuple[str, ...]()  # prefixes of layers after the last, which predict further tokens
    if kind == "deepseek_v3":
        after = {name.split(".")[2] for name in weights if any(mark in name for mark in _FURTHER)}
        further = tuple(f"model.layers.{i}." for i in after if i.isdecimal() and int(i) >= shape.layers)
    plain = dict[str, str]()
    for name in weights:
        full = name
        if kind == "gemma3_text":
            if name.removeprefix("model.").startswith(_PICTURES):
                continue
            full = name.removeprefix(next((start for start in _LANGUAGE if name.startswith(start)), ""))
        if not full.startswith(further or ("\0",)):
            plain[full if full.startswith((prefix, "lm_head.")) else prefix + full] = name
    return plain


def from_huggingface(weights: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Return the plain model's weights, one per parameter, in the source's dtype; they may share memory.

    Args:
        weights: a state dict, or the tensors of a published file, which may lack the tied head and the prefix
            of names.

    Raises:
        StrettoError: a weight is missing, unknown, or of another size than in the shape.
    """
    if (bias := weights.get("final_logits_bias")) is not None and not bias.is_meta and bool(bias.any()):
        raise StrettoError("final_logits_bias is not zero, but the plain model's head has no bias")
    named = {plain: weights[name] for plain, name in plain_names(weights, shape).items()}
    mapping = list(rules(shape, named))
    if shape.tied and HEAD in named:
        head, embedding = named.pop(HEAD), named.get(mapping[0].hf_names[0])
        if embedding is not None and not torch.equal(head, embedding):
            raise StrettoError(
                f"weight {HEAD!r} differs from the embedding, but the model's head is tied to it",
                hint="tied: false",
            )
    check_weights(named, {name: sizes for rule in mapping for name, sizes in rule.sizes.items()})
    return {rule.plain_name: rule.join([named[name] for name in rule.hf_names]) for rule in mapping}


def to_huggingface(weights: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Return Hugging Face's weights, contiguous, under the names of files, which leave out a tied head.

    Hugging Face's GPT-2 always has biases: they are zero for a shape without.

    Raises:
        StrettoError: no model of Hugging Face can represent the shape; or a weight is missing, unknown or of
            another size.
    """
    check_weights(weights, parameter_shapes(shape))
    converted: dict[str, Tensor] = {}
    for rule in rules(shape):
        converted |= zip(rule.hf_names, rule.split(weights[rule.plain_name]), strict=True)
    return converted


_GPT2 = {
    "embed.tok": "transformer.wte",
    "embed.pos": "transformer.wpe",
    "norm1": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "norm2": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "head.norm": "transformer.ln_f",
    "head.out": "lm_head",
}
# names for models with an encoder: modules outside of blocks, prefixes of both stacks, and modules in blocks
_STACKS: Mapping[str, Mapping[str, str]] = {
    "t5": {
        "embed.tok": "shared",
        "decoder_embed.memory_norm": "encoder.final_layer_norm",
        "head.norm": "decoder.final_layer_norm",
        "head.out": "lm_head",
    },
    "bart": {
        "embed.tok": "model.shared",
        "embed.pos": "model.encoder.embed_positions",
        "embed.norm": "model.encoder.layernorm_embedding",
        "decoder_embed.pos": "model.decoder.embed_positions",
        "decoder_embed.norm": "model.decoder.layernorm_embedding",
        "head.out": "lm_head",
    },
}
_STACK_BLOCKS = {
    "t5": {"encoder": "encoder.block.", "blocks": "decoder.block."},
    "bart": {"encoder": "model.encoder.layers.", "blocks": "model.decoder.layers."},
}
_T5_SELF, _T5_CROSS = "layer.0.SelfAttention.", "layer.1.EncDecAttention."
_STACK_MODULES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "t5": {
        "norm1": ("layer.0.layer_norm",),
        "attn.qkv": (f"{_T5_SELF}q", f"{_T5_SELF}k", f"{_T5_SELF}v"),
        "attn.relative": (f"{_T5_SELF}relative_attention_bias",),
        "attn.proj": (f"{_T5_SELF}o",),
        "norm_cross": ("layer.1.layer_norm",),
        "cross.q": (f"{_T5_CROSS}q",),
        "cross.kv": (f"{_T5_CROSS}k", f"{_T5_CROSS}v"),
        "cross.proj": (f"{_T5_CROSS}o",),
        "norm2": ("layer.{last}.layer_norm",),
        "mlp.up": ("layer.{last}.DenseReluDense.wi",),
        "mlp.gate_up": ("layer.{last}.DenseReluDense.wi_0", "layer.{last}.DenseReluDense.wi_1"),
        "mlp.down": ("layer.{last}.DenseReluDense.wo",),
    },
    "bart": {
        "norm1": ("self_attn_layer_norm",),
        "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.proj": ("self_attn.out_proj",),
        "norm_cross": ("encoder_attn_layer_norm",),
        "cross.q": ("encoder_attn.q_proj",),
        "cross.kv": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
        "cross.proj": ("encoder_attn.out_proj",),
        "norm2": ("final_layer_norm",),
        "mlp.up": ("fc1",),
        "mlp.down": ("fc2",),
    },
}
_BART_OFFSET = 2  # unused rows before position 0
# names for all other models; attn.sinks and the router's correction are parameters, not modules
_NAMES: Mapping[str, tuple[str, ...]] = {
    "embed.tok": ("model.embed_tokens",),
    "norm1": ("input_layernorm",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "attn.sinks": ("self_attn.sinks",),
    "attn.q": ("self_attn.q_proj",),
    "attn.q_down": ("self_attn.q_a_proj",),
    "attn.q_down_norm": ("self_attn.q_a_layernorm",),
    "attn.q_up": ("self_attn.q_b_proj",),
    "attn.kv_down": ("self_attn.kv_a_proj_with_mqa",),
    "attn.kv_down_norm": ("self_attn.kv_a_layernorm",),
    "attn.kv_up": ("self_attn.kv_b_proj",),
    "attn.proj": ("self_attn.o_proj",),
    "norm2": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
    "mlp.router.gate": ("mlp.gate",),
    "mlp.router.correction": ("mlp.gate.e_score_correction_bias",),
    "mlp.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared.down": ("mlp.shared_experts.down_proj",),
    "head.norm": ("model.norm",),
    "head.out": ("lm_head",),
}
_SANDWICH = {
    "norm1_post": ("post_attention_layernorm",),
    "norm2": ("pre_feedforward_layernorm",),
    "norm2_post": ("post_feedforward_layernorm",),
}
# exceptions by kind
_OF_KIND: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "mixtral": {"mlp.router.gate": ("block_sparse_moe.gate",)},
    "qwen2_moe": {
        "mlp.shared.gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "mlp.shared.down": ("mlp.shared_expert.down_proj",),
        "mlp.shared_gate": ("mlp.shared_expert_gate",),
    },
    "gemma2": _SANDWICH,
    "gemma3_text": _SANDWICH,
    "gpt_oss": {"mlp.router.gate": ("mlp.router",)},
}
# names of one expert in files: the parts of `gate_up`, and `down`
_MIXTRAL_EXPERT = "block_sparse_moe.experts.{expert}.{part}.weight"
_EXPERT = "mlp.experts.{expert}.{part}.weight"
_MIXTRAL_PARTS = {"gate_up": ("w1", "w3"), "down": ("w2",)}
_PARTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


def _gpt2_rule(plain_name: str, sizes: Sizes, shape: ModelShape) -> WeightRule:
    prefix, module, kind = _parse(plain_name, "transformer.h.")
    hf_name = prefix + _GPT2[module]
    linear = bool(prefix) and len(sizes) == 2
    full = {f"{hf_name}.{kind}": sizes[::-1] if linear else sizes}
    biased = bool(prefix) or module == "head.norm"
    if shape.bias or not biased or kind == "bias":
        return WeightRule(plain_name=plain_name, sizes=full, form=Gpt2Linear(linear))
    return WeightRule(
        plain_name=plain_name, sizes={**full, f"{hf_name}.bias": sizes[:1]}, form=Gpt2Linear(linear, sizes[0])
    )


def _stacks_rule(plain_name: str, sizes: Sizes, kind: str, shape: ModelShape) -> WeightRule:
    """Return the rule of a parameter of a model with an encoder."""
    stack, _, inside = plain_name.partition(".")
    if stack not in _STACK_BLOCKS[kind]:
        module, _, leaf = plain_name.rpartition(".")
        hf_name = f"{_STACKS[kind][module]}.{leaf}"
        if module.endswith(".pos"):
            full = (sizes[0] + _BART_OFFSET, *sizes[1:])
            return WeightRule(plain_name=plain_name, sizes={hf_name: full}, form=RowOffset(_BART_OFFSET))
        return WeightRule(plain_name=plain_name, sizes={hf_name: sizes}, form=StackedRows(sizes[:1]))
    block, _, module = inside.partition(".")
    prefix, last = f"{_STACK_BLOCKS[kind][stack]}{block}.", 1 if stack == "encoder" else 2
    if module == "attn.relative":
        (hf_name,) = _STACK_MODULES[kind][module]
        return WeightRule(
            plain_name=plain_name, sizes={f"{prefix}{hf_name}.weight": sizes[::-1]}, form=Transposed()
        )
    module, _, leaf = module.rpartition(".")
    names = [f"{prefix}{name.format(last=last)}.{leaf}" for name in _STACK_MODULES[kind][module]]
    rows = (sizes[0] // len(names),) * len(names)
    if module == "attn.qkv":
        rows = (shape.attention_width, shape.kv_width, shape.kv_width)
    hf_sizes = {name: (count, *sizes[1:]) for name, count in zip(names, rows, strict=True)}
    return WeightRule(plain_name=plain_name, sizes=hf_sizes, form=StackedRows(rows))


def _experts_rule(plain_name: str, sizes: Sizes, *, kind: str, present: Collection[str]) -> WeightRule:
    """Return the rule of one linear, or its biases, of all experts of a block:
    blocks.3.mlp.experts.gate_up.
    """
    prefix, module, _ = _parse(plain_name, "model.layers.")
    linear = module.removeprefix("mlp.experts.").removesuffix("_bias")
    full = f"{prefix}mlp.experts.{linear}_proj"
    if kind == "gpt_oss":
        biases = module.endswith("_bias")
        hf_name = f"{full}_bias" if biases else full
        turned = sizes if biases else (sizes[0], sizes[2], sizes[1])
        return WeightRule(
            plain_name=plain_name, sizes={hf_name: turned}, form=GptOssExperts(linear == "gate_up")
        )
    if full in present:
        return WeightRule(plain_name=plain_name, sizes={full: sizes}, form=StackedRows(sizes[:1]))
    name, parts = (_MIXTRAL_EXPERT, _MIXTRAL_PARTS) if kind == "mixtral" else (_EXPERT, _PARTS)
    each = (sizes[1] // len(parts[linear]), sizes[2])
    hf_name = {
        prefix + name.format(expert=expert, part=part): each
        for expert in range(sizes[0])
        for part in parts[linear]
    }
    return WeightRule(
        plain_name=plain_name, sizes=hf_name, form=StackedRows((each[0],) * len(hf_name), sizes[0])
    )


def _parse(plain_name: str, blocks: str) -> tuple[str, str, str]:
    """Split `blocks.3.attn.qkv.weight` into (blocks + "3.", "attn.qkv", "weight").

    The first part is empty for embedding and head, the last for a parameter that is no module's weight or
    bias.
    """
    module, _, kind = plain_name.rpartition(".")
    if kind not in ("weight", "bias"):
        module, kind = plain_name, ""
    if not module.startswith("blocks."):
        return "", module, kind
    _, block, module = module.split(".", 2)
    return f"{blocks}{block}.", module, kind
