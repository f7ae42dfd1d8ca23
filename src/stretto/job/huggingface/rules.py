"""Rules that map keys of a `config.json` to fields of a shape and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Protocol

from stretto.errors import StrettoError
from stretto.job.huggingface.fields import ShapeFields
from stretto.job.huggingface.keys import (
    COUNT,
    EXPERTS,
    FLAG,
    NUMBER,
    POSITIVE,
    REQUIRED,
    SIZE,
    ConfigKeys,
    KeyType,
    integer,
    shown,
)

KeyValues = dict[str, Any]


class KeyRule(Protocol):
    """Maps some keys of a `config.json` to fields of a shape and back."""

    def read(self, config: ConfigKeys, fields: ShapeFields) -> None:
        """Add the fields that the keys set to `fields`, which has those of all earlier rules.

        Raises:
            StrettoError: a value has the wrong type or is one that Stretto's modules cannot compute.
        """
        ...

    def write(self, fields: ShapeFields, config: KeyValues) -> None:
        """Add the keys for the fields. Values that keys cannot express are detected by reading them back."""
        ...


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key that sets one field.

    Attributes:
        default: the value that transformers takes if the key is absent.
        null: the field's value for a key that is null or has the default None.
        other: another name of the key.
        values: the field's value for each word that the key may have; the first word for a value is written.
    """

    key: str = dataclass_field(kw_only=False)
    field: str = dataclass_field(kw_only=False)
    type: KeyType = dataclass_field(default=SIZE, kw_only=False)
    default: Any = REQUIRED
    null: Any = REQUIRED
    other: str | None = None
    values: Mapping[str, Any] | None = None

    def read(self, config: ConfigKeys, fields: ShapeFields) -> None:
        key = self.key
        if self.other is not None and self.other in config:
            other = config.raw(self.other)
            if key in config and config.raw(key) != other:
                raise config.problem(key, f"{self.other} is {shown(other)}", "the same value for both")
            key = self.other
        default = self.null if self.default is None else self.default
        value = config.get(key, self.type, default, self.null)
        if self.values is not None and value not in self.values:
            rule = f"our modules compute only {' or '.join(self.values)}"
            raise config.problem(key, rule, f"{key}: {next(iter(self.values))}")
        if self.values is not None:
            value = self.values[value]
        fields[self.field] = float(value) if self.type in (NUMBER, POSITIVE) and value is not None else value

    def write(self, fields: ShapeFields, config: KeyValues) -> None:
        if self.field not in fields:
            return
        value = fields[self.field]
        if self.values is not None:
            if word := next((word for word, meaning in self.values.items() if meaning == value), None):
                config[self.key] = word
            return
        if self.type is SIZE and isinstance(value, float) and value.is_integer():
            value = int(value)
        config[self.key] = None if self.null is not REQUIRED and value == self.null else value


@dataclass(frozen=True)
class Fixed:
    """A key with the values that Stretto's modules compute; the first is transformers' default."""

    key: str
    allowed: tuple[Any, ...]

    def read(self, config: ConfigKeys, fields: ShapeFields) -> None:
        value = config.raw(self.key)
        equal = (
            value == other and isinstance(value, bool) == isinstance(other, bool) for other in self.allowed
        )
        if self.key in config and not any(equal):
            texts = {True: "true", False: "false", None: "null"}
            values = (texts[v] if isinstance(v, bool) or v is None else str(v) for v in self.allowed)
            listed = " or ".join(dict.fromkeys(values))
            raise config.problem(self.key, f"our modules compute only {listed}", f"{self.key}: {listed}")

    def write(self, fields: ShapeFields, config: KeyValues) -> None:
        config[self.key] = self.allowed[0]


@dataclass(frozen=True)
class EqualSize:
    """A key whose value must equal a field that another key has set."""

    key: str
    field: str

    def read(self, config: ConfigKeys, fields: ShapeFields) -> None:
        value = fields[self.field]
        if config.get(self.key, SIZE, value, value) != value:
            rule = f"both stacks of our modules have the same sizes, here {value}"
            raise config.problem(self.key, rule, f"{self.key}: {value}")

    def write(self, fields: ShapeFields, config: KeyValues) -> None:
        config[self.key] = fields[self.field]


@dataclass(frozen=True)
class Derived:
    """Fields derived from other fields, or from keys that are not written."""

    rule: Callable[[ConfigKeys, ShapeFields], ShapeFields]

    def read(self, config: ConfigKeys, fields: ShapeFields) -> None:
        fields |= self.rule(config, fields)

    def write(self, fields: ShapeFields, config: KeyValues) -> None:
        """Write nothing: reading derives them again."""


@dataclass(frozen=True)
class HiddenScale:
    """A flag that scales by a power of `hidden`: BART's embedding by sqrt(d_model), the input of T5's head by
    1 / sqrt(d_model), by default if the head is tied.

    Attributes:
        default: the flag's default, or None if it is the value of the field `tied`.
    """

    key: str
    field: str
    power: float
    default: bool | None

    def read(self, config: ConfigKeys, fields: ShapeFields) -> None:
        default = fields["tied"] if self.default is None else self.default
        scaled = config.get(self.key, FLAG, default, default)
        fields[self.field] = fields["hidden"] ** self.power if scaled else 1.0

    def write(self, fields: ShapeFields, config: KeyValues) -> None:
        config[self.key] = fields[self.field] != 1.0


