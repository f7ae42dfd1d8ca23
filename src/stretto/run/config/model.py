"""The `model` section: a preset, a family with sizes, or a preset with some of its sizes changed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from stretto.errors import Problem, StrettoError, UnknownName
from stretto.run.config.section import Section
from stretto.spec.experts import ExpertShape
from stretto.spec.presets import preset
from stretto.spec.shape import Family, ModelShape, fields_of


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
    score: Literal["softmax", "sigmoid"] | None = Field(
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
    drop: Literal["probs", "position"] | None = Field(
        default=None,
        description="Which tokens an overloaded expert keeps, those with the largest weights or the "
        "first; null: the preset's, else `probs`.",
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

    def shape(self, known: ExpertShape | None = None) -> ExpertShape | None:
        """The experts' sizes, laid over those of a preset; None where there are no experts.

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
        base: dict[str, Any] = {} if known is None else asdict(known)
        try:
            return ExpertShape(**{**base, **sizes})
        except StrettoError as error:
            raise error.within("moe") from None


class ModelConfig(Section):
    """`preset`, or `family` with `layers`, `hidden` and `heads`; fields set in addition to a preset override
    it.
    """

    preset: str | None = Field(
        default=None, description="Name of a known model, such as `gpt2` or `llama3-8b`."
    )
    family: Family | None = Field(
        default=None,
        description="`gpt`: GPT-2 (learned positions, LayerNorm, GELU, dropout). "
        "`llama`: Llama (rotary positions, RMSNorm, SwiGLU, grouped-query attention).",
    )
    layers: int | None = Field(default=None, gt=0, description="Transformer blocks.")
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
        description="Inner width of the MLP; null: gpt `4 hidden`, llama `8/3 hidden` rounded up to a "
        "multiple of 256.",
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
        description="Probability of dropout on embedding, attention and residual; gpt only; null: 0.",
    )
    tied: bool | None = Field(
        default=None, description="Head and embedding share one weight; null: gpt true, llama false."
    )
    bias: bool | None = Field(
        default=None, description="Biases in linear layers and LayerNorm; null: gpt true, llama false."
    )
    norm_eps: float | None = Field(
        default=None, gt=0, description="Added to the variance in LayerNorm and RMSNorm; null: 1e-5."
    )
    rope_theta: float | None = Field(
        default=None, gt=0, description="Base of the rotary frequencies; llama only; null: 10000."
    )

    moe: ExpertConfig = Field(default_factory=ExpertConfig)

    @field_validator("preset")
    @classmethod
    def _is_known(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            preset(value)
        except UnknownName as error:
            hint = error.hint
            if value.endswith(".json") or Path(value).expanduser().exists():
                hint = (
                    "presets are names; for a config.json let `stretto plan --model PATH --write job.yaml` "
                    "write the config, with --cluster and --batch"
                )
            raise StrettoError(f"is {value!r}, which is not a known model", hint=hint) from None
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

    @property
    def _configured(self) -> dict[str, Any]:
        """What the config sets, under the names that ModelShape has."""
        sizes = self.model_dump(exclude={"preset", "positions", "moe"}, exclude_none=True)
        return sizes if self.positions is None else {**sizes, "sequence": self.positions}

    def shape(self, vocab: int, sequence: int) -> ModelShape:
        """The sizes of the model.

        `vocab` is the tokenizer's, `sequence` the data's; the config's own `vocab` and `positions` win.

        Raises:
            StrettoError: sizes that do not fit each other.
        """
        sizes = self._configured
        if self.preset is None:
            filled: dict[str, Any] = {"vocab": vocab, "sequence": sequence, **sizes, "moe": self.moe.shape()}
            return ModelShape(**filled)
        known = preset(self.preset)
        base: dict[str, Any] = {**fields_of(known), "moe": self.moe.shape(known.moe)}
        for name, follows in _FOLLOW.items():
            if name in sizes:
                base |= dict.fromkeys(follows)
        base |= {"vocab": vocab, **sizes}
        return ModelShape(**base)


# what a preset's changed size makes void, so that it takes the family's usual value again
_FOLLOW = {
    "family": ("head_dim", "ffn", "kv_heads", "tied", "bias", "mlp", "norm"),
    "hidden": ("head_dim", "ffn"),
    "heads": ("head_dim", "kv_heads"),
}
