"""The `model` section: a preset, a family with sizes, or a preset with some of its sizes changed."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from stretto.errors import Problem, StrettoError, UnknownName
from stretto.run.config.section import Section
from stretto.spec.attention import AttentionShape, HeadNorm, LatentShape, RopeScaling, RopeType
from stretto.spec.experts import Drop, ExpertShape, GroupScore, Score
from stretto.spec.families import FAMILY_DEFAULTS, Family
from stretto.spec.initial import Initial
from stretto.spec.presets import find_shape
from stretto.spec.shape import BlockNorms, Mlp, ModelShape, Norm, PositionEmbedding, fields_of


class LatentConfig(Section):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); by default that of the preset, else of the
    family, if any.
    """

    kv_rank: int | None = Field(
        default=None,
        ge=0,
        description="Width of the vector that keys and values come from, 0: no latent attention; null: the "
        "preset's, else the family's.",
    )
    rope_dim: int | None = Field(
        default=None,
        gt=0,
        description="Features of a head that are turned by position, part of `model.head_dim`; null: the "
        "preset's, else the family's.",
    )
    value_dim: int | None = Field(
        default=None,
        gt=0,
        description="Features of a head's values; null: the preset's, else the family's.",
    )
    q_rank: int | None = Field(
        default=None,
        ge=0,
        description="Width of the vector that queries come from, 0: none, they come from the residual "
        "stream; null: the preset's, else the family's.",
    )

    def shape(self, known: LatentShape | None) -> LatentShape | None:
        """The sizes, laid over known ones; None: no latent attention."""
        sizes: dict[str, Any] = self.model_dump(exclude_none=True)
        if not sizes or self.kv_rank == 0:
            return None if sizes else known
        if sizes.get("q_rank") == 0:
            sizes["q_rank"] = None
        base: dict[str, Any] = {} if known is None else asdict(known)
        missing = [name for name in ("kv_rank", "rope_dim", "value_dim") if name not in {**base, **sizes}]
        if missing:
            raise Problem(missing[0], None, "latent attention needs it", "512, 64 and 128 are DeepSeek's")
        return LatentShape(**{**base, **sizes})


class AttentionConfig(Section):
    """What attention has beside heads; by default what the preset has, else the family."""

    norm: Literal["none"] | HeadNorm | None = Field(
        default=None,
        description="A norm of queries and of keys, over each `head`'s features or over `all` heads'; null: "
        "the preset's, else the family's.",
    )
    qkv_bias: bool | None = Field(
        default=None,
        description="Biases of queries, keys and values; null: the preset's, else the family's, else "
        "`model.bias`.",
    )
    proj_bias: bool | None = Field(
        default=None,
        description="Bias of the projection into the residual stream; null: the preset's, else `model.bias`.",
    )
    sinks: bool | None = Field(
        default=None,
        description="A number for each head that takes part in the softmax (gpt-oss); null: the preset's, "
        "else the family's.",
    )
    window: int | None = Field(
        default=None,
        ge=0,
        description="Positions that a token sees, itself among them, 0: all before it; null: the preset's, "
        "else the family's.",
    )
    full_every: int | None = Field(
        default=None,
        ge=0,
        description="Every n-th block has no window, 0: all have it; null: the preset's, else the family's.",
    )
    softcap: float | None = Field(
        default=None,
        ge=0,
        description="Scores are `softcap tanh(score / softcap)`, 0: as they are; null: the preset's, else "
        "the family's.",
    )
    query_scale: float | None = Field(
        default=None,
        ge=0,
        description="Scores are divided by its root, 0: by that of `head_dim`; null: the preset's, else "
        "`head_dim`.",
    )
    local_theta: float | None = Field(
        default=None,
        ge=0,
        description="Base of the rotary frequencies, unscaled, in blocks with a window (Gemma 3), 0: that of "
        "the others; null: the preset's, else the family's.",
    )
    interleaved: bool | None = Field(
        default=None,
        description="Rotary positions turn pairs of neighbouring features, otherwise of the halves of a "
        "head; null: the preset's, else the family's.",
    )
    buckets: int | None = Field(
        default=None,
        gt=0,
        description="Of relative positions, distances that have a bias of their own; null: the preset's, "
        "else 32.",
    )
    max_distance: int | None = Field(
        default=None,
        gt=0,
        description="Of relative positions, from which distance on all have one bias; null: the preset's, "
        "else 128.",
    )
    latent: LatentConfig = Field(default_factory=LatentConfig)

    def shape(self, known: AttentionShape) -> AttentionShape:
        """The fields laid over known ones.

        Raises:
            StrettoError: sizes that do not fit each other.
        """
        fields: dict[str, Any] = self.model_dump(exclude_none=True, exclude={"latent"})
        for name in ("window", "softcap", "query_scale", "local_theta"):
            if fields.get(name) == 0:
                fields[name] = None
        if fields.get("norm") == "none":
            fields["norm"] = None
        try:
            latent = self.latent.shape(known.latent)
        except StrettoError as error:
            raise error.within("attention.latent") from None
        try:
            return replace(known, **fields, latent=latent)
        except StrettoError as error:
            raise error.within("attention") from None


