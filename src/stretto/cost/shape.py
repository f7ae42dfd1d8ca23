"""The sizes that fix a language model: what its costs are counted from and its modules built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stretto.cost.experts import ExpertShape
from stretto.errors import StrettoError, nearest

Family = Literal["gpt", "llama"]
FAMILIES: tuple[Family, ...] = ("gpt", "llama")

_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "sequence")


@dataclass(frozen=True, init=False)
class ModelShape:
    """A decoder-only transformer.

    `gpt` is GPT-2: learned positions, LayerNorm before each half of a block, GELU, dropout, tied head.
    `llama` is Llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no dropout.
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
    moe: ExpertShape | None  # experts in place of every block's MLP

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
    ) -> None:
        """Fill in what was left out, and check.

        Raises:
            StrettoError: a size is no positive whole number, sizes do not divide, or do not fit the family.
        """
        if family not in FAMILIES:
            near = nearest(str(family), FAMILIES)
            hint = f"did you mean {near!r}?" if near else None
            raise StrettoError(f"family {family!r} is not one of {', '.join(FAMILIES)}", hint=hint)
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
        }
        for name, value in filled.items():
            object.__setattr__(self, name, value)
        for name in _SIZES:
            _check_size(name, filled[name])
        _check(self)

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection (SwiGLU)."""
        return self.family == "llama"

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


def _default_head_dim(hidden: int, heads: int) -> int:
    if hidden % heads:
        fits = _nearest_multiple(hidden, heads)
        raise StrettoError(
            f"hidden {hidden} is not a multiple of heads {heads}",
            hint=f"hidden: {fits}, another number of heads, or head_dim set by hand",
        )
    return hidden // heads


def _default_ffn(family: Family, hidden: int) -> int:
    if family == "gpt":
        return 4 * hidden
    return -(-8 * hidden // (3 * 256)) * 256


def _nearest_multiple(value: int, of: int) -> int:
    return max(of, (value + of // 2) // of * of)


def _check_size(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StrettoError(f"{name} {value!r} is not a whole number above 0", hint=f"set {name} to 1 or more")


def _check(shape: ModelShape) -> None:
    if shape.heads % shape.kv_heads:
        divisors = [n for n in range(1, shape.heads + 1) if shape.heads % n == 0]
        fits = min(divisors, key=lambda n: abs(n - shape.kv_heads))
        raise StrettoError(
            f"kv_heads {shape.kv_heads} does not divide heads {shape.heads}",
            hint=f"nearest: kv_heads: {fits}",
        )
    if not 0.0 <= shape.dropout < 1.0:
        raise StrettoError(
            f"dropout {shape.dropout} is not in [0, 1)", hint="0.1 is usual, 0 switches it off"
        )
    if shape.norm_eps <= 0.0:
        raise StrettoError(f"norm_eps {shape.norm_eps} is not above 0", hint="1e-5 is usual")
    if shape.family == "llama":
        _check_llama(shape)


def _check_llama(shape: ModelShape) -> None:
    if shape.head_dim % 2:
        raise StrettoError(
            f"head_dim {shape.head_dim} is odd: rotary positions turn pairs of features",
            hint=f"nearest: head_dim: {shape.head_dim + 1}",
        )
    if shape.dropout:
        raise StrettoError(
            f"dropout {shape.dropout} with family 'llama', which has none", hint="dropout: 0, or family: gpt"
        )
    if shape.rope_theta <= 0.0:
        raise StrettoError(f"rope_theta {shape.rope_theta} is not above 0", hint="10000 is usual")
