"""A shape to and from plain values, as checkpoints keep it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar, cast

from stretto.errors import Problem, StrettoError, nearest
from stretto.spec.attention import PLAIN, AttentionShape, LatentShape
from stretto.spec.experts import ExpertShape

T = TypeVar("T")
Family = Literal["gpt", "llama"]
FAMILIES: tuple[Family, ...] = ("gpt", "llama")
Mlp = Literal["gelu", "relu2", "swiglu"]
MLPS: tuple[Mlp, ...] = ("gelu", "relu2", "swiglu")
Norm = Literal["layer", "rms"]
NORMS: tuple[Norm, ...] = ("layer", "rms")

_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "sequence")


@dataclass(frozen=True, init=False, kw_only=True)
class ModelShape:
    """A decoder-only transformer.

    `gpt` is GPT-2: learned positions, LayerNorm before each half of a block, GELU, dropout, tied head.
    `llama` is Llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no dropout.
    Models that differ from both, by the last four fields or by blocks of different kinds, can be planned and
    not yet built: see `unbuilt`.
    What is left out or None takes the family's usual value, so every field of a built shape is filled in.
    `dataclasses.replace` keeps what is already filled in: with a new `hidden`, set `ffn` and `head_dim` too.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int  # heads of keys and values; equal to `heads` unless attention is grouped-query
    head_dim: int  # hidden / heads unless given
    ffn: int  # inner width of the MLP: gpt 4*hidden, llama 8/3*hidden rounded up to a multiple of 256
    vocab: int  # entries of the tokeniser, without padding
    sequence: int  # most positions the model sees at once
    tied: bool  # head and token embedding share one weight: gpt yes, llama no
    dropout: float  # one probability for embedding, attention and residual dropout; gpt only
    norm_eps: float
    rope_theta: float  # base of the rotary frequencies; llama only
    bias: bool  # biases in linear layers, and in LayerNorm: gpt yes, llama no
    moe: ExpertShape | None  # experts in place of the MLP, in every block unless they say else
    attention: AttentionShape | None  # what attention has beside heads
    mlp: Mlp  # gpt gelu, llama swiglu; relu2 is the square of relu, without a gate
    norm: Norm  # gpt layer, llama rms; a layer norm of the llama family has a bias
    beyond: tuple[str, ...]  # what else the model does, in words; it changes no size and hardly a cost

    def __init__(
        self,
        *,
        family: Family,
        layers: int,
        hidden: int,
        heads: int,
        vocab: int,
        sequence: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        ffn: int | None = None,
        tied: bool | None = None,
        dropout: float = 0.0,
        norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
        bias: bool | None = None,
        moe: ExpertShape | None = None,
        attention: AttentionShape | None = None,
        mlp: Mlp | None = None,
        norm: Norm | None = None,
        beyond: tuple[str, ...] = (),
    ) -> None:
        """Fill in what was left out, and check.

        Raises:
            StrettoError: a size is no positive whole number, sizes do not divide, or do not fit the family.
        """
        _check_choice("family", family, FAMILIES)
        _check_size("hidden", hidden)
        _check_size("heads", heads)
        gpt = family == "gpt"
        filled = {
            "family": family,
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "kv_heads": heads if kv_heads is None else kv_heads,
            "head_dim": _default_head_dim(hidden, heads) if head_dim is None else head_dim,
            "ffn": _default_ffn(family, hidden) if ffn is None else ffn,
            "vocab": vocab,
            "sequence": sequence,
            "tied": gpt if tied is None else tied,
            "dropout": dropout,
            "norm_eps": norm_eps,
            "rope_theta": rope_theta,
            "bias": gpt if bias is None else bias,
            "moe": moe,
            "attention": None if attention == PLAIN else attention,
            "mlp": mlp or ("gelu" if gpt else "swiglu"),
            "norm": norm or ("layer" if gpt else "rms"),
            "beyond": beyond,
        }
        for name, value in filled.items():
            object.__setattr__(self, name, value)
        for name in _SIZES:
            _check_size(name, filled[name])
        _check(self)

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection (SwiGLU)."""
        return self.mlp == "swiglu"

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        special = self.special.qkv_bias
        return self.bias if special is None else special

    @property
    def special(self) -> AttentionShape:
        """What attention has beside heads, nothing where nothing was said."""
        return self.attention or PLAIN

    @property
    def latent(self) -> LatentShape | None:
        """The narrow vectors of latent attention."""
        return self.special.latent

    @property
    def value_dim(self) -> int:
        """Features of a head's values."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def unbuilt(self) -> tuple[str, ...]:
        """What the modules here cannot do yet, in words; empty: the model can be built and trained."""
        return (*_unbuilt(self), *self.beyond)

    def block(self, index: int) -> ModelShape:
        """A model with nothing but blocks like the one at `index`: the model itself where all are alike."""
        alike = _block(self, index)  # cached by value: it may come from an equal shape
        return self if alike == self else alike

    def kinds(self) -> tuple[tuple[ModelShape, int], ...]:
        """Its kinds of blocks, in the order of their first, and how many there are of each."""
        return _kinds(self)

    def block_counts(self, layers: range) -> tuple[int, ...]:
        """How many blocks of each of `kinds` are among some layers; 0 is the embedding, 1 the first block."""
        return _block_counts(self, layers)

    def each(self, count: Callable[[ModelShape], T]) -> list[T]:
        """`count` of every block, asked once for each kind."""
        kinds = self.kinds()
        if len(kinds) == 1:
            return [count(kinds[0][0])] * self.layers
        counts = {kind: count(kind) for kind, _ in kinds}
        return [counts[self.block(i)] for i in range(self.layers)]

    @property
    def expert_ffn(self) -> int:
        """Inner width of each routed expert; only of a model that has any."""
        assert self.moe is not None
        return self.ffn if self.moe.ffn is None else self.moe.ffn

    @property
    def attention_width(self) -> int:
        """Features of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of all key heads together; as many again are values."""
        return self.kv_heads * self.head_dim