class RopeConfig(Section):
    """How rotary positions reach beyond those of the first training; by default as in the preset."""

    type: Literal["none"] | RopeType | None = Field(
        default=None,
        description="`linear`, `dynamic` (NTK), `yarn`, `llama3` (Llama 3.1), or `none`; null: the preset's, "
        "else none.",
    )
    factor: float | None = Field(
        default=None, ge=1, description="Of the longer context; null: the preset's, else 1."
    )
    original_positions: int | None = Field(
        default=None, gt=0, description="Positions of the first training; null: the preset's."
    )
    low_freq_factor: float | None = Field(
        default=None,
        gt=0,
        description="`llama3`: frequencies of fewer turns within the original positions are divided by "
        "`factor`; null: the preset's, else 1.",
    )
    high_freq_factor: float | None = Field(
        default=None, gt=0, description="`llama3`: those of more turns are kept; null: the preset's, else 4."
    )
    beta_fast: float | None = Field(
        default=None,
        gt=0,
        description="`yarn`: frequencies of more turns are kept; null: the preset's, else 32.",
    )
    beta_slow: float | None = Field(
        default=None,
        gt=0,
        description="`yarn`: those of fewer turns are divided by `factor`; null: the preset's, else 1.",
    )
    truncate: bool | None = Field(
        default=None,
        description="`yarn`: both bounds are rounded to whole features; null: the preset's, else true.",
    )
    attention_factor: float | None = Field(
        default=None,
        gt=0,
        description="`yarn`: by which queries and keys are multiplied; null: the preset's, else "
        "`0.1 ln(factor) + 1`, or by the next two.",
    )
    mscale: float | None = Field(
        default=None,
        ge=0,
        description="`yarn`: DeepSeek's weight of that logarithm for queries and keys; null: the preset's.",
    )
    mscale_all_dim: float | None = Field(
        default=None, ge=0, description="`yarn`: the same for all scores; null: the preset's."
    )

    def shape(self, known: RopeScaling | None) -> RopeScaling | None:
        """The fields laid over known ones; None: positions as in the first training.

        Raises:
            StrettoError: fields that do not fit each other.
        """
        fields: dict[str, Any] = self.model_dump(exclude_none=True)
        if not fields or self.type == "none":
            return None if fields else known
        base: dict[str, Any] = {"factor": 1.0} if known is None else asdict(known)
        if "type" not in {**base, **fields}:
            name, value = next(iter(fields.items()))
            raise Problem(f"rope.{name}", value, "nothing is scaled without a type", "model.rope.type=llama3")
        try:
            return RopeScaling(**{**base, **fields})
        except StrettoError as error:
            raise error.within("rope") from None


