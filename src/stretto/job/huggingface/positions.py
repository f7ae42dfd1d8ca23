"""Rotary positions and windows: `rope_parameters`, `layer_types` and their older names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.errors import Problem
from stretto.job.attention import ROPE_TYPES, RopeScaling
from stretto.job.huggingface.fields import ShapeFields
from stretto.job.huggingface.keys import (
    COUNT,
    FLAG,
    NUMBER,
    POSITIVE,
    SIZE,
    WORD,
    ConfigKeys,
)
from stretto.job.huggingface.rules import Key, KeyValues

FULL, SLIDING = "full_attention", "sliding_attention"


_FACTOR = Key("factor", "factor", NUMBER)
_ORIGINAL = Key("original_max_position_embeddings", "original_positions", SIZE)
_SETTINGS: Mapping[str, tuple[Key, ...]] = {
    "default": (),
    "linear": (_FACTOR,),
    "dynamic": (_FACTOR,),
    "llama3": (
        _FACTOR,
        _ORIGINAL,
        Key("low_freq_factor", "low_freq_factor", NUMBER),
        Key("high_freq_factor", "high_freq_factor", NUMBER),
    ),
    "yarn": (
        _FACTOR,
        _ORIGINAL,
        Key("beta_fast", "beta_fast", NUMBER, default=32.0),
        Key("beta_slow", "beta_slow", NUMBER, default=1.0),
        Key("truncate", "truncate", FLAG, default=True),
        Key("attention_factor", "attention_factor", NUMBER, default=None),
        Key("mscale", "mscale", NUMBER, default=None),
        Key("mscale_all_dim", "mscale_all_dim", NUMBER, default=None),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Base and scaling of the rotary frequencies: `rope_parameters` of transformers 5, and `rope_theta` and
    `rope_scaling` of older files. Both forms are written, so that older versions read the same.

    Attributes:
        theta: the default base.
        local: the default base in blocks with a window (`rope_local_base_freq`), or None if all blocks have
            one base.
        scaling: the default `rope_parameters`.
        partial: the default fraction of a head's features that are rotated (`partial_rotary_factor`), for
            kinds that may rotate fewer than all; such models can only be planned.
    """

    theta: float = 10000.0
    local: float | None = None
    scaling: Mapping[str, Any] | None = None
    partial: float | None = None

    def read(self, config: ConfigKeys, fields: ShapeFields) -> None:
        scaled, sliding = self._sections(config)
        theta = config.get("rope_theta", POSITIVE, self.theta, self.theta)
        fields["rope_theta"] = float(scaled.get("rope_theta", POSITIVE, theta, theta))
        if self.local is not None:
            local = config.get("rope_local_base_freq", POSITIVE, self.local, self.local)
            fields["attention.local_theta"] = float(sliding.get("rope_theta", POSITIVE, local, local))
            if _type(sliding) != "default":
                key = "rope_type" if "rope_type" in sliding else "type"
                raise sliding.problem(key, "in blocks with a window our modules compute only default")
        fields |= _scaling(config, scaled, fields["sequence"])
        share = config.get("partial_rotary_factor", NUMBER, self.partial or 1.0, self.partial or 1.0)
        share = scaled.get("partial_rotary_factor", NUMBER, share, share)
        if share != 1.0:
            if self.partial is None:
                raise config.problem("partial_rotary_factor", "our modules rotate all features of a head")
            fields["unmodelled_features"] = (
                *fields.get("unmodelled_features", ()),
                f"rotary positions on {share} of a head",
            )

    def write(self, fields: ShapeFields, config: KeyValues) -> None:
        kind = fields.get("rope.type", "default")
        scaling = {"rope_type": kind}
        for setting in _SETTINGS[kind]:
            if (value := fields[f"rope.{setting.field}"]) is not None:
                scaling[setting.key] = value
        parameters = scaling | {"rope_theta": fields["rope_theta"]}
        config["rope_theta"] = fields["rope_theta"]
        config["rope_scaling"] = None if kind == "default" else scaling
        config["rope_parameters"] = parameters
        if self.local is not None:
            local = fields["attention.local_theta"] or fields["rope_theta"]
            config["rope_local_base_freq"] = local
            config["rope_parameters"] = {
                FULL: parameters,
                SLIDING: {"rope_type": "default", "rope_theta": local},
            }

    def _sections(self, config: ConfigKeys) -> tuple[ConfigKeys, ConfigKeys]:
        """Return the parameters of blocks with full attention, and of those with a window."""
        parameters, scaling = config.section("rope_parameters"), config.section("rope_scaling")
        if parameters is None and scaling is None and self.scaling is not None:
            return ConfigKeys(self.scaling), ConfigKeys({})
        parameters = parameters or ConfigKeys({}, "rope_parameters")
        nested = FULL in parameters or SLIDING in parameters
        if nested and self.local is None:
            raise config.problem("rope_parameters", "this kind of model has one for all blocks")
        full = (parameters.section(FULL) or ConfigKeys({})) if nested else parameters
        sliding = parameters.section(SLIDING) if nested else None
        return full.joined(scaling), sliding or ConfigKeys({})


