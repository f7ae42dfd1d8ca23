"""Rotary positions and windows: what `rope_parameters`, `layer_types` and their older names say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.errors import Problem
from stretto.spec.attention import ROPE_TYPES, RopeScaling
from stretto.spec.huggingface.facts import Facts
from stretto.spec.huggingface.fields import (
    COUNT,
    FLAG,
    NUMBER,
    POSITIVE,
    SIZE,
    WORD,
    Fields,
    Required,
    Type,
)
from stretto.spec.huggingface.parts import Config

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class _Setting:
    """A setting of a type of scaling; `usual` where it is absent or null."""

    theirs: str
    ours: str
    type: Type = NUMBER
    usual: Any = Required


_FACTOR = _Setting("factor", "factor")
_ORIGINAL = _Setting("original_max_position_embeddings", "original_positions", SIZE)
_SETTINGS: Mapping[str, tuple[_Setting, ...]] = {
    "default": (),
    "linear": (_FACTOR,),
    "dynamic": (_FACTOR,),
    "llama3": (
        _FACTOR,
        _ORIGINAL,
        _Setting("low_freq_factor", "low_freq_factor"),
        _Setting("high_freq_factor", "high_freq_factor"),
    ),
    "yarn": (
        _FACTOR,
        _ORIGINAL,
        _Setting("beta_fast", "beta_fast", NUMBER, 32.0),
        _Setting("beta_slow", "beta_slow", NUMBER, 1.0),
        _Setting("truncate", "truncate", FLAG, True),
        _Setting("attention_factor", "attention_factor", NUMBER, None),
        _Setting("mscale", "mscale", NUMBER, None),
        _Setting("mscale_all_dim", "mscale_all_dim", NUMBER, None),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Base and scaling of the rotary frequencies: `rope_parameters` of transformers 5, `rope_theta` and
    `rope_scaling` of older files, which is written too, so that older versions read the same.

    theta: the usual base.
    local: that of blocks with a window, where they have another (`rope_local_base_freq`); None: one for all.
    scaling: the usual `rope_parameters`.
    turned: the usual share of a head's features that are turned (`partial_rotary_factor`), where it can be
        less than all; such models can only be planned.
    """

    theta: float = 10000.0
    local: float | None = None
    scaling: Mapping[str, Any] | None = None
    turned: float | None = None

    def read(self, config: Fields, facts: Facts) -> None:
        scaled, sliding = self._sections(config)
        theta = config.get("rope_theta", POSITIVE, self.theta, self.theta)
        facts["rope_theta"] = float(scaled.get("rope_theta", POSITIVE, theta, theta))
        if self.local is not None:
            local = config.get("rope_local_base_freq", POSITIVE, self.local, self.local)
            facts["attention.local_theta"] = float(sliding.get("rope_theta", POSITIVE, local, local))
            if _type(sliding) != "default":
                key = "rope_type" if "rope_type" in sliding else "type"
                raise sliding.problem(key, "in blocks with a window our modules compute only default")
        facts |= _scaling(config, scaled, facts["sequence"])
        share = config.get("partial_rotary_factor", NUMBER, self.turned or 1.0, self.turned or 1.0)
        share = scaled.get("partial_rotary_factor", NUMBER, share, share)
        if share != 1.0:
            if self.turned is None:
                raise config.problem("partial_rotary_factor", "our modules turn all features of a head")
            facts["beyond"] = (*facts.get("beyond", ()), f"rotary positions of {share} of a head")

    def write(self, facts: Facts, config: Config) -> None:
        kind = facts.get("rope.type", "default")
        scaling = {"rope_type": kind}
        for setting in _SETTINGS[kind]:
            if (value := facts[f"rope.{setting.ours}"]) is not None:
                scaling[setting.theirs] = value
        whole = scaling | {"rope_theta": facts["rope_theta"]}
        config["rope_theta"] = facts["rope_theta"]
        config["rope_scaling"] = None if kind == "default" else scaling
        config["rope_parameters"] = whole
        if self.local is not None:
            local = facts["attention.local_theta"] or facts["rope_theta"]
            config["rope_local_base_freq"] = local
            config["rope_parameters"] = {FULL: whole, SLIDING: {"rope_type": "default", "rope_theta": local}}

    def _sections(self, config: Fields) -> tuple[Fields, Fields]:
        """The parameters of blocks that see all, and of those with a window."""
        parameters, scaling = config.section("rope_parameters"), config.section("rope_scaling")
        if parameters is None and scaling is None and self.scaling is not None:
            return Fields(self.scaling), Fields({})
        parameters = parameters or Fields({}, "rope_parameters")
        nested = FULL in parameters or SLIDING in parameters
        if nested and self.local is None:
            raise config.problem("rope_parameters", "this kind of model has one for all blocks")
        full = (parameters.section(FULL) or Fields({})) if nested else parameters
        sliding = parameters.section(SLIDING) if nested else None
        return full.joined(scaling), sliding or Fields({})