class ExpertConfig(Section):
    """A mixture of experts in place of every block's MLP; by default that of the preset, if any."""

    experts: int | None = Field(
        default=None, gt=0, description="Routed experts of a block; null: the preset's, else a plain MLP."
    )
    top_k: int | None = Field(
        default=None, gt=0, description="Routed experts that a token goes to; null: the preset's, else 2."
    )
    ffn: int | None = Field(
        default=None, gt=0, description="Inner width of an expert; null: the preset's, else `model.ffn`."
    )
    shared_ffn: int | None = Field(
        default=None,
        ge=0,
        description="Inner width of a shared expert that every token goes to, 0: none; null: the preset's, "
        "else 0.",
    )
    score: Score | None = Field(
        default=None,
        description="How the router's logits become scores; null: the preset's, else `softmax`.",
    )
    normalise: bool | None = Field(
        default=None,
        description="A token's weights of its experts sum to one; null: the preset's, else true.",
    )
    balance: float | None = Field(
        default=None,
        ge=0,
        description="Coefficient of the loss that keeps experts equally busy, 0: none; null: the preset's, "
        "else 0.01.",
    )
    z: float | None = Field(
        default=None,
        ge=0,
        description="Coefficient of the squared log-sum-exp of the router's logits, 0: none; null: the "
        "preset's, else 0.",
    )
    capacity: float | None = Field(
        default=None,
        gt=0,
        description="In training an expert takes at most `capacity tokens top_k / experts` tokens of a "
        "sample, rounded up, the rest skip it; null: the preset's, else all are taken.",
    )
    drop: Drop | None = Field(
        default=None,
        description="Which tokens an overloaded expert keeps, those with the largest weights or the "
        "first; null: the preset's, else `probs`.",
    )
    dense_layers: int | None = Field(
        default=None,
        ge=0,
        description="So many leading blocks have a plain MLP instead; null: the preset's, else the family's.",
    )
    every: int | None = Field(
        default=None,
        gt=0,
        description="Of the others only every n-th block, counted from the first of all, has experts; null: "
        "the preset's, else 1.",
    )
    router_bias: bool | None = Field(
        default=None,
        description="The router's linear has a bias (gpt-oss); null: the preset's, else the family's.",
    )
    shared_gate: bool | None = Field(
        default=None,
        description="The shared expert's output is weighed by a gate of the token (Qwen2-MoE); null: the "
        "preset's, else the family's.",
    )
    correction: bool | None = Field(
        default=None,
        description="The choice of experts, not their weights, adds a number for each expert to the scores, "
        "which has no gradient (DeepSeek-V3); null: the preset's, else the family's.",
    )
    correction_rate: float | None = Field(
        default=None,
        ge=0,
        description="By which the number of an expert with less than the mean load grows after each step, "
        "and that of one with more falls, 0: never; null: the preset's, else 0.",
    )
    groups: int | None = Field(
        default=None,
        gt=0,
        description="Groups of neighbouring experts (DeepSeek-V2); null: the preset's, else 1.",
    )
    top_groups: int | None = Field(
        default=None,
        gt=0,
        description="Groups that a token's experts come from; null: the preset's, else 1.",
    )
    group_score: GroupScore | None = Field(
        default=None,
        description="A group's score: that of its best expert, or the sum of the two best; null: the "
        "preset's, else the family's.",
    )
    scale: float | None = Field(
        default=None,
        gt=0,
        description="By which the weights of routed experts are multiplied; null: the preset's, else 1.",
    )

    @field_validator("top_k")
    @classmethod
    def _are_so_many(cls, value: int | None, info: ValidationInfo) -> int | None:
        experts: int | None = info.data.get("experts")
        if value is not None and experts is not None and value > experts:
            raise StrettoError(
                f"is {value}, more than model.moe.experts={experts}",
                hint=f"model.moe.top_k={experts}, or model.moe.experts={value}",
            )
        return value

    def shape(self, family: Family, known: ExpertShape | None = None) -> ExpertShape | None:
        """The experts' sizes, laid over those of a preset, else of the family; None where there are no
        experts.

        Raises:
            StrettoError: sizes that do not fit each other, or sizes of experts that there are none of.
        """
        sizes: dict[str, Any] = self.model_dump(exclude_none=True)
        if known is None and self.experts is None:
            if sizes:
                name, value = next(iter(sizes.items()))
                fix = f"model.moe.experts=8, or model.moe.{name}=null"
                raise Problem(f"moe.{name}", value, "the model has no experts", fix)
            return None
        base: dict[str, Any] = dict(FAMILY_DEFAULTS[family].experts) if known is None else asdict(known)
        try:
            return ExpertShape(**{**base, **sizes})
        except StrettoError as error:
            raise error.within("moe") from None