def check_built(shape: ModelShape) -> None:
    """Raises StrettoError for a model that can be planned and not yet built."""
    if shape.unbuilt:
        raise StrettoError(
            f"this model has {', '.join(shape.unbuilt)}: it can be planned, not yet built",
            hint="train a model of the gpt or the llama family, with or without experts: `stretto catalogue "
            "NAME` says whether a model trains here",
        )


@lru_cache(maxsize=4096)
def _block(shape: ModelShape, index: int) -> ModelShape:
    attention, moe = shape.special, shape.moe
    if attention.window is not None and attention.full_every:
        whole = (index + 1) % attention.full_every == 0
        attention = replace(attention, window=None if whole else attention.window, full_every=0)
    if moe is not None and (moe.dense_layers or moe.every > 1):
        experts = index >= moe.dense_layers and (index + 1) % moe.every == 0
        moe = replace(moe, dense_layers=0, every=1) if experts else None
    if attention == shape.special and moe == shape.moe:
        return shape
    return replace(shape, attention=attention, moe=moe)


@lru_cache(maxsize=256)
def _kinds(shape: ModelShape) -> tuple[tuple[ModelShape, int], ...]:
    counts: dict[ModelShape, int] = {}
    for i in range(shape.layers):
        kind = shape.block(i)
        counts[kind] = counts.get(kind, 0) + 1
    return tuple(counts.items())


@lru_cache(maxsize=16384)
def _block_counts(shape: ModelShape, layers: range) -> tuple[int, ...]:
    kinds = [kind for kind, _ in shape.kinds()]
    blocks = range(max(1, layers.start), min(layers.stop, shape.layers + 1))
    if len(kinds) == 1:
        return (len(blocks),)
    here = [shape.block(layer - 1) for layer in blocks]
    return tuple(here.count(kind) for kind in kinds)


def _unbuilt(shape: ModelShape) -> list[str]:
    attention = shape.special
    moe = shape.moe
    gpt = shape.family == "gpt"
    said = [
        ("latent attention", attention.latent is not None),
        (f"a norm of queries and keys, over {attention.norm}", attention.norm is not None),
        ("biases of queries, keys and values alone", shape.qkv_bias != shape.bias),
        ("attention sinks", attention.sinks),
        (f"a window of {attention.window} positions", attention.window is not None),
        (f"an MLP of kind {shape.mlp}", shape.mlp != ("gelu" if gpt else "swiglu")),
        (f"a norm of kind {shape.norm}", shape.norm != ("layer" if gpt else "rms")),
    ]
    if moe is not None:
        said += [
            ("blocks with and without experts", moe.dense_layers > 0 or moe.every > 1),
            ("biases of the router", moe.router_bias),
            ("a gate of the shared expert", moe.shared_gate),
        ]
    return [words for words, there in said if there]


