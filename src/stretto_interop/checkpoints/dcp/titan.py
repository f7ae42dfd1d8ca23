"""torchtitan's names of a model's tensors, and where their values lie in ours.

Its models keep queries, keys and values apart, gate and up too, and number the layers under `layers`. Names
are those of torchtitan's state_dict_adapter.py of each model: in 0.3 (main of August 2026) first, in 0.2 and
before it second. Two things differ beyond names:

- Its Llama turns neighbouring features, (0, 1), (2, 3), ..., where ours turns a feature of the first half
  of a head with one of the second, as transformers does: the rows of queries and keys are in another order.
- 0.3 trains queries, keys and values as one tensor, group by group of heads that share keys: the model's
  state has them apart, but the optimiser's states are of that one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from stretto.errors import StrettoError
from stretto.job.parameters import Sizes, parameter_shapes
from stretto.job.shape import ModelShape

View = Callable[[Tensor], Tensor]
VERSIONS = ("0.3", "0.2")
MOMENTS = ("exp_avg", "exp_avg_sq")  # the states of AdamW
HEADS = ("lm_head.weight", "output.weight")

_EXPERTS = ("moe.routed_experts.inner_experts", "moe.experts")
_CORRECTION = ("moe.expert_bias_E", "moe.expert_bias")
# names in ours of one tensor: of those it is made of there, each in every version
_NAMES: dict[str, tuple[tuple[str, ...], ...]] = {
    "embed.tok.weight": (("tok_embeddings.weight",),),
    "head.norm.weight": (("norm.weight",),),
    "head.out.weight": (HEADS,),
    "norm1.weight": (("attention_norm.weight",),),
    "norm2.weight": (("ffn_norm.weight",),),
    "attn.q_norm.weight": (("attention.q_norm.weight",),),
    "attn.k_norm.weight": (("attention.k_norm.weight",),),
    "attn.proj.weight": (("attention.wo.weight",),),
    "attn.q.weight": (("attention.wq.weight",),),
    "attn.q_down.weight": (("attention.wq_a.weight",),),
    "attn.q_down_norm.weight": (("attention.q_norm.weight",),),
    "attn.q_up.weight": (("attention.wq_b.weight",),),
    "attn.kv_down.weight": (("attention.wkv_a.weight",),),
    "attn.kv_down_norm.weight": (("attention.kv_norm.weight",),),
    "attn.kv_up.weight": (("attention.wkv_b.weight",),),
    "mlp.gate_up.weight": (("feed_forward.w1.weight",), ("feed_forward.w3.weight",)),
    "mlp.down.weight": (("feed_forward.w2.weight",),),
    "mlp.router.gate.weight": (("moe.router.gate.weight",),),
    "mlp.router.correction": (_CORRECTION,),
    "mlp.experts.gate_up": (
        (f"{_EXPERTS[0]}.w1_EFD", f"{_EXPERTS[1]}.w1"),
        (f"{_EXPERTS[0]}.w3_EFD", f"{_EXPERTS[1]}.w3"),
    ),
    "mlp.experts.down": ((f"{_EXPERTS[0]}.w2_EDF", f"{_EXPERTS[1]}.w2"),),
    "mlp.shared.gate_up.weight": (("moe.shared_experts.w1.weight",), ("moe.shared_experts.w3.weight",)),
    "mlp.shared.down.weight": (("moe.shared_experts.w2.weight",),),
}
_QKV = tuple(
    (f"attention.qkv_linear.{item}.weight", f"attention.{item}.weight") for item in ("wq", "wk", "wv")
)
_FUSED = "attention.qkv_linear.wqkv.weight"


@dataclass(frozen=True)
class TitanTensor:
    """One of their tensors, and which of its values are which of ours.

    names: in every version that differs, the newest first.
    views: pairs of views of equal shape, of our tensor and of theirs; together they cover theirs.
    """

    names: tuple[str, ...]
    shape: Sizes
    views: tuple[tuple[View, View], ...]

    @property
    def in_order(self) -> bool:
        """True if its values lie in ours in the same order."""
        return len(self.views) == 1 and self.views[0][1] is _identical

    def name(self, version: str) -> str:
        """Its name in one of VERSIONS."""
        return self.names[0] if version == VERSIONS[0] else self.names[-1]


@dataclass(frozen=True)
class TitanRule:
    """One of our parameters, and the tensors of theirs that make it up.

    fused: the same for the optimiser's states, where they are kept for several parts together.
    """

    parameter: str
    shape: Sizes
    parts: tuple[TitanTensor, ...]
    fused: TitanTensor | None = None


def rules(shape: ModelShape) -> Iterator[TitanRule]:
    """A rule for every parameter of the model; a tied head is the embedding's.

    Raises:
        StrettoError: torchtitan has no such model.
    """
    _check(shape)
    for parameter, sizes in parameter_shapes(shape).items():
        prefix, module = "", parameter
        if parameter.startswith("blocks."):
            _, block, module = parameter.split(".", 2)
            prefix = f"layers.{block}."
        if module == "attn.qkv.weight":
            yield _qkv(parameter, prefix, shape)
        elif module in _NAMES:
            yield TitanRule(parameter, sizes, tuple(_stacked(_NAMES[module], prefix, sizes)))
        else:
            raise AssertionError(f"{parameter} belongs to a shape that _check refuses")


def is_trained(parameter: str) -> bool:
    """True if the parameter is one in torchtitan too, where the router's correction is a buffer."""
    return not parameter.endswith(".router.correction")