class ModelConfig(Section):
    """`preset`, or `family` with `layers`, `hidden` and `heads`; fields set in addition to a preset override
    it.
    """

    preset: str | None = Field(
        default=None,
        description="Name of a known model, such as `gpt2` or `llama3-8b`, or the path of a Hugging Face "
        "`config.json` (or its folder), whose sizes the resolved config then has.",
    )
    family: Family | None = Field(
        default=None,
        description="The usual values of all other fields. `gpt`: GPT-2 (learned positions, LayerNorm, GELU, "
        "dropout). `llama`: Llama (rotary positions, RMSNorm, SwiGLU, grouped-query attention). The others "
        "are in docs/models.md.",
    )
    layers: int | None = Field(
        default=None, gt=0, description="Transformer blocks; with an encoder, those of the decoder."
    )
    encoder_layers: int | None = Field(
        default=None,
        ge=0,
        description="Blocks of the encoder, 0: none; null: the preset's, else as many as `layers` in "
        "families with an encoder (`t5`, `bart`).",
    )
    hidden: int | None = Field(default=None, gt=0, description="Features of the residual stream.")
    heads: int | None = Field(default=None, gt=0, description="Query heads of a block.")
    kv_heads: int | None = Field(
        default=None, gt=0, description="Key and value heads of a block, a divisor of `heads`; null: `heads`."
    )
    head_dim: int | None = Field(
        default=None, gt=0, description="Features of a head; null: `hidden / heads`."
    )
    ffn: int | None = Field(
        default=None,
        gt=0,
        description="Inner width of the MLP; null: the family's ratio to `hidden`, as gpt `4 hidden` and "
        "llama `8/3 hidden` rounded up to a multiple of 256.",
    )
    vocab: int | None = Field(
        default=None, gt=0, description="Entries of the embedding; null: those of the data's tokenizer."
    )
    positions: int | None = Field(
        default=None, gt=0, description="Most tokens of context; null: the preset's, else `data.sequence`."
    )
    dropout: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Probability of dropout on embedding, attention and residual; with learned positions "
        "only; null: 0.",
    )
    tied: bool | None = Field(
        default=None,
        description="Head and embedding share one weight; null: the family's, as gpt true, llama false.",
    )
    bias: bool | None = Field(
        default=None,
        description="Biases in linear layers and LayerNorm; null: the family's, as gpt true, llama false.",
    )
    norm_eps: float | None = Field(
        default=None, gt=0, description="Added to the variance in LayerNorm and RMSNorm; null: 1e-5."
    )
    rope_theta: float | None = Field(
        default=None, gt=0, description="Base of the rotary frequencies; null: the preset's, else 10000."
    )
    position_embedding: PositionEmbedding | None = Field(
        default=None,
        description="Positions are `learned` and added to the embedding, or `rotary` or `relative`, in the "
        "attention (`relative`: a bias of scores by distance, beside an encoder only); null: the family's.",
    )
    mlp: Mlp | None = Field(
        default=None,
        description="Activation of the MLP: `gelu` (tanh form), `gelu_exact`, `relu`, or with a gate "
        "`swiglu`, `geglu` (Gemma) or `swiglu_clamped` (gpt-oss); null: the family's.",
    )
    norm: Norm | None = Field(
        default=None,
        description="`layer`: LayerNorm; `rms`: RMSNorm; `rms1p`: RMSNorm times 1 + weight (Gemma); null: "
        "the family's.",
    )
    block_norms: BlockNorms | None = Field(
        default=None,
        description="Norms before attention and MLP (`pre`), before and after (`sandwich`, Gemma), or of the "
        "sum with the residual stream (`post`, BART); null: the family's.",
    )
    embedding_scale: float | None = Field(
        default=None,
        gt=0,
        description="By which the token embedding is multiplied; null: the preset's, else the family's, as "
        "gemma2 `sqrt(hidden)`.",
    )
    logit_softcap: float | None = Field(
        default=None,
        ge=0,
        description="Logits are `cap tanh(logit / cap)`, 0: as they are; null: the preset's, else the "
        "family's.",
    )
    embedding_norm: bool | None = Field(
        default=None,
        description="Embeddings are normalised (BART); null: the preset's, else the family's.",
    )
    logit_scale: float | None = Field(
        default=None,
        gt=0,
        description="By which the input of the output projection is multiplied; null: the preset's, else the "
        "family's, as t5 `1 / sqrt(hidden)` where `tied`.",
    )
    init_std: float = Field(
        default=Initial.init_std,
        gt=0,
        description="Standard deviation of the normal initial values of matrices.",
    )
    scaled_init: bool = Field(
        default=Initial.scaled_init,
        description="That of projections into the residual stream is `init_std / sqrt(2 layers)` (GPT-2, "
        "Megatron-LM); false: `init_std` too.",
    )

    attention: AttentionConfig = Field(default_factory=AttentionConfig)
    rope: RopeConfig = Field(default_factory=RopeConfig)
    moe: ExpertConfig = Field(default_factory=ExpertConfig)

    @field_validator("preset")
    @classmethod
    def _is_known(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            find_shape(Path(value).expanduser())
        except UnknownName as error:
            path = Path(value).expanduser()
            hint = f"there is no {path / 'config.json'}" if path.is_dir() else error.hint
            raise StrettoError(f"is {value!r}, which is not a known model", hint=hint) from None
        except StrettoError as error:
            raise StrettoError(f"is {value!r}: {error.message}", hint=error.hint) from None
        return value

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.preset is not None:
            return self
        missing = [name for name in ("family", "layers", "hidden", "heads") if getattr(self, name) is None]
        if missing:
            raise StrettoError(
                f"has no {', no '.join(missing)}",
                hint="give a preset, or family, layers, hidden and heads",
            )
        return self

    def initial(self) -> Initial:
        """How new weights begin."""
        return Initial(init_std=self.init_std, scaled_init=self.scaled_init)

    @property
    def _configured(self) -> dict[str, Any]:
        """What the config sets, under the names that ModelShape has."""
        beside = {"preset", "positions", "init_std", "scaled_init", "attention", "rope", "moe"}
        sizes = self.model_dump(exclude=beside, exclude_none=True)
        return sizes if self.positions is None else {**sizes, "sequence": self.positions}

    def shape(self, vocab: int, sequence: int) -> ModelShape:
        """The sizes of the model.

        `vocab` is the tokenizer's, `sequence` the data's; the config's own `vocab` and `positions` win.

        Raises:
            StrettoError: sizes that do not fit each other.
        """
        sizes = self._configured
        if self.preset is None:
            assert self.family is not None  # checked above
            usual = FAMILY_DEFAULTS[self.family].attention
            filled: dict[str, Any] = {"vocab": vocab, "sequence": sequence, **sizes}
            return ModelShape(**filled, **self._parts(self.family, usual, None, None))
        known = find_shape(Path(self.preset).expanduser())
        base = fields_of(known) | self._parts(known.family, known.attention, known.rope, known.moe)
        for name, follows in _FOLLOW.items():
            if name in sizes:
                base |= dict.fromkeys(follows)
        base |= {"vocab": vocab, **sizes}
        return ModelShape(**base)

    def _parts(
        self,
        family: Family,
        attention: AttentionShape,
        rope: RopeScaling | None,
        experts: ExpertShape | None,
    ) -> dict[str, Any]:
        """Attention, scaled positions and experts, laid over known ones."""
        return {
            "attention": self.attention.shape(attention),
            "rope": self.rope.shape(rope),
            "moe": self.moe.shape(family, experts),
        }


# what a preset's changed size makes void, so that it takes the family's usual value again
_FOLLOW = {
    "family": (
        "head_dim",
        "ffn",
        "kv_heads",
        "tied",
        "bias",
        "position_embedding",
        "mlp",
        "norm",
        "block_norms",
        "embedding_scale",
        "logit_softcap",
        "embedding_norm",
        "logit_scale",
        "encoder_layers",
    ),
    "hidden": ("head_dim", "ffn", "embedding_scale", "logit_scale"),
    "heads": ("head_dim", "kv_heads"),
}
