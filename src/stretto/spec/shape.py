"""The shape of a transformer, decoder-only or encoder and decoder: everything that decides what it computes,
as plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar, cast

from stretto.errors import Problem, StrettoError, nearest
from stretto.spec.attention import AttentionShape, LatentShape, RopeScaling
from stretto.spec.experts import ExpertShape
from stretto.spec.families import FAMILIES, USUAL, Family
from stretto.spec.lora import LoraShape

T = TypeVar("T")
Mlp = Literal["gelu", "gelu_exact", "relu", "relu2", "swiglu", "geglu", "swiglu_clamped"]
MLPS: tuple[Mlp, ...] = ("gelu", "gelu_exact", "relu", "relu2", "swiglu", "geglu", "swiglu_clamped")
Norm = Literal["layer", "rms", "rms1p"]
NORMS: tuple[Norm, ...] = ("layer", "rms", "rms1p")
BlockNorms = Literal["pre", "sandwich", "post"]
BLOCK_NORMS: tuple[BlockNorms, ...] = ("pre", "sandwich", "post")
PositionEmbedding = Literal["learned", "rotary", "relative"]
POSITION_EMBEDDINGS: tuple[PositionEmbedding, ...] = ("learned", "rotary", "relative")

# the largest value of each size, far above those of any model: what is counted layer by layer ends soon
LARGEST_SIZES = {
    "layers": 10_000,
    "hidden": 1 << 22,
    "heads": 1 << 14,
    "kv_heads": 1 << 14,
    "head_dim": 1 << 20,
    "ffn": 1 << 24,
    "vocab": 1 << 32,
    "sequence": 1 << 40,
}


@dataclass(frozen=True, init=False, kw_only=True)
class ModelShape:
    """A transformer: a decoder, or an encoder and a decoder that attends to what it made of its tokens.

    `family` is a name for usual values (`spec/families.py`): what is left out or None takes them, so every
    field of a built shape is filled in. Models with something in `unbuilt` can be planned and not yet built.
    `dataclasses.replace` keeps what is already filled in: with a new `hidden`, set `ffn` and `head_dim` too.

    layers: blocks of the decoder.
    encoder_layers: blocks of the encoder, whose sizes are those of the decoder; 0: there is none. None: as
        many as `layers` in families with an encoder.
    kv_heads: heads of keys and values; equal to `heads` unless attention is grouped-query.
    head_dim: features of a head; hidden / heads unless set.
    ffn: inner width of the MLP.
    vocab: entries of the tokeniser, without padding.
    sequence: most positions that the model sees at once.
    tied: head and token embedding share one weight.
    dropout: one probability for embedding, attention and residual dropout; not with rotary positions.
    rope_theta: base of the rotary frequencies.
    rope: how they are scaled; None: not at all.
    bias: biases in linear layers, and in LayerNorm.
    moe: experts in place of the MLP, in every block unless they say else; None: none.
    attention: what attention has beside heads.
    mlp: `gelu` is GELU in its tanh form, `gelu_exact` by the error function, `relu2` the square of relu, all
        without a gate; `swiglu` and `geglu` have a gate, of silu and of GELU in its tanh form;
        `swiglu_clamped` is gpt-oss's, with bounds (arXiv 2508.10925, section 2).
    norm: `rms1p` multiplies by 1 + weight (Gemma); a layer norm beside rotary positions has a bias.
    block_norms: `pre`: attention and MLP have a norm before them; `sandwich`: one after them too (Gemma 2);
        `post`: the sum with the residual stream is normalised, and there is no last norm (BART).
    position_embedding: `relative`: a bias of the scores by head and distance, one table for all blocks of a
        stack (T5).
    embedding_scale: by which the token embedding is multiplied; 1.0: nothing.
    embedding_norm: embeddings are normalised (BART).
    logit_scale: by which the input of the output projection is multiplied; 1.0: nothing.
    logit_softcap: logits are cap * tanh(logit / cap); 0.0: as they are.
    lora: low-rank adapters beside linears; None: none.
    beyond: what else the model does, in words; it changes no size and hardly a cost.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    sequence: int
    tied: bool
    dropout: float
    norm_eps: float
    position_embedding: PositionEmbedding
    rope_theta: float
    rope: RopeScaling | None
    bias: bool
    moe: ExpertShape | None
    attention: AttentionShape
    mlp: Mlp
    norm: Norm
    block_norms: BlockNorms
    embedding_scale: float
    logit_softcap: float
    lora: LoraShape | None
    beyond: tuple[str, ...]
    encoder_layers: int
    embedding_norm: bool
    logit_scale: float

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
        position_embedding: PositionEmbedding | None = None,
        rope_theta: float = 10000.0,
        rope: RopeScaling | None = None,
        bias: bool | None = None,
        moe: ExpertShape | None = None,
        attention: AttentionShape | None = None,
        mlp: Mlp | None = None,
        norm: Norm | None = None,
        block_norms: BlockNorms | None = None,
        embedding_scale: float | None = None,
        logit_softcap: float | None = None,
        lora: LoraShape | None = None,
        beyond: tuple[str, ...] = (),
        encoder_layers: int | None = None,
        embedding_norm: bool | None = None,
        logit_scale: float | None = None,
    ) -> None:
        """Fill in what was left out, and check.

        Raises:
            StrettoError: a size is no positive whole number, sizes do not divide, or do not fit each other.
        """
        _check_choice("family", family, FAMILIES)
        _check_size("hidden", hidden)
        _check_size("heads", heads)
        usual = USUAL[family].values(hidden)
        if head_dim is None:
            head_dim = usual.get("head_dim") or _default_head_dim(hidden, heads)
        chosen = {
            "ffn": ffn,
            "tied": tied,
            "position_embedding": position_embedding,
            "bias": bias,
            "attention": attention,
            "mlp": mlp,
            "norm": norm,
            "block_norms": block_norms,
            "embedding_scale": embedding_scale,
            "logit_softcap": logit_softcap,
            "embedding_norm": embedding_norm,
            "logit_scale": logit_scale,
        }
        filled = {
            "family": family,
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "kv_heads": heads if kv_heads is None else kv_heads,
            "head_dim": head_dim,
            "vocab": vocab,
            "sequence": sequence,
            "dropout": dropout,
            "norm_eps": norm_eps,
            "rope_theta": rope_theta,
            "rope": rope,
            "moe": moe,
            "lora": lora,
            "beyond": beyond,
            "encoder_layers": encoder_layers,
            **{name: usual[name] if value is None else value for name, value in chosen.items()},
        }
        if logit_scale is None and not filled["tied"]:
            filled["logit_scale"] = 1.0
        if encoder_layers is None:
            filled["encoder_layers"] = layers if USUAL[family].encoder else 0
        for name, value in filled.items():
            object.__setattr__(self, name, value)
        for name in LARGEST_SIZES:
            _check_size(name, filled[name])
        _check(self)

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection."""
        return self.mlp in ("swiglu", "geglu", "swiglu_clamped")

    @property
    def drops(self) -> bool:
        """Whether training drops anything at random."""
        return self.dropout > 0.0 or (self.lora is not None and self.lora.dropout > 0.0)

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        special = self.attention.qkv_bias
        return self.bias if special is None else special

    @property
    def proj_bias(self) -> bool:
        """Whether the projection of attention into the residual stream has a bias."""
        special = self.attention.proj_bias
        return self.bias if special is None else special

    @property
    def norm_bias(self) -> bool:
        """Whether the norms of the residual stream have biases."""
        return self.norm == "layer" and (self.bias or self.rotary)

    @property
    def rotary(self) -> bool:
        """Whether attention turns queries and keys by their positions."""
        return self.position_embedding == "rotary"

    @property
    def learned(self) -> bool:
        """Whether positions have embeddings, which are added to those of tokens."""
        return self.position_embedding == "learned"

    @property
    def relative(self) -> bool:
        """Whether attention adds a bias to its scores by distance."""
        return self.position_embedding == "relative"

    @property
    def last_norm(self) -> bool:
        """Whether a stack of blocks ends with a norm."""
        return self.block_norms != "post"

    @property
    def chain(self) -> int:
        """Layers that are cut into stages: embedding, blocks and head, and with an encoder its blocks and the
        decoder's embedding.
        """
        return self.layers + 2 + (self.encoder_layers + 1 if self.encoder_layers else 0)

    @property
    def encoder_stack(self) -> ModelShape:
        """A model with nothing but the encoder's blocks; only of a model that has any."""
        return _encoder_stack(self)

    @property
    def pretraining_sequence(self) -> int:
        """Tokens of a sample in the first training: `sequence`, unless positions were stretched later."""
        if self.rope is None:
            return self.sequence
        return min(self.sequence, self.rope.original_positions or round(self.sequence / self.rope.factor))

    @property
    def rope_dim(self) -> int:
        """Features of a head that are turned by position."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def attention_scale(self) -> float:
        """By which attention multiplies its scores before the softmax."""
        scale = (self.attention.query_scale or self.head_dim) ** -0.5
        return scale if self.latent is None or self.rope is None else scale * self.rope.score_factor

    @property
    def latent(self) -> LatentShape | None:
        """The narrow vectors of latent attention."""
        return self.attention.latent

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
            hint="`stretto catalogue NAME` says whether a model trains here",
        )


@lru_cache(maxsize=4096)
def _block(shape: ModelShape, index: int) -> ModelShape:
    attention, moe = shape.attention, shape.moe
    theta, rope = shape.rope_theta, shape.rope
    if attention.window is not None and attention.full_every:
        whole = (index + 1) % attention.full_every == 0
        attention = replace(attention, window=None if whole else attention.window, full_every=0)
    if attention.local_theta is not None:
        if attention.window is not None:
            theta, rope = attention.local_theta, None
        attention = replace(attention, local_theta=None)
    if moe is not None and (moe.dense_layers or moe.every > 1):
        experts = index >= moe.dense_layers and (index + 1) % moe.every == 0
        moe = replace(moe, dense_layers=0, every=1) if experts else None
    if attention == shape.attention and moe == shape.moe:
        return shape
    return replace(shape, attention=attention, moe=moe, rope_theta=theta, rope=rope)


@lru_cache(maxsize=256)
def _encoder_stack(shape: ModelShape) -> ModelShape:
    assert shape.encoder_layers, "the model has no encoder"
    attention = replace(shape.attention, causal=False)
    return replace(shape, layers=shape.encoder_layers, encoder_layers=0, attention=attention)


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
    attention, stacks = shape.attention, shape.encoder_layers > 0
    said = [
        ("one norm of queries and keys over all heads", attention.norm == "all"),
        ("an MLP of kind relu2", shape.mlp == "relu2"),
        ("layer norms beside rotary positions", shape.norm == "layer" and shape.rotary),
        ("sinks beside latent attention", shape.latent is not None and attention.sinks),
        ("norms of heads beside latent attention", shape.latent is not None and attention.norm),
        ("relative positions without an encoder", shape.relative and not stacks),
        ("bidirectional attention without an encoder", not attention.causal),
        ("rotary positions in an encoder", stacks and shape.rotary),
        ("latent attention beside an encoder", stacks and shape.latent is not None),
        ("experts beside an encoder", stacks and shape.moe is not None),
        ("adapters beside an encoder", stacks and shape.lora is not None),
        ("attention windows beside an encoder", stacks and attention.window is not None),
        ("soft-capped scores beside an encoder", stacks and attention.softcap is not None),
        ("attention sinks beside an encoder", stacks and attention.sinks),
        ("norms of heads beside an encoder", stacks and attention.norm is not None),
        ("sandwich norms beside an encoder", stacks and shape.block_norms == "sandwich"),
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
    if value > (most := LARGEST_SIZES[name]):
        raise Problem(name, value, f"it must be at most {most}", "is it a typing error?")


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
    _check_choice("block_norms", shape.block_norms, BLOCK_NORMS)
    _check_choice("position_embedding", shape.position_embedding, POSITION_EMBEDDINGS)
    if not 0.0 < shape.embedding_scale < float("inf"):
        raise Problem("embedding_scale", shape.embedding_scale, "it must be above 0", "1.0 changes nothing")
    if not 0.0 < shape.logit_scale < float("inf"):
        raise Problem("logit_scale", shape.logit_scale, "it must be above 0", "1.0 changes nothing")
    if not 0 <= shape.encoder_layers <= (most := LARGEST_SIZES["layers"]):
        rule = f"it must be a whole number from 0 to {most}"
        raise Problem("encoder_layers", shape.encoder_layers, rule, "0: a decoder alone")
    if not 0.0 <= shape.logit_softcap < float("inf"):
        raise Problem("logit_softcap", shape.logit_softcap, "it must be 0 or more", "0.0: none")
    latent = shape.latent
    if latent is not None and latent.rope_dim >= shape.head_dim:
        rule = f"it must be below head_dim, which is {shape.head_dim} and holds it"
        raise Problem("rope_dim", latent.rope_dim, rule, f"head_dim: {latent.rope_dim + 128}")
    if latent is not None and shape.kv_heads != shape.heads:
        rule = "latent attention makes keys and values of every head"
        raise Problem("kv_heads", shape.kv_heads, rule, f"kv_heads: {shape.heads}")
    if shape.rotary:
        _check_rotary(shape)


def _check_rotary(shape: ModelShape) -> None:
    if shape.rope_dim % 2:
        name = "head_dim" if shape.latent is None else "rope_dim"
        rule = "it must be even: rotary positions turn pairs of features"
        raise Problem(name, shape.rope_dim, rule, f"nearest: {name}: {shape.rope_dim + 1}")
    if shape.dropout:
        raise Problem(
            "dropout", shape.dropout, "models with rotary positions have none", "dropout: 0, or family: gpt"
        )
    if shape.rope_theta <= 0.0:
        raise Problem("rope_theta", shape.rope_theta, "it must be above 0", "10000 is usual")


# written only where they are not the family's usual
_LATER = (
    "position_embedding",
    "rope",
    "attention",
    "mlp",
    "norm",
    "block_norms",
    "embedding_scale",
    "logit_softcap",
    "lora",
    "beyond",
    "embedding_norm",
    "logit_scale",
)


def shape_to_record(shape: ModelShape) -> dict[str, Any]:
    """The fields of the shape, in values that JSON has."""
    usual = ModelShape(
        family=shape.family, layers=1, hidden=shape.hidden, heads=1, head_dim=256, vocab=1, sequence=1
    )
    same = {name for name in _LATER if getattr(shape, name) == getattr(usual, name)}
    if not shape.encoder_layers and not USUAL[shape.family].encoder:
        same.add("encoder_layers")
    return {name: value for name, value in asdict(shape).items() if name not in same}


def shape_from_record(sizes: Mapping[str, Any]) -> ModelShape:
    """The shape of such fields; a field that was not there yet when they were written takes its usual value.

    Raises:
        TypeError: they are not a shape's fields.
        StrettoError: the sizes do not fit each other.
    """
    experts, attention = sizes.get("moe"), sizes.get("attention")
    moe = ExpertShape(**experts) if isinstance(experts, Mapping) else None
    rope = sizes.get("rope")
    fields: dict[str, Any] = {
        **sizes,
        "moe": moe,
        "rope": RopeScaling(**rope) if isinstance(rope, Mapping) else None,
        "beyond": tuple(sizes.get("beyond", ())),
    }
    if isinstance(lora := sizes.get("lora"), Mapping):
        adapters = dict(cast(Mapping[str, Any], lora))
        fields["lora"] = LoraShape(targets=tuple(adapters.pop("targets")), **adapters)
    if isinstance(attention, Mapping):
        special = dict(cast(Mapping[str, Any], attention))
        latent = special.pop("latent", None)
        fields["attention"] = AttentionShape(**special, latent=latent and LatentShape(**latent))
    return ModelShape(**fields)


def fields_of(shape: ModelShape) -> dict[str, Any]:
    """The fields as they are, what is a shape of its own among them whole."""
    return {name: getattr(shape, name) for name in shape.__dataclass_fields__}
