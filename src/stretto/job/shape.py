"""The shape of a transformer, decoder-only or encoder and decoder: everything that decides what it computes,
as plain values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, TypeVar

from stretto.errors import Problem, StrettoError
from stretto.job.attention import AttentionShape, LatentShape, RopeScaling
from stretto.job.experts import ExpertShape
from stretto.job.families import FAMILY_DEFAULTS, Family
from stretto.job.field import Field, check_fields, declared, derived, from_plain
from stretto.job.lora import LoraShape

T = TypeVar("T")
Mlp = Literal["gelu", "gelu_exact", "relu", "relu2", "swiglu", "geglu", "swiglu_clamped"]
Norm = Literal["layer", "rms", "rms1p"]
BlockNorms = Literal["pre", "sandwich", "post"]
PositionEmbedding = Literal["learned", "rotary", "relative"]

LARGEST_LAYERS = 10_000  # far above any model: code that counts layer by layer must end soon


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A transformer: a decoder, or an encoder and a decoder that attends to the encoder's output.

    `family` names a set of default values (`job/families.py`) for fields that are left out or None, so every
    field of a built shape has a value. A model with `unsupported_parts` can be planned, but not built yet.
    `dataclasses.replace` copies values that were filled in: with a new `hidden`, set `ffn` and `head_dim`
    too.

    Raises:
        StrettoError: a value is outside its limits, or sizes do not fit each other.
    """

    family: Annotated[
        Family,
        Field(
            "The defaults of all other fields. `gpt`: GPT-2 (learned positions, LayerNorm, GELU, dropout). "
            "`llama`: Llama (rotary positions, RMSNorm, SwiGLU, grouped-query attention). The others are in "
            "docs/reference/models.md."
        ),
    ]
    layers: Annotated[
        int,
        Field("Transformer blocks; with an encoder, those of the decoder.", gt=0, largest=LARGEST_LAYERS),
    ]
    encoder_layers: Annotated[
        int,
        Field(
            "Blocks of the encoder, with the sizes of the decoder's, 0: no encoder.",
            ge=0,
            largest=LARGEST_LAYERS,
            fix="0: a decoder alone",
            null="the preset's, else as many as `layers` in families with an encoder (`t5`, `bart`)",
        ),
    ] = derived("family")
    hidden: Annotated[int, Field("Features of the residual stream.", gt=0, largest=1 << 22)]
    heads: Annotated[int, Field("Query heads of a block.", gt=0, largest=1 << 14)]
    kv_heads: Annotated[
        int,
        Field(
            "Key and value heads of a block, a divisor of `heads`.",
            gt=0,
            largest=1 << 14,
            null="the preset's, else `heads`",
        ),
    ] = derived("family", "heads")
    head_dim: Annotated[
        int,
        Field(
            "Features of a head.",
            gt=0,
            largest=1 << 20,
            null="the preset's, else the family's, else `hidden / heads`",
        ),
    ] = derived("family", "hidden", "heads")
    ffn: Annotated[
        int,
        Field(
            "Inner width of the MLP.",
            gt=0,
            largest=1 << 24,
            null="the preset's, else the family's ratio to `hidden`, as gpt `4 hidden` and llama "
            "`8/3 hidden` rounded up to a multiple of 256",
        ),
    ] = derived("family", "hidden")
    vocab: Annotated[
        int,
        Field(
            "Entries of the embedding, without padding.",
            gt=0,
            largest=1 << 32,
            null="those of the data's tokenizer",
        ),
    ]
    sequence: Annotated[
        int,
        Field("Context length, in tokens.", gt=0, largest=1 << 40, null="the preset's, else `data.sequence`"),
    ]
    dropout: Annotated[
        float,
        Field(
            "Probability of dropout on embedding, attention and residual; not with rotary positions.",
            ge=0,
            lt=1,
            fix="0.1 is usual, 0 switches it off",
        ),
    ] = 0.0
    tied: Annotated[bool, Field("Head and embedding share one weight.")] = derived("family")
    bias: Annotated[bool, Field("Biases in linear layers and LayerNorm.")] = derived("family")
    norm_eps: Annotated[
        float, Field("Added to the variance in LayerNorm and RMSNorm.", gt=0, fix="1e-5 is usual")
    ] = 1e-5
    rope_theta: Annotated[float, Field("Base of the rotary frequencies.", gt=0, fix="10000 is usual")] = (
        10000.0
    )
    position_embedding: Annotated[
        PositionEmbedding,
        Field(
            "Positions are `learned` and added to the embedding, or `rotary` or `relative`, within attention "
            "(`relative`: a bias of the scores by head and distance, one table for all blocks of a stack "
            "(T5); only with an encoder)."
        ),
    ] = derived("family")
    mlp: Annotated[
        Mlp,
        Field(
            "Activation of the MLP: `gelu` (tanh form), `gelu_exact`, `relu`, `relu2` (its square, planned "
            "only), or with a gate `swiglu`, `geglu` (Gemma) or `swiglu_clamped` (gpt-oss, arXiv 2508.10925, "
            "section 2)."
        ),
    ] = derived("family")
    norm: Annotated[
        Norm, Field("`layer`: LayerNorm; `rms`: RMSNorm; `rms1p`: RMSNorm times 1 + weight (Gemma).")
    ] = derived("family")
    block_norms: Annotated[
        BlockNorms,
        Field(
            "Norms before attention and MLP (`pre`), before and after them (`sandwich`, Gemma), or after "
            "their sum with the residual stream, without a last norm (`post`, BART)."
        ),
    ] = derived("family")
    embedding_scale: Annotated[
        float,
        Field(
            "Factor of the token embedding.",
            gt=0,
            fix="1.0 changes nothing",
            null="the preset's, else the family's, as gemma2 `sqrt(hidden)`",
        ),
    ] = derived("family", "hidden")
    logit_softcap: Annotated[
        float, Field("Logits are `cap tanh(logit / cap)`, 0: unchanged.", ge=0, fix="0.0: none")
    ] = derived("family")
    embedding_norm: Annotated[bool, Field("Embeddings are normalised (BART).")] = derived("family")
    logit_scale: Annotated[
        float,
        Field(
            "Factor of the input of the output projection.",
            gt=0,
            fix="1.0 changes nothing",
            null="the preset's, else the family's, as t5 `1 / sqrt(hidden)` if `tied`",
        ),
    ] = derived("family", "hidden")
    attention: Annotated[AttentionShape, Field("Attention options other than head counts.")] = derived()
    rope: Annotated[
        RopeScaling | None, Field("Scaling of rotary positions for contexts longer than that of pretraining.")
    ] = None
    moe: Annotated[
        ExpertShape | None, Field("A mixture of experts in place of the MLP of all or some blocks.")
    ] = None
    lora: LoraShape | None = None
    unmodelled_features: tuple[str, ...] = ()
    """Features that Stretto has no module for, for display; they affect no size, and costs hardly."""

    def __post_init__(self) -> None:
        check_fields(self, "family", "layers", "hidden", "heads")
        defaults = FAMILY_DEFAULTS[self.family].values(self.layers, self.hidden, self.heads, self.tied)
        defaults = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        if defaults.get("head_dim", 1) is None:
            raise Problem(
                "hidden",
                self.hidden,
                f"it must be a multiple of heads, which is {self.heads}",
                f"hidden: {max(self.heads, (self.hidden + self.heads // 2) // self.heads * self.heads)}, "
                "another number of heads, or head_dim set by hand",
            )
        for name, value in defaults.items():
            object.__setattr__(self, name, value)
        check_fields(self)
        if self.heads % self.kv_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            fits = min(divisors, key=lambda n: abs(n - self.kv_heads))
            rule = f"it must divide heads, which is {self.heads}"
            raise Problem("kv_heads", self.kv_heads, rule, f"nearest: kv_heads: {fits}")
        latent = self.latent
        if latent is not None and latent.rope_dim >= self.head_dim:
            rule = f"it must be below head_dim, which is {self.head_dim} and includes it"
            raise Problem("rope_dim", latent.rope_dim, rule, f"head_dim: {latent.rope_dim + 128}")
        if latent is not None and self.kv_heads != self.heads:
            rule = "latent attention has keys and values for every head"
            raise Problem("kv_heads", self.kv_heads, rule, f"kv_heads: {self.heads}")
        if self.rotary and self.rope_dim % 2:
            name = "head_dim" if latent is None else "rope_dim"
            rule = "it must be even: rotary positions rotate pairs of features"
            raise Problem(name, self.rope_dim, rule, f"nearest: {name}: {self.rope_dim + 1}")
        if self.rotary and self.dropout:
            rule = "models with rotary positions have no dropout"
            raise Problem("dropout", self.dropout, rule, "dropout: 0, or family: gpt")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash of all fields, which takes long, and almost every cache is looked up by it."""
        return hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))

    def __getstate__(self) -> dict[str, Any]:
        """Hashes of texts are others in another process."""
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @property
    def title(self) -> str:
        """The family, or the function that builds a model from a file."""
        return self.family

    @property
    def gated(self) -> bool:
        """True if the MLP has a gate projection."""
        return self.mlp in ("swiglu", "geglu", "swiglu_clamped")

    @property
    def drops(self) -> bool:
        """True if training uses dropout, of the model or of adapters."""
        return self.dropout > 0.0 or (self.lora is not None and self.lora.dropout > 0.0)

    @property
    def qkv_bias(self) -> bool:
        """True if queries, keys and values have biases."""
        special = self.attention.qkv_bias
        return self.bias if special is None else special

    @property
    def proj_bias(self) -> bool:
        """True if the projection of attention into the residual stream has a bias."""
        special = self.attention.proj_bias
        return self.bias if special is None else special

    @property
    def norm_bias(self) -> bool:
        """True if the norms of the residual stream have biases."""
        return self.norm == "layer" and (self.bias or self.rotary)

    @property
    def rotary(self) -> bool:
        """True if attention rotates queries and keys by their positions."""
        return self.position_embedding == "rotary"

    @property
    def learned(self) -> bool:
        """True if position embeddings are added to those of tokens."""
        return self.position_embedding == "learned"

    @property
    def relative(self) -> bool:
        """True if attention adds a bias by distance to its scores."""
        return self.position_embedding == "relative"

    @property
    def last_norm(self) -> bool:
        """True if a stack of blocks ends with a norm."""
        return self.block_norms != "post"

    @property
    def chain(self) -> int:
        """Number of layers that are cut into stages: embedding, blocks and head, and with an encoder also its
        blocks and the decoder's embedding.
        """
        return self.layers + 2 + (self.encoder_layers + 1 if self.encoder_layers else 0)

    @property
    def encoder_stack(self) -> ModelShape:
        """A model that consists of the encoder's blocks alone; the model must have an encoder."""
        return _encoder_stack(self)

    @property
    def pretraining_sequence(self) -> int:
        """Tokens of a sample in pretraining: `sequence`, unless positions were scaled afterwards."""
        if self.rope is None:
            return self.sequence
        return min(self.sequence, self.rope.original_positions or round(self.sequence / self.rope.factor))

    @property
    def rope_dim(self) -> int:
        """Features of a head that rotary positions rotate."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def attention_scale(self) -> float:
        """Factor that multiplies the scores before the softmax."""
        scale = (self.attention.query_scale or self.head_dim) ** -0.5
        return scale if self.latent is None or self.rope is None else scale * self.rope.score_factor

    @property
    def latent(self) -> LatentShape | None:
        """Latent attention, if the model has it."""
        return self.attention.latent

    @property
    def value_dim(self) -> int:
        """Features of a head's values."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def unsupported_parts(self) -> tuple[str, ...]:
        """Features that Stretto's modules lack, for messages; if empty, the model can be built and
        trained.
        """
        attention, stacks = self.attention, self.encoder_layers > 0
        parts = [
            ("one norm of queries and keys over all heads", attention.norm == "all"),
            ("an MLP of kind relu2", self.mlp == "relu2"),
            ("layer norms with rotary positions", self.norm == "layer" and self.rotary),
            ("sinks with latent attention", self.latent is not None and attention.sinks),
            ("norms of heads with latent attention", self.latent is not None and attention.norm),
            ("relative positions without an encoder", self.relative and not stacks),
            ("bidirectional attention without an encoder", not attention.causal),
            ("rotary positions in an encoder", stacks and self.rotary),
            ("latent attention with an encoder", stacks and self.latent is not None),
            ("experts with an encoder", stacks and self.moe is not None),
            ("adapters with an encoder", stacks and self.lora is not None),
            ("attention windows with an encoder", stacks and attention.window is not None),
            ("soft-capped scores with an encoder", stacks and attention.softcap is not None),
            ("attention sinks with an encoder", stacks and attention.sinks),
            ("norms of heads with an encoder", stacks and attention.norm is not None),
            ("sandwich norms with an encoder", stacks and self.block_norms == "sandwich"),
        ]
        return (*[part for part, present in parts if present], *self.unmodelled_features)

    def block(self, index: int) -> ModelShape:
        """Return a model that consists of blocks like the one at `index`: the model itself if all are
        alike.
        """
        alike = _block(self, index)  # cached by value: it may come from an equal shape
        return self if alike == self else alike

    def kinds(self) -> tuple[tuple[ModelShape, int], ...]:
        """Return the kinds of blocks, in the order of their first blocks, each with its count."""
        return _kinds(self)

    def each(self, count: Callable[[ModelShape], T]) -> list[T]:
        """Return `count` of every block, called once for each kind."""
        kinds = self.kinds()
        if len(kinds) == 1:
            return [count(kinds[0][0])] * self.layers
        counts = {kind: count(kind) for kind, _ in kinds}
        return [counts[self.block(i)] for i in range(self.layers)]

    @property
    def expert_ffn(self) -> int:
        """Inner width of each routed expert; the model must have experts."""
        assert self.moe is not None
        return self.ffn if self.moe.ffn is None else self.moe.ffn

    @property
    def attention_width(self) -> int:
        """Features of all query heads, summed."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of all key heads, summed, which equal those of all value heads."""
        return self.kv_heads * self.head_dim


