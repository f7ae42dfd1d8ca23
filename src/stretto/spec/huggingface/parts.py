"""What a description of a kind of model is made of: keys of a `config.json`, and what they say of a shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from stretto.errors import StrettoError
from stretto.spec.huggingface.facts import Facts
from stretto.spec.huggingface.fields import (
    COUNT,
    EXPERTS,
    FLAG,
    NUMBER,
    POSITIVE,
    SIZE,
    WORD,
    Fields,
    Required,
    Type,
    shown,
    whole,
)

Config = dict[str, Any]


class Part(Protocol):
    """Some keys of a `config.json`, and the facts of a shape that they say."""

    def read(self, config: Fields, facts: Facts) -> None:
        """Add the facts that the keys say; facts of the parts before this one are there.

        Raises:
            StrettoError: a value of the wrong type, or one that our modules cannot compute.
        """
        ...

    def write(self, facts: Facts, config: Config) -> None:
        """Add the keys that say the facts. What they cannot say shows when they are read again."""
        ...


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key that is one fact.

    theirs: the key.
    ours: the fact.
    usual: what transformers takes where the key is absent.
    null: the fact of a key that is null, or whose usual value is None.
    other: another name of the key.
    """

    theirs: str
    ours: str
    type: Type = SIZE
    usual: Any = Required
    null: Any = Required
    other: str | None = None

    def read(self, config: Fields, facts: Facts) -> None:
        key = self.theirs
        if self.other is not None and self.other in config:
            other = config.raw(self.other)
            if key in config and config.raw(key) != other:
                raise config.problem(key, f"{self.other} says {shown(other)}", "the same value for both")
            key = self.other
        usual = self.null if self.usual is None else self.usual
        value = config.get(key, self.type, usual, self.null)
        facts[self.ours] = float(value) if self.type in (NUMBER, POSITIVE) and value is not None else value

    def write(self, facts: Facts, config: Config) -> None:
        if self.ours in facts:
            value = facts[self.ours]
            if self.type is SIZE and isinstance(value, float) and value.is_integer():
                value = int(value)
            config[self.theirs] = None if self.null is not Required and value == self.null else value


@dataclass(frozen=True)
class Always:
    """A key with values that our modules compute; the first is what transformers takes where it is absent."""

    key: str
    allowed: tuple[Any, ...]

    def read(self, config: Fields, facts: Facts) -> None:
        value = config.raw(self.key)
        if self.key in config and not any(_same(value, allowed) for allowed in self.allowed):
            listed = " or ".join(dict.fromkeys(_json(value) for value in self.allowed))
            raise config.problem(self.key, f"our modules compute only {listed}", f"{self.key}: {listed}")

    def write(self, facts: Facts, config: Config) -> None:
        config[self.key] = self.allowed[0]


def _same(value: object, allowed: object) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _json(value: object) -> str:
    words = {True: "true", False: "false", None: "null"}
    return words[value] if isinstance(value, bool) or value is None else str(value)


@dataclass(frozen=True, kw_only=True)
class Word:
    """One key with a few words, each of which is a value of one fact.

    words: the facts by the words; of words of one fact the first is written.
    usual: the word that transformers takes where the key is absent.
    """

    theirs: str
    ours: str
    words: Mapping[str, Any]
    usual: str

    def read(self, config: Fields, facts: Facts) -> None:
        word = config.get(self.theirs, WORD, self.usual)
        if word not in self.words:
            listed = " or ".join(self.words)
            rule = f"our modules compute only {listed}"
            raise config.problem(self.theirs, rule, f"{self.theirs}: {next(iter(self.words))}")
        facts[self.ours] = self.words[word]

    def write(self, facts: Facts, config: Config) -> None:
        words = [word for word, fact in self.words.items() if fact == facts[self.ours]]
        if words:
            config[self.theirs] = words[0]


@dataclass(frozen=True, kw_only=True)
class Same:
    """One key that must say the same as a fact."""

    theirs: str
    ours: str

    def read(self, config: Fields, facts: Facts) -> None:
        value = facts[self.ours]
        if config.get(self.theirs, SIZE, value, value) != value:
            rule = f"both stacks of our modules have the same sizes, here {value}"
            raise config.problem(self.theirs, rule, f"{self.theirs}: {value}")

    def write(self, facts: Facts, config: Config) -> None:
        config[self.theirs] = facts[self.ours]