@dataclass(frozen=True)
class Dropout:
    """One dropout rate under several keys."""

    keys: tuple[str, ...]
    default: float = 0.1

    def read(self, config: ConfigKeys, fields: ShapeFields) -> None:
        rates = {key: float(config.get(key, NUMBER, self.default)) for key in self.keys}
        if len(set(rates.values())) > 1:
            listed = ", ".join(f"{key} {rate}" for key, rate in rates.items())
            raise StrettoError(f"{listed}: our models have one dropout rate", hint="make them equal")
        fields["dropout"] = rates[self.keys[0]]

    def write(self, fields: ShapeFields, config: KeyValues) -> None:
        config |= dict.fromkeys(self.keys, fields["dropout"])


class SparseBlocks:
    """Which blocks have experts: `mlp_only_layers` and `decoder_sparse_step` of the Qwen models."""

    def read(self, config: ConfigKeys, fields: ShapeFields) -> None:
        only = config.numbers("mlp_only_layers") or []
        every = config.get("decoder_sparse_step", integer(1, 10_000), 1)
        dense = {i for i in only if (i + 1) % every == 0 and i < fields["layers"]}
        leading = max(dense, default=-1) + 1
        if dense != {i for i in range(leading) if (i + 1) % every == 0}:
            rule = "our modules have blocks without experts only before all others, or every n-th"
            raise config.problem("mlp_only_layers", rule, "mlp_only_layers: the first ones, as [0, 1]")
        fields |= {"moe.dense_layers": leading, "moe.every": every}

    def write(self, fields: ShapeFields, config: KeyValues) -> None:
        if "moe.every" in fields:
            config["mlp_only_layers"] = list(range(fields["moe.dense_layers"]))
            config["decoder_sparse_step"] = fields["moe.every"]


@dataclass(frozen=True)
class SharedExperts:
    """DeepSeek's shared experts, with the combined width of `n_shared_experts` routed ones."""

    default: int

    def read(self, config: ConfigKeys, fields: ShapeFields) -> None:
        fields["moe.shared_ffn"] = config.get("n_shared_experts", COUNT, self.default, 0) * fields["moe.ffn"]

    def write(self, fields: ShapeFields, config: KeyValues) -> None:
        if "moe.ffn" in fields:
            config["n_shared_experts"] = fields["moe.shared_ffn"] // fields["moe.ffn"]


@dataclass(frozen=True)
class ExpertGroups:
    """Group-limited routing. DeepSeek-V2 uses it if `topk_method` is group_limited_greedy and scores a group
    by its best expert; V3 (noaux_tc) always uses it and scores a group by its two best.
    """

    switch: bool
    default: tuple[int, int]

    def read(self, config: ConfigKeys, fields: ShapeFields) -> None:
        groups = config.get("n_group", SIZE, self.default[0], 1)
        best = config.get("topk_group", SIZE, self.default[1], 1)
        methods = Fixed("topk_method", ("greedy", "group_limited_greedy") if self.switch else ("noaux_tc",))
        methods.read(config, fields)
        if not self.switch or config.raw("topk_method") == "group_limited_greedy":
            fields |= {"moe.groups": groups, "moe.top_groups": best}
        fields["moe.group_score"] = "max" if self.switch else "top2"

    def write(self, fields: ShapeFields, config: KeyValues) -> None:
        if "moe.groups" in fields:
            config |= {"n_group": fields["moe.groups"], "topk_group": fields["moe.top_groups"]}
            greedy = "greedy" if fields["moe.groups"] == 1 else "group_limited_greedy"
            config["topk_method"] = greedy if self.switch else "noaux_tc"


class LatentAttentionRule:
    """DeepSeek's latent attention; a shape's `head_dim` is the sum of both parts of a query head."""

    def read(self, config: ConfigKeys, fields: ShapeFields) -> None:
        heads = fields["heads"]
        if config.get("num_key_value_heads", SIZE, heads, heads) != heads:
            rule = f"latent attention has as many as num_attention_heads, {heads}"
            raise config.problem("num_key_value_heads", rule, f"num_key_value_heads: {heads}")
        config.use(frozenset(("head_dim", "qk_head_dim")))  # transformers writes these derived values
        rope = config.get("qk_rope_head_dim", EXPERTS)
        fields |= {
            "kv_heads": heads,
            "head_dim": config.get("qk_nope_head_dim", EXPERTS) + rope,
            "latent.rope_dim": rope,
            "latent.kv_rank": config.get("kv_lora_rank", SIZE),
            "latent.q_rank": config.get("q_lora_rank", SIZE, 1536, None),
            "latent.value_dim": config.get("v_head_dim", EXPERTS),
        }

    def write(self, fields: ShapeFields, config: KeyValues) -> None:
        if "latent.rope_dim" in fields:
            rope = fields["latent.rope_dim"]
            config |= {
                "num_key_value_heads": fields["kv_heads"],
                "qk_nope_head_dim": fields["head_dim"] - rope,
                "qk_rope_head_dim": rope,
                "kv_lora_rank": fields["latent.kv_rank"],
                "q_lora_rank": fields["latent.q_rank"],
                "v_head_dim": fields["latent.value_dim"],
            }