def check_built(shape: ModelShape) -> None:
    """Raise StrettoError if a model can be planned but not built."""
    if shape.unsupported_parts:
        raise StrettoError(
            f"this model has {', '.join(shape.unsupported_parts)}: it can be planned, not yet built",
            hint="`stretto plan` and `stretto predict` take it; train a model without them",
        )


@lru_cache(maxsize=4096)
def _block(shape: ModelShape, index: int) -> ModelShape:
    attention, moe = shape.attention, shape.moe
    theta, rope = shape.rope_theta, shape.rope
    if attention.window is not None and attention.full_every:
        full = (index + 1) % attention.full_every == 0
        attention = replace(attention, window=None if full else attention.window, full_every=0)
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


# fields that every record has; all others are left out if they have the family's default
_FIRST_RECORDS = frozenset(
    re.findall(
        r"\w+",
        "family layers hidden heads kv_heads head_dim ffn vocab sequence tied dropout norm_eps rope_theta "
        "bias moe",
    )
)


def shape_to_record(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of a shape as a JSON record."""
    defaults = FAMILY_DEFAULTS[shape.family]
    default = ModelShape(
        family=shape.family, layers=1, hidden=shape.hidden, heads=1, head_dim=256, vocab=1, sequence=1
    )
    left_out = {
        name
        for name, value in fields_of(default).items()
        if name not in _FIRST_RECORDS and getattr(shape, name) == value
    }
    if defaults.encoder or shape.encoder_layers:
        left_out.discard("encoder_layers")
    return {name: value for name, value in asdict(shape).items() if name not in left_out}


def shape_from_record(record: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a JSON record; fields that older records lack have their defaults.

    Raises:
        TypeError: the record has a name that is not a field of a shape.
        StrettoError: the sizes do not fit each other.
    """
    return from_plain(ModelShape, record)


def fields_of(shape: ModelShape) -> dict[str, Any]:
    """Return the fields by name; parts such as `attention` remain objects."""
    return {name: getattr(shape, name) for name in declared(ModelShape)}