def _type(section: Fields) -> str:
    older = section.get("type", WORD, "default", "default")
    return section.get("rope_type", WORD, older, older)


def _scaling(config: Fields, section: Fields, positions: int) -> Facts:
    """The facts of the scaling of a section; `positions`: the most that the model sees."""
    kind = _type(section)
    if kind not in _SETTINGS:
        allowed = ", ".join(("default", *ROPE_TYPES))
        key = "rope_type" if "rope_type" in section else "type"
        raise section.problem(key, f"our modules compute {allowed}")
    facts: Facts = {}
    for setting in _SETTINGS[kind]:
        usual = setting.usual
        if setting is _ORIGINAL:
            usual = config.get(setting.theirs, SIZE, positions, positions)  # Phi-3 has it outside
        elif setting is _FACTOR and kind == "yarn":  # of DeepSeek, says transformers
            original = section.get(_ORIGINAL.theirs, SIZE, positions, positions)
            usual = positions / original
        value = section.get(setting.theirs, setting.type, usual, usual)
        facts[f"rope.{setting.ours}"] = (
            float(value) if setting.type is NUMBER and value is not None else value
        )
    if kind == "dynamic":
        facts["rope.original_positions"] = positions
    if kind == "default":
        return facts
    try:
        values: Facts = {name.removeprefix("rope."): value for name, value in facts.items()}
        values["type"] = kind
        RopeScaling(**values)
    except Problem as problem:
        names = {setting.ours: setting.theirs for setting in _SETTINGS[kind]}
        key = section.name(names.get(problem.field, problem.field))
        raise Problem(key, problem.value, problem.rule, problem.fix) from None
    return {"rope.type": kind, **facts}


Sliding = Callable[[int, int], bool]  # whether a block has a window: its index, and max_window_layers


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Which blocks see only a window of positions before them: `sliding_window` and `layer_types`.

    usual: what transformers takes for `sliding_window` where it is absent.
    switched: there is a window only where `use_sliding_window` is true.
    by_block: `layer_types` says which blocks have it; where that is absent, `pattern` does.
    period: the usual distance of blocks that see all, where `sliding_window_pattern` may say it.
    layers_with: the usual `max_window_layers`, where that plays a part.
    """

    usual: int | None = None
    switched: bool = False
    by_block: bool = False
    pattern: Sliding = lambda index, bound: True
    period: int | None = None
    layers_with: int | None = None

    def read(self, config: Fields, facts: Facts) -> None:
        window = config.get("sliding_window", COUNT, self.usual, None) or None
        if self.switched and not config.get("use_sliding_window", FLAG, False, False):
            window = None
        sliding = self._blocks(config, facts["layers"], window)
        if window is None and any(sliding):
            raise config.problem("layer_types", "sliding_attention needs a sliding_window")
        whole = [i + 1 for i, it in enumerate(sliding) if not it]
        if window is None or len(whole) == facts["layers"]:
            facts["attention.window"] = None
            return
        every = whole[0] if whole else 0
        if whole != [i + 1 for i in range(len(sliding)) if every and (i + 1) % every == 0]:
            key = "layer_types" if "layer_types" in config else "max_window_layers"
            rule = "our modules have full attention in every n-th block, or in none"
            raise config.problem(key, rule, "layer_types with full_attention at every n-th place")
        facts |= {"attention.window": window, "attention.full_every": every}

    def write(self, facts: Facts, config: Config) -> None:
        window, every = facts["attention.window"], facts["attention.full_every"]
        config["sliding_window"] = window
        if self.switched:
            config["use_sliding_window"] = window is not None
        if self.by_block:
            config["layer_types"] = [
                FULL if window is None or (every and (i + 1) % every == 0) else SLIDING
                for i in range(facts["layers"])
            ]
        if self.layers_with is not None:
            config["max_window_layers"] = facts["layers"] if window is None else 0

    def _blocks(self, config: Fields, layers: int, window: int | None) -> Sequence[bool]:
        """Whether each block has a window."""
        bound = 0
        if self.layers_with is not None:
            bound = config.get("max_window_layers", COUNT, self.layers_with, self.layers_with)
        if self.period is not None:
            config.get("_sliding_window_pattern", SIZE, self.period, self.period)
            bound = config.get("sliding_window_pattern", SIZE, self.period, self.period)
        types = config.words("layer_types")
        if types is None:
            return [window is not None and self.pattern(i, bound) for i in range(layers)]
        if not set(types) <= {FULL, SLIDING}:
            raise config.problem("layer_types", f"our modules have {FULL} and {SLIDING}")
        if len(types) != layers:
            raise config.problem("layer_types", f"there must be one for each of {layers} blocks")
        if not self.by_block and len(set(types)) > 1:
            raise config.problem("layer_types", "blocks of this kind of model are all alike")
        if not self.by_block:
            return [window is not None] * layers
        return [it == SLIDING for it in types]