@dataclass(frozen=True)
class ScaledEmbedding:
    """Whether the embedding is multiplied by sqrt(d_model): `scale_embedding` of BART."""

    def read(self, config: Fields, facts: Facts) -> None:
        scaled = config.get("scale_embedding", FLAG, False, False)
        facts["embedding_scale"] = facts["hidden"] ** 0.5 if scaled else 1.0

    def write(self, facts: Facts, config: Config) -> None:
        config["scale_embedding"] = facts["embedding_scale"] != 1.0


@dataclass(frozen=True)
class ScaledLogits:
    """T5's head: where it is tied, its input is divided by sqrt(d_model), unless `scale_decoder_outputs`,
    which transformers 5 writes, says else.
    """

    def read(self, config: Fields, facts: Facts) -> None:
        scaled = config.get("scale_decoder_outputs", FLAG, facts["tied"], facts["tied"])
        facts["logit_scale"] = facts["hidden"] ** -0.5 if scaled else 1.0

    def write(self, facts: Facts, config: Config) -> None:
        config["scale_decoder_outputs"] = facts["logit_scale"] != 1.0


@dataclass(frozen=True)
class Implied:
    """Facts that hold for every model of a kind, and stand in no key."""

    facts: Mapping[str, Any]

    def read(self, config: Fields, facts: Facts) -> None:
        facts |= self.facts

    def write(self, facts: Facts, config: Config) -> None:
        """Nothing: reading adds them again."""


@dataclass(frozen=True)
class Computed:
    """Facts that follow from others, and stand in no key."""

    rule: Callable[[Facts], Facts]

    def read(self, config: Fields, facts: Facts) -> None:
        facts |= self.rule(facts)

    def write(self, facts: Facts, config: Config) -> None:
        """Nothing: reading adds them again."""


@dataclass(frozen=True)
class Noted:
    """Keys of parts that have no module here and hardly a cost: planned with a word in `beyond`."""

    words: Callable[[Fields], list[str]]

    def read(self, config: Fields, facts: Facts) -> None:
        facts["beyond"] = (*facts.get("beyond", ()), *self.words(config))

    def write(self, facts: Facts, config: Config) -> None:
        """Nothing: what cannot be built is not exported."""


@dataclass(frozen=True)
class Dropout:
    """One dropout rate under several keys."""

    keys: tuple[str, ...]
    usual: float

    def read(self, config: Fields, facts: Facts) -> None:
        rates = {key: float(config.get(key, NUMBER, self.usual)) for key in self.keys}
        if len(set(rates.values())) > 1:
            listed = ", ".join(f"{key} {rate}" for key, rate in rates.items())
            raise StrettoError(f"{listed}: our models have one dropout rate", hint="make them equal")
        facts["dropout"] = rates[self.keys[0]]

    def write(self, facts: Facts, config: Config) -> None:
        config |= dict.fromkeys(self.keys, facts["dropout"])


@dataclass(frozen=True, kw_only=True)
class Biases:
    """Biases of the MLP, of queries, keys and values, and of attention's projection: each a key with its
    usual value, or a constant of the kind.
    """

    mlp: tuple[str, bool] | bool = False
    qkv: tuple[str, bool] | bool = False
    proj: tuple[str, bool] | bool = False

    def read(self, config: Fields, facts: Facts) -> None:
        for name, source in self._sources().items():
            facts[name] = source if isinstance(source, bool) else config.get(source[0], FLAG, source[1])

    def write(self, facts: Facts, config: Config) -> None:
        for name, source in self._sources().items():
            if not isinstance(source, bool):
                config[source[0]] = facts[name]

    def _sources(self) -> dict[str, tuple[str, bool] | bool]:
        return {"bias": self.mlp, "attention.qkv_bias": self.qkv, "attention.proj_bias": self.proj}