def _type(section: ConfigKeys) -> str:
    older = section.get("type", WORD, "default", "default")
    return section.get("rope_type", WORD, older, older)


def _scaling(config: ConfigKeys, section: ConfigKeys, positions: int) -> ShapeFields:
    """Return the fields of a section's scaling; `positions` is the model's context length."""
    kind = _type(section)
    if kind not in _SETTINGS:
        allowed = ", ".join(("default", *ROPE_TYPES))
        key = "rope_type" if "rope_type" in section else "type"
        raise section.problem(key, f"our modules compute {allowed}")
    fields: ShapeFields = {}
    for setting in _SETTINGS[kind]:
        default = setting.default
        if setting is _ORIGINAL:
            default = config.get(setting.key, SIZE, positions, positions)  # Phi-3 has it at the top level
        elif setting is _FACTOR and kind == "yarn":  # transformers derives it for DeepSeek
            original = section.get(_ORIGINAL.key, SIZE, positions, positions)
            default = positions / original
        value = section.get(setting.key, setting.type, default, default)
        fields[f"rope.{setting.field}"] = (
            float(value) if setting.type is NUMBER and value is not None else value
        )
    if kind == "dynamic":
        fields["rope.original_positions"] = positions
    if kind == "default":
        return fields
    try:
        values: ShapeFields = {name.removeprefix("rope."): value for name, value in fields.items()}
        values["type"] = kind
        RopeScaling(**values)
    except Problem as problem:
        names = {setting.field: setting.key for setting in _SETTINGS[kind]}
        key = section.name(names.get(problem.field, problem.field))
        raise Problem(key, problem.value, problem.rule, problem.fix) from None
    return {"rope.type": kind, **fields}


Sliding = Callable[[int, int], bool]  # (index of a block, max_window_layers) -> True if it has a window


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Which blocks attend only to a window of positions: `sliding_window` and `layer_types`.

    Attributes:
        default: the default `sliding_window`.
        switched: the window applies only if `use_sliding_window` is true.
        by_block: `layer_types` lists the blocks with a window; if it is absent, `pattern` decides.
        period: the default `sliding_window_pattern`, the distance between blocks with full attention, or
            None for kinds without this key.
        layers_with: the default `max_window_layers`, or None for kinds without this key.
    """

    default: int | None = None
    switched: bool = False
    by_block: bool = False
    pattern: Sliding = lambda index, bound: True
    period: int | None = None
    layers_with: int | None = None

    def read(self, config: ConfigKeys, fields: ShapeFields) -> None:
        window = config.get("sliding_window", COUNT, self.default, None) or None
        if self.switched and not config.get("use_sliding_window", FLAG, False, False):
            window = None
        sliding = self._blocks(config, fields["layers"], window)
        if window is None and any(sliding):
            raise config.problem("layer_types", "sliding_attention needs a sliding_window")
        full = [i + 1 for i, windowed in enumerate(sliding) if not windowed]
        if window is None or len(full) == fields["layers"]:
            fields["attention.window"] = None
            return
        every = full[0] if full else 0
        if full != [i + 1 for i in range(len(sliding)) if every and (i + 1) % every == 0]:
            key = "layer_types" if "layer_types" in config else "max_window_layers"
            rule = "our modules have full attention in every n-th block, or in none"
            raise config.problem(key, rule, "layer_types with full_attention for every n-th block")
        fields |= {"attention.window": window, "attention.full_every": every}

    def write(self, fields: ShapeFields, config: KeyValues) -> None:
        window, every = fields["attention.window"], fields["attention.full_every"]
        config["sliding_window"] = window
        if self.switched:
            config["use_sliding_window"] = window is not None
        if self.by_block:
            config["layer_types"] = [
                FULL if window is None or (every and (i + 1) % every == 0) else SLIDING
                for i in range(fields["layers"])
            ]
        if self.layers_with is not None:
            config["max_window_layers"] = fields["layers"] if window is None else 0

    def _blocks(self, config: ConfigKeys, layers: int, window: int | None) -> Sequence[bool]:
        """Return for each block whether it has a window."""
        bound = 0
        if self.layers_with is not None:
            bound = config.get("max_window_layers", COUNT, self.layers_with, self.layers_with)
        if self.period is not None:
            config.get("_sliding_window_pattern", SIZE, self.period, self.period)
            bound = config.get("sliding_window_pattern", SIZE, self.period, self.period)
        types = config.strings("layer_types")
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
