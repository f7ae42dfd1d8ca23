"""The `model` and `lora` sections, derived from the shapes: what a config changes of a preset or a family."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, is_dataclass, make_dataclass, replace
from dataclasses import Field as DataclassField
from functools import cache
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, dataclass_transform, get_args

from stretto.errors import Problem, StrettoError, UnknownName
from stretto.job.attention import AttentionShape, LatentShape, RopeScaling
from stretto.job.experts import ExpertShape
from stretto.job.families import FAMILY_DEFAULTS, Family
from stretto.job.field import IN_A_FILE, Declared, Field, declared
from stretto.job.initial import Initial
from stretto.job.lora import LoraShape
from stretto.job.presets import PRESETS, find_shape, preset
from stretto.job.shape import ModelShape, check_built
from stretto.run.config.validation import read_section

C = TypeVar("C")
_RENAMED = {"sequence": "positions"}  # fields of a shape under another name in a config

# of parts that a model may lack: the rule that is broken by fields of one that it has not, and the fix; the
# first field of the part is the one that it cannot be without
_ABSENT: Mapping[type, tuple[str, str]] = {
    ExpertShape: ("the model has no experts", "model.moe.experts=8, or model.moe.{name}=null"),
    RopeScaling: ("nothing is scaled without a type", "model.rope.type=llama3"),
    LatentShape: ("there is no latent attention without it", "512, 64 and 128 are DeepSeek's"),
}


def part_of(item: Declared) -> type | None:
    """Return the dataclass that a field of a shape holds, perhaps beside None."""
    return next((kind for kind in item.kinds if isinstance(kind, type) and is_dataclass(kind)), None)


@cache
def _family_fields(shape: type) -> frozenset[str]:
    """Fields of a shape, or of a part of one, whose defaults differ between families."""
    if shape is LatentShape:
        return frozenset(declared(shape))
    if shape is ExpertShape:
        return frozenset(name for family in FAMILY_DEFAULTS.values() for name in family.experts)
    if shape is AttentionShape:
        shapes = [family.attention for family in FAMILY_DEFAULTS.values()]
        return frozenset(
            name for name in declared(shape) if len({getattr(attention, name) for attention in shapes}) > 1
        )
    return frozenset(name for name, item in declared(shape).items() if item.metadata)


def _null(shape: type, item: Declared) -> str:
    """Describe what null stands for in the config, of a field that does not say so itself."""
    if item.name in _family_fields(shape):
        return "the preset's, else the family's"
    if item.default is MISSING or item.default is None:
        return "the preset's"
    booleans = {True: "true", False: "false"}
    default = booleans[item.default] if isinstance(item.default, bool) else item.default
    return f"the preset's, else {f'`{default}`' if isinstance(default, str) else f'{default:g}'}"


@cache
def _part_section(part: type, doc: str) -> type:
    """Return the section that changes a part of a shape; the same one for all shapes with this part."""
    section = make_dataclass(
        f"{part.__name__}Changes",
        [(name, kind, default) for name, (kind, default) in _changes(part, False).items()],
        frozen=True,
        kw_only=True,
    )
    section.__doc__ = doc
    section.__module__ = __name__  # instances are pickled by this name
    assert section.__name__ not in globals(), "instances of the other section could not be pickled any more"
    globals()[section.__name__] = section
    return section


def _optional(shape: type, item: Declared) -> tuple[Any, Any]:
    """Return type and default of a field of a section that changes a shape: null leaves it as it is."""
    assert item.field is not None
    part = part_of(item)
    if part is not None:
        section = _part_section(part, item.field.doc)
        return section, field(default_factory=section)
    about, kinds = item.field, [kind for kind in item.kinds if kind is not NoneType]
    if isinstance(about.off, str):
        kinds = [Literal[about.off, *(word for kind in kinds for word in get_args(kind))]]
    elif about.off is not None:
        about = replace(about, gt=None, ge=about.off)
    null = about.null or _null(shape, item)
    about = replace(about, doc=f"{about.doc.removesuffix('.')}; null: {null}.")
    return Annotated[Union[*kinds, None], about], None


def _changes(shape: type, defaults: bool) -> dict[str, tuple[Any, Any]]:
    """Return type and default of every field of a section that changes a shape."""
    return {
        _RENAMED.get(name, name): (Annotated[item.type, item.field], item.default)
        if defaults and item.default is not MISSING
        else _optional(shape, item)
        for name, item in declared(shape).items()
        if item.field is not None
    }


@dataclass_transform(frozen_default=True, kw_only_default=True)
def changes_of(
    shape: type, *, defaults: bool = False, others: type | None = None
) -> Callable[[type[C]], type[C]]:
    """Decorate a section that changes the fields of a shape: it gets all of them, each null by default.

    Args:
        defaults: fields keep their defaults; only those without one are null.
        others: a dataclass whose fields the section has too, unchanged.
    """

    def decorate(cls: type[C]) -> type[C]:
        fields: dict[str, tuple[Any, Any]] = {}
        parts: dict[str, tuple[Any, Any]] = {}
        for name, change in _changes(shape, defaults).items():
            (parts if isinstance(change[1], DataclassField) else fields)[name] = change
        for name, item in declared(others).items() if others is not None else ():
            fields[name] = (Annotated[item.type, item.field], item.default)
        for name, (kind, default) in (fields | parts).items():
            cls.__annotations__[name] = kind
            setattr(cls, name, default)
        return dataclass(frozen=True, kw_only=True)(cls)

    return decorate


def laid_over(shape: type, section: Any, base: Any, defaults: Mapping[str, Any] | None = None) -> Any:
    """Return a part of a shape: the fields that a section sets, laid over those of `base`.

    Args:
        base: the part of the preset or the family, or None if it has none.
        defaults: values of fields that the section leaves out, if `base` is None.

    Raises:
        Problem: fields that do not fit each other, or of a part that the model does not have.
    """
    changes = dict[str, Any]()
    for name, item in declared(shape).items():
        if item.field is None:
            continue
        value, part = getattr(section, _RENAMED.get(name, name)), part_of(item)
        if part is not None:
            try:
                inner = laid_over(part, value, getattr(base, name, None))
            except StrettoError as error:
                raise error.within(name) from None
            if inner != getattr(base, name, None):
                changes[name] = inner
        elif value is not None:
            changes[name] = None if value == item.field.off and item.field.off is not None else value
    if base is not None and (shape not in _ABSENT or not _is_off(shape, changes)):
        return replace(base, **changes)
    if not changes or _is_off(shape, changes):
        return None
    rule, fix = _ABSENT[shape]
    required = [name for name, item in declared(shape).items() if item.default is MISSING]
    missing = [name for name in required if name not in changes]
    if missing and shape is LatentShape:
        raise Problem(missing[0], None, "latent attention needs it", fix)
    if missing:
        name, value = next(iter(changes.items()))
        raise Problem(name, value, rule, fix.format(name=name))
    return shape(**{**(defaults or {}), **changes})


def _is_off(shape: type, changes: Mapping[str, Any]) -> bool:
    """True if the changes say that there is no such part."""
    key = next(iter(declared(shape)))
    return changes.get(key, key) is None


def _check_preset(value: str) -> None:
    path = Path(value).expanduser()
    try:
        find_shape(path)
    except UnknownName as error:
        hint = f"there is no {path / 'config.json'}" if os.path.isdir(path) else error.hint
        raise StrettoError(f"is {value!r}, which is not a known model", hint=hint) from None
    except StrettoError as error:
        raise StrettoError(f"is {value!r}: {error.message}", hint=error.hint) from None


@changes_of(ModelShape, others=Initial)
class ModelConfig:
    """`preset`, or `family` with `layers`, `hidden` and `heads`; fields set in addition to a preset override
    it. Or a model of your own, `model: FILE.py:NAME`, which is short for `model: {build: FILE.py:NAME}`.
    """

    preset: Annotated[
        str | None,
        Field(
            "Name of a known model, such as `gpt2` or `llama3-8b`, or the path of a Hugging Face "
            "`config.json` (or its folder), whose sizes the resolved config then has.",
            check=_check_preset,
        ),
    ] = None
    build: Annotated[
        str | None,
        Field(
            "In place of all sizes: `FILE.py:NAME` of a function that returns the layers of your model, as "
            "an `nn.Sequential` or a list; see docs/do/own-model.md.",
            pattern=IN_A_FILE,
            examples=("mine.py:build",),
        ),
    ] = None
    arguments: Annotated[dict[str, Any], Field("Keyword arguments of `build`.")] = field(
        default_factory=dict[str, Any]
    )
    if TYPE_CHECKING:  # the others are derived
        family: Family | None = None
        vocab: int | None = None
        positions: int | None = None
        attention: Any = None
        rope: Any = None
        moe: Any = None

    def __post_init__(self) -> None:
        missing = [name for name in ("family", "layers", "hidden", "heads") if getattr(self, name) is None]
        if self.build is not None:
            for name, item in declared(ModelConfig).items():
                if name not in ("build", "arguments") and (value := getattr(self, name)) != item.default:
                    rule = f"model.build={self.build} returns the model, and no other field changes it"
                    raise Problem(name, value, rule, "leave it out, or give it to model.arguments")
            return
        if self.arguments:
            rule = "they are for a model from a file, and there is none"
            raise Problem("arguments", self.arguments, rule, "model.build=mine.py:build")
        if self.preset is None and missing:
            raise StrettoError(
                f"has no {', no '.join(missing)}",
                hint="give a preset, or family, layers, hidden and heads; or build: FILE.py:NAME",
            )
        experts, top_k = self.moe.experts, self.moe.top_k
        if experts is not None and top_k is not None and top_k > experts:
            raise Problem(
                "moe.top_k",
                top_k,
                f"it must be at most model.moe.experts={experts}",
                f"model.moe.top_k={experts}, or model.moe.experts={top_k}",
            )

    def initial(self) -> Initial:
        """Return how new weights are initialised."""
        return Initial(**{name: getattr(self, name) for name in declared(Initial)})

    def shape(self, vocab: int, sequence: int) -> ModelShape:
        """Return the sizes of the model.

        Args:
            vocab: entries of the tokenizer, unless the config sets its own.
            sequence: tokens of the data's samples, unless the config sets `positions`.

        Raises:
            StrettoError: sizes that do not fit each other.
        """
        preset = None if self.preset is None else find_shape(Path(self.preset).expanduser())
        items = {name: item for name, item in declared(ModelShape).items() if item.field is not None}
        set_here = {name: getattr(self, _RENAMED.get(name, name)) for name in items}
        sizes = {
            name: value for name, value in set_here.items() if value is not None and not part_of(items[name])
        }
        base: dict[str, Any] = {"sequence": sequence}
        if preset is not None:  # what follows from a changed size takes the family's default again
            base = {
                name: getattr(preset, name)
                for name, item in declared(ModelShape).items()
                if sizes.keys().isdisjoint(item.metadata.get("follows", ()))
            }
        family = FAMILY_DEFAULTS[preset.family if preset is not None else sizes["family"]]
        parts = {"attention": family.attention} if preset is None else base
        for name, item in items.items():
            kind = part_of(item)
            if kind is not None:
                try:
                    defaults = family.experts if name == "moe" else None
                    base[name] = laid_over(kind, set_here[name], parts.get(name), defaults)
                except StrettoError as error:
                    raise error.within(name) from None
        base |= {"vocab": vocab, **sizes}
        return ModelShape(**base)


@changes_of(LoraShape, defaults=True)
class LoraConfig:
    """Low-rank adapters of the linears of blocks (Hu et al. 2021); all other parameters are frozen."""

    if TYPE_CHECKING:
        rank: int | None = None
        alpha: float | None = None

    def __post_init__(self) -> None:
        self.shape()  # which checks the targets
        changed = any(getattr(self, name) != item.default for name, item in declared(LoraConfig).items())
        if self.rank is None and changed:
            raise StrettoError("has no rank, so that there are no adapters", hint="lora.rank=8")

    def shape(self) -> LoraShape | None:
        """Return the adapters; None without a rank."""
        if self.rank is None:
            return None
        values: dict[str, Any] = {name: getattr(self, name) for name in declared(LoraShape)}
        values["alpha"] = self.rank if self.alpha is None else self.alpha
        return LoraShape(**values)


def model_section(shape: ModelShape, initial: Initial | None = None) -> dict[str, Any]:
    """Return the section `model` of a config: a preset's name with the vocabulary, or all sizes.

    Args:
        initial: how new weights are initialised; the section has what differs from the default.

    Raises:
        StrettoError: training has no such model.
    """
    check_built(shape)
    section = next(
        ({"preset": name, "vocab": shape.vocab} for name in PRESETS if preset(name) == shape), None
    ) or _sizes(shape)
    if read_section(ModelConfig, section).shape(shape.vocab, shape.sequence) != shape:
        raise StrettoError(
            "training has no model of this shape", hint="plan a preset, or a model that a config describes"
        )
    initial = initial or Initial()
    return section | {
        name: value for name, value in asdict(initial).items() if value != getattr(Initial, name)
    }


def _sizes(shape: ModelShape) -> dict[str, Any]:
    items = {name: item for name, item in declared(ModelShape).items() if item.field is not None}
    family = {"attention": FAMILY_DEFAULTS[shape.family].attention}
    section = dict[str, Any]()
    for name, item in items.items():
        value = getattr(shape, name)
        if part_of(item) is None and (name != "rope_theta" or shape.rotary):
            section[_RENAMED.get(name, name)] = value
        elif part_of(item) is not None and value is not None and (part := _part(value, family.get(name))):
            section[name] = part
    return section


def _part(part: Any, base: Any) -> dict[str, Any]:
    """Return the fields of a part of a shape as its section has them.

    Args:
        base: fields that are equal to its fields are left out; if it is None, those that are None.
    """
    changes = dict[str, Any]()
    for name, item in declared(type(part)).items():
        value = getattr(part, name)
        if item.field is None or value == getattr(base, name, None):
            continue
        inner = part_of(item)
        if inner is None:
            changes[name] = item.field.off if value is None else value
        elif value is None:
            key = next(iter(declared(inner).values()))
            assert key.field is not None
            changes[name] = {key.name: key.field.off}
        else:
            changes[name] = {
                inner_item.name: getattr(value, inner_item.name)
                if getattr(value, inner_item.name) is not None
                else inner_item.field and inner_item.field.off
                for inner_item in declared(inner).values()
            }
    return changes
