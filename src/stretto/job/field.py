"""How a field is declared: once, in a frozen dataclass, as in

    layers: Annotated[int, Field("Transformer blocks.", gt=0)] = 12

Type, default, limits and description stand there alone. The schema of the YAML file, overrides, errors, the
reference page and the checks of shapes built in Python are derived from this declaration. A field without a
`Field` is not part of any config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from stretto.errors import Problem, nearest

T = TypeVar("T")
IN_A_FILE = r".+\.py:[^\W\d]\w*"  # pattern of a function or class of the user's, FILE.py:NAME


@dataclass(frozen=True, kw_only=True)
class Field:
    """Description and limits of a field.

    Attributes:
        doc: its meaning, for the reference page.
        gt, ge, lt, le: numeric limits: above, at least, below, at most.
        largest: a limit far above all sensible values, which the reference page leaves out.
        off: the value that a config writes for None, since null means the default.
        null: the meaning of null in a config that changes a preset; by default the preset's value, else the
            family's default or the declared one.
        fix: the hint of an error about a value outside the limits.
        examples: example values, for the reference page.
        pattern: a regular expression that a string must match.
        filled: a string or list must not be empty.
        check: raises StrettoError for a value of the right type that is still wrong; the message follows the
            field's name.
    """

    doc: str = field(kw_only=False)
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    largest: int | None = None
    off: Any = None
    null: str | None = None
    fix: str | None = None
    examples: tuple[str, ...] = ()
    pattern: str | None = None
    filled: bool = False
    check: Callable[[Any], object] | None = None

    def limits(self) -> list[str]:
        """Return the limits in words, such as "above 0"."""
        limits = {"above": self.gt, "at least": self.ge, "below": self.lt, "at most": self.le}
        return [f"{relation} {limit}" for relation, limit in limits.items() if limit is not None]

    def holds(self, value: float) -> bool:
        """True if a number is finite and within the limits."""
        return (
            -float("inf") < value < float("inf")
            and (self.gt is None or value > self.gt)
            and (self.ge is None or value >= self.ge)
            and (self.lt is None or value < self.lt)
            and (self.le is None or value <= self.le)
        )


class Declared(NamedTuple):
    """A field of a dataclass as it was declared.

    Attributes:
        type: the annotation without the `Field`.
        kinds: the members of a union, or the single type; None appears as `NoneType`.
        default: the default value, or `MISSING` if the field is required.
    """

    name: str
    type: Any
    kinds: tuple[Any, ...]
    field: Field | None
    default: Any
    metadata: Mapping[Any, Any]


@cache
def declared(cls: type) -> Mapping[str, Declared]:
    """Return all fields of a dataclass by name, in the order of their declaration."""
    hints = get_type_hints(cls, include_extras=True)
    result: dict[str, Declared] = {}
    for item in fields(cast(Any, cls)):
        kind, about = hints[item.name], None
        if get_origin(kind) is Annotated:
            kind, *extras = get_args(kind)
            about = next((extra for extra in extras if isinstance(extra, Field)), None)
        if about is None:  # a subclass with another default
            inherited = (declared(base).get(item.name) for base in cls.__mro__[1:] if is_dataclass(base))
            about = next((base.field for base in inherited if base is not None and base.field), None)
        kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        result[item.name] = Declared(
            name=item.name, type=kind, kinds=kinds, field=about, default=default, metadata=item.metadata
        )
    return result


def derived(*follows: str) -> Any:
    """Return the dataclass default of a field whose value derives from the family and from other fields.

    Args:
        follows: names of fields; if a config changes one of them in a preset, the field takes its default
            again.
    """
    return field(default=None, metadata={"follows": follows})


def check_fields(instance: Any, *names: str) -> None:
    """Check a dataclass that was built in Python against its declared limits and choices.

    Args:
        names: the fields to check; all if none is given.

    Raises:
        Problem: for the first field with a wrong value.
    """
    for name, item in declared(type(instance)).items():
        about, value = item.field, getattr(instance, name)
        if (names and name not in names) or about is None or (value is None and NoneType in item.kinds):
            continue
        for kind in item.kinds:
            if get_origin(kind) is Literal and str not in item.kinds:
                check_choice(name, value, get_args(kind))
        if not {int, float} & set(item.kinds):
            continue
        integer = "a whole number " if int in item.kinds else ""
        if (
            not isinstance(value, int if integer else int | float)
            or isinstance(value, bool)
            or not about.holds(value)
        ):
            lowest = about.gt + 1 if about.gt is not None else about.ge
            fix = f"set {name} to {lowest} or more" if integer and lowest is not None else None
            raise Problem(
                name, value, f"it must be {integer}{' and '.join(about.limits())}", about.fix or fix
            )
        if about.largest is not None and value > about.largest:
            raise Problem(name, value, f"it must be at most {about.largest}", "is it a typing error?")


def from_plain(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return a dataclass built from a JSON record, in which nested dataclasses are mappings and tuples are
    lists.

    Raises:
        TypeError: the record has a name that is not a field.
    """
    built = dict[str, Any](values)
    for name, value in values.items():
        kinds = declared(cls)[name].kinds if name in declared(cls) else ()
        part: Any = next((kind for kind in kinds if is_dataclass(kind)), None)
        if part is not None and isinstance(value, Mapping):
            built[name] = from_plain(part, cast("Mapping[str, Any]", value))
        elif isinstance(value, list) and any(get_origin(kind) is tuple for kind in kinds):
            built[name] = tuple(cast("list[Any]", value))
    return cls(**built)


def check_choice(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    """Raise Problem if a value is not one of the allowed words."""
    if value not in allowed:
        closest = nearest(str(value), allowed)
        hint = f"did you mean {closest!r}?" if closest else None
        raise Problem(name, value, f"it must be one of {', '.join(allowed)}", hint)