def _default_head_dim(hidden: int, heads: int) -> int:
    if hidden % heads:
        fits = _nearest_multiple(hidden, heads)
        raise Problem(
            "hidden",
            hidden,
            f"it must be a multiple of heads, which is {heads}",
            f"hidden: {fits}, another number of heads, or head_dim set by hand",
        )
    return hidden // heads


def _default_ffn(family: Family, hidden: int) -> int:
    if family == "gpt":
        return 4 * hidden
    return -(-8 * hidden // (3 * 256)) * 256


def _nearest_multiple(value: int, of: int) -> int:
    return max(of, (value + of // 2) // of * of)


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = nearest(str(value), allowed)
        hint = f"did you mean {near!r}?" if near else None
        raise Problem(name, value, f"it must be one of {', '.join(allowed)}", hint)


def _check_size(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Problem(name, value, "it must be a whole number above 0", f"set {name} to 1 or more")


def _check(shape: ModelShape) -> None:
    if shape.heads % shape.kv_heads:
        divisors = [n for n in range(1, shape.heads + 1) if shape.heads % n == 0]
        fits = min(divisors, key=lambda n: abs(n - shape.kv_heads))
        rule = f"it must divide heads, which is {shape.heads}"
        raise Problem("kv_heads", shape.kv_heads, rule, f"nearest: kv_heads: {fits}")
    if not 0.0 <= shape.dropout < 1.0:
        raise Problem("dropout", shape.dropout, "it must be in [0, 1)", "0.1 is usual, 0 switches it off")
    if shape.norm_eps <= 0.0:
        raise Problem("norm_eps", shape.norm_eps, "it must be above 0", "1e-5 is usual")
    _check_choice("mlp", shape.mlp, MLPS)
    _check_choice("norm", shape.norm, NORMS)
    latent = shape.latent
    if latent is not None and latent.rope_dim >= shape.head_dim:
        rule = f"it must be below head_dim, which is {shape.head_dim} and holds it"
        raise Problem("rope_dim", latent.rope_dim, rule, f"head_dim: {latent.rope_dim + 128}")
    if shape.family == "llama":
        _check_llama(shape)


def _check_llama(shape: ModelShape) -> None:
    if shape.head_dim % 2:
        rule = "it must be even: rotary positions turn pairs of features"
        raise Problem("head_dim", shape.head_dim, rule, f"nearest: head_dim: {shape.head_dim + 1}")
    if shape.dropout:
        raise Problem("dropout", shape.dropout, "the llama family has none", "dropout: 0, or family: gpt")
    if shape.rope_theta <= 0.0:
        raise Problem("rope_theta", shape.rope_theta, "it must be above 0", "10000 is usual")


_LATER = ("attention", "mlp", "norm", "beyond")  # written only where they are not the family's usual


def shape_to_record(shape: ModelShape) -> dict[str, Any]:
    """The fields of the shape, in values that JSON has."""
    usual = ModelShape(family=shape.family, layers=1, hidden=2, heads=1, vocab=1, sequence=1)
    same = {name for name in _LATER if getattr(shape, name) == getattr(usual, name)}
    return {name: value for name, value in asdict(shape).items() if name not in same}


def shape_from_record(sizes: Mapping[str, Any]) -> ModelShape:
    """The shape of such fields; a field that was not there yet when they were written takes its usual value.

    Raises:
        TypeError: they are not a shape's fields.
        StrettoError: the sizes do not fit each other.
    """
    experts, attention = sizes.get("moe"), sizes.get("attention")
    moe = ExpertShape(**experts) if isinstance(experts, Mapping) else None
    fields: dict[str, Any] = {**sizes, "moe": moe, "beyond": tuple(sizes.get("beyond", ()))}
    if isinstance(attention, Mapping):
        special = dict(cast(Mapping[str, Any], attention))
        latent = special.pop("latent", None)
        fields["attention"] = AttentionShape(**special, latent=latent and LatentShape(**latent))
    return ModelShape(**fields)


def fields_of(shape: ModelShape) -> dict[str, Any]:
    """The fields as they are, what is a shape of its own among them whole."""
    return {name: getattr(shape, name) for name in shape.__dataclass_fields__}