def trained(rule: TitanRule, version: str) -> tuple[TitanTensor, ...]:
    """The parameters of a version that the optimiser there has for one of ours."""
    if not is_trained(rule.parameter):
        return ()
    return rule.parts if rule.fused is None or version != VERSIONS[0] else (rule.fused,)


def correction(layer: int, version: str) -> str:
    """The name of a layer's numbers for each expert, which torchtitan has in every layer with experts."""
    return f"layers.{layer}.{_CORRECTION[VERSIONS.index(version)]}"


def _identical(tensor: Tensor) -> Tensor:
    return tensor


def _narrow(dim: int, start: int, length: int) -> View:
    return lambda tensor: tensor.narrow(dim, start, length)


def _stacked(names: tuple[tuple[str, ...], ...], prefix: str, sizes: Sizes) -> Iterator[TitanTensor]:
    """Tensors of equal sizes that are stacked in ours, before the last dimension."""
    count = len(names)
    if count == 1:
        yield TitanTensor(tuple(prefix + name for name in names[0]), sizes, ((_identical, _identical),))
        return
    dim = len(sizes) - 2  # experts, where there are any, come first
    length = sizes[dim] // count
    part = (*sizes[:dim], length, *sizes[dim + 1 :])
    for i, each in enumerate(names):
        yield TitanTensor(
            tuple(prefix + name for name in each), part, ((_narrow(dim, i * length, length), _identical),)
        )


def _qkv(parameter: str, prefix: str, shape: ModelShape) -> TitanRule:
    """Queries, keys and values, which are stacked by rows in ours."""
    groups, width = shape.kv_heads, shape.head_dim
    members = (shape.heads // groups, 1, 1)  # heads of queries, keys and values in a group
    parts, views = list[TitanTensor](), list[tuple[View, View]]()
    for i, (names, count) in enumerate(zip(_QKV, members, strict=True)):
        # with plain heads, its models without norms of queries and keys turn neighbours
        neighbours = (shape.attention.norm is None) is not shape.attention.interleaved
        paired = neighbours and names is not _QKV[2]
        features = (width // 2, 2) if paired else (width,)
        before, rows = sum(members[:i]), groups * count * width
        view = _our_heads(before * groups * width, rows, (groups, count), features)
        separate = _their_heads((groups, count, *features), 0, count)
        views.append((view, _their_heads((groups, sum(members), *features), before, count)))
        parts.append(
            TitanTensor(tuple(prefix + name for name in names), (rows, shape.hidden), ((view, separate),))
        )
    sizes = (sum(members) * groups * width, shape.hidden)
    return TitanRule(parameter, sizes, tuple(parts), TitanTensor((prefix + _FUSED,), sizes, tuple(views)))


def _our_heads(start: int, rows: int, heads: tuple[int, int], features: tuple[int, ...]) -> View:
    """Heads of ours as (groups, members, *features, hidden), the features in their order."""

    def view(tensor: Tensor) -> Tensor:
        separate = tensor.narrow(0, start, rows).unflatten(0, (*heads, *reversed(features)))
        return separate.transpose(2, 3) if len(features) > 1 else separate

    return view


def _their_heads(sizes: tuple[int, ...], start: int, count: int) -> View:
    """The same of theirs: members `start` and following of each group."""
    return lambda tensor: tensor.unflatten(0, sizes).narrow(1, start, count)


_BLOCKS = {  # what all of its models have
    "encoder_layers": 0,
    "position_embedding": "rotary",
    "mlp": "swiglu",
    "norm": "rms",
    "block_norms": "pre",
    "bias": False,
    "dropout": 0.0,
    "embedding_scale": 1.0,
    "embedding_norm": False,
    "logit_scale": 1.0,
    "logit_softcap": 0.0,
}
_ROUTER = {"router_bias": False, "shared_gate": False, "capacity": None, "every": 1}
_ATTENTION = {
    "qkv_bias": (None, False),
    "proj_bias": (None, False),
    "norm": (None, "head"),
    "sinks": (False,),
    "window": (None,),
    "softcap": (None,),
    "query_scale": (None,),
}


def _check(shape: ModelShape) -> None:
    """Raise StrettoError for what none of torchtitan's converted models computes, names and sizes aside."""
    values: list[tuple[str, object, tuple[object, ...]]] = [
        (name, getattr(shape, name), (default,)) for name, default in _BLOCKS.items()
    ]
    values += [(f"attention.{n}", getattr(shape.attention, n), default) for n, default in _ATTENTION.items()]
    latent = shape.latent is not None
    moe, rope = shape.moe, shape.rope
    scalings = (None, "yarn") if latent else (None,) if shape.attention.norm else (None, "llama3")
    values.append(("rope.type", rope and rope.type, scalings))
    if latent:
        values.append(("attention.interleaved", shape.attention.interleaved, (True,)))
    if latent and rope is not None:
        values.append(("rope.mscale_all_dim", rope.mscale_all_dim, (rope.mscale,)))
    if moe is not None:
        values += [(f"moe.{name}", getattr(moe, name), (default,)) for name, default in _ROUTER.items()]
        values.append(
            ("attention.norm of a model with experts", shape.attention.norm, (None if latent else "head",))
        )
        if moe.groups > 1:
            values.append(("moe.group_score", moe.group_score, ("top2",)))
    for name, value, allowed in values:
        if value not in allowed:
            raise StrettoError(
                f"model.{name} {value!r} has no counterpart in torchtitan's models of llama3, qwen3 and "
                f"deepseek_v3, which have {' or '.join(repr(item) for item in allowed)}",
                hint="export for transformers instead, without --format dcp",
            )