@dataclass(frozen=True)
class SparseBlocks:
    """Which blocks have experts: `mlp_only_layers` and `decoder_sparse_step` of the Qwen models."""

    def read(self, config: Fields, facts: Facts) -> None:
        only = config.numbers("mlp_only_layers") or []
        every = config.get("decoder_sparse_step", whole(1, 10_000), 1)
        dense = {i for i in only if (i + 1) % every == 0 and i < facts["layers"]}
        leading = max(dense, default=-1) + 1
        if dense != {i for i in range(leading) if (i + 1) % every == 0}:
            rule = "our modules have blocks without experts only before all others, or every n-th"
            raise config.problem("mlp_only_layers", rule, "mlp_only_layers: the first ones, as [0, 1]")
        facts |= {"moe.dense_layers": leading, "moe.every": every}

    def write(self, facts: Facts, config: Config) -> None:
        if "moe.every" in facts:
            config["mlp_only_layers"] = list(range(facts["moe.dense_layers"]))
            config["decoder_sparse_step"] = facts["moe.every"]


@dataclass(frozen=True)
class SharedExperts:
    """DeepSeek's shared experts, as wide together as `n_shared_experts` routed ones."""

    usual: int

    def read(self, config: Fields, facts: Facts) -> None:
        facts["moe.shared_ffn"] = config.get("n_shared_experts", COUNT, self.usual, 0) * facts["moe.ffn"]

    def write(self, facts: Facts, config: Config) -> None:
        if "moe.ffn" in facts:
            config["n_shared_experts"] = facts["moe.shared_ffn"] // facts["moe.ffn"]


@dataclass(frozen=True)
class ExpertGroups:
    """Group-limited choice of experts. DeepSeek-V2 has it where `topk_method` is group_limited_greedy, and
    scores a group by its best expert; V3 (method noaux_tc) always, by its two best.
    """

    switch: bool
    usual: tuple[int, int]

    def read(self, config: Fields, facts: Facts) -> None:
        groups = config.get("n_group", SIZE, self.usual[0], 1)
        best = config.get("topk_group", SIZE, self.usual[1], 1)
        limited = True
        methods = Always("topk_method", ("greedy", "group_limited_greedy") if self.switch else ("noaux_tc",))
        methods.read(config, facts)
        if self.switch:
            limited = config.raw("topk_method") == "group_limited_greedy"
        facts |= {"moe.groups": groups, "moe.top_groups": best} if limited else {}
        facts["moe.group_score"] = "max" if self.switch else "top2"

    def write(self, facts: Facts, config: Config) -> None:
        if "moe.groups" in facts:
            config |= {"n_group": facts["moe.groups"], "topk_group": facts["moe.top_groups"]}
            greedy = "greedy" if facts["moe.groups"] == 1 else "group_limited_greedy"
            config["topk_method"] = greedy if self.switch else "noaux_tc"


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's latent attention: `head_dim` of ours is their two parts of a query's features together."""

    def read(self, config: Fields, facts: Facts) -> None:
        heads = facts["heads"]
        if config.get("num_key_value_heads", SIZE, heads, heads) != heads:
            rule = f"latent attention has as many as num_attention_heads, {heads}"
            raise config.problem("num_key_value_heads", rule, f"num_key_value_heads: {heads}")
        config.use(frozenset(("head_dim", "qk_head_dim")))  # transformers writes what follows from the others
        rope = config.get("qk_rope_head_dim", EXPERTS)
        facts |= {
            "kv_heads": heads,
            "head_dim": config.get("qk_nope_head_dim", EXPERTS) + rope,
            "latent.rope_dim": rope,
            "latent.kv_rank": config.get("kv_lora_rank", SIZE),
            "latent.q_rank": config.get("q_lora_rank", SIZE, 1536, None),
            "latent.value_dim": config.get("v_head_dim", EXPERTS),
        }

    def write(self, facts: Facts, config: Config) -> None:
        if "latent.rope_dim" in facts:
            rope = facts["latent.rope_dim"]
            config |= {
                "num_key_value_heads": facts["kv_heads"],
                "qk_nope_head_dim": facts["head_dim"] - rope,
                "qk_rope_head_dim": rope,
                "kv_lora_rank": facts["latent.kv_rank"],
                "q_lora_rank": facts["latent.q_rank"],
                "v_head_dim": facts["latent.value_dim"],
            }
