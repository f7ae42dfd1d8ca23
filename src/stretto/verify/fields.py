"""Set fields of a job that its proof would not see: no other value changes a result.

A layout that forgot a sliding window is equal to one process if the window is as long as a sample. So each
task takes other values where those of the job hide a field, and a proof prints which fields still change
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, get_args, get_origin

from stretto.errors import StrettoError
from stretto.job.field import Declared, declared

if TYPE_CHECKING:
    from stretto.verify.compare import Snapshot

J = TypeVar("J")


class Section(NamedTuple, Generic[J]):
    """A part of a job: its name in the config, the dataclass, and the job with another one in its place."""

    name: str
    part: Any
    put: Callable[[Any], J]


def set_fields(
    sections: Iterable[Section[J]], evident: Iterable[str], is_legal: Callable[[J], bool]
) -> Iterator[tuple[str, Any, J | None]]:
    """Yield name and value of each field that is not set to its default, and a legal job in which it has
    another value, or None if there is no such job.

    Args:
        evident: names of fields whose effect is sure, such as sizes of tensors.
    """
    for section, part, put in sections:
        if part is None:
            continue
        for name, item in declared(type(part)).items():
            value = getattr(part, name)
            if name in evident or value == item.default or item.field is None:
                continue
            if is_dataclass(value):  # a section of its own
                continue
            legal = None
            for alternative in _alternatives(value, item):
                try:
                    other = replace(part, **{name: alternative})
                    if other != part and is_legal(changed := put(other)):  # null may stand for the value
                        legal = changed
                        break
                except (StrettoError, ValueError, TypeError):
                    continue
            if legal is not None or "follows" not in item.metadata:  # else it follows from other fields
                yield f"{section}.{name}", value, legal


def _alternatives(value: Any, item: Declared) -> Iterator[Any]:
    """Yield other values of a field: its default, with which a layout computes that has forgotten the field,
    then a value close to it, then the other choices.
    """
    if item.default is not MISSING:
        yield item.default
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
    elif isinstance(value, float):
        yield value * (1.25 if value >= 1.0 else 0.75) if value else 0.25
    elif isinstance(value, tuple) and value and all(isinstance(element, float) for element in value):
        yield tuple(element * 0.75 for element in value)
    for kind in item.kinds:
        if get_origin(kind) is Literal:
            yield from get_args(kind)


def without_effect(
    job: J,
    fields: Iterable[tuple[str, Any, J | None]],
    run: Callable[[J], Sequence[Snapshot]],
    clip: float | None,
) -> list[str]:
    """Return the fields whose change changes nothing in one process, those without another legal value, and
    clipping if no norm reaches its bound. Collective: each rank tries some of them.

    Args:
        fields: as `set_fields` yields them.
        run: a few steps of a job in one process, in float64.
        clip: the job's largest norm.
    """
    from stretto.engine.parallel.control import gather_json, this_rank, world_size

    local = list(fields)[this_rank() :: world_size()]
    expected = run(job) if local or this_rank() == 0 else []
    silent = [
        f"{name}={_word(value)}" + (" (no other value is legal here)" if changed is None else "")
        for name, value, changed in local
        if changed is None or not _differ(run(changed), expected)
    ]
    if this_rank() == 0 and clip is not None and all(snapshot.norm < clip for snapshot in expected):
        silent.append(f"optim.clip={clip:g}")
    gathered: list[list[str]] = gather_json(silent)
    return sorted(name for names in gathered for name in names)


def _differ(steps: Sequence[Snapshot], expected: Sequence[Snapshot]) -> bool:
    from stretto.verify.compare import TOLERANCE

    for actual, reference in zip(steps, expected, strict=True):
        for quantity in ("weights", "gradients"):
            others, tensors = getattr(actual, quantity), getattr(reference, quantity)
            if {n: t.shape for n, t in others.items()} != {n: t.shape for n, t in tensors.items()}:
                return True
            for name, scale in reference.scales(quantity).items():
                off = others[name] - tensors[name]
                if off.numel() and not float(off.abs().max()) <= TOLERANCE * scale:
                    return True
        if not abs(actual.loss / reference.loss - 1.0) <= TOLERANCE:
            return True
    return False


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_word, value))}]"  # pyright: ignore[reportUnknownArgumentType]
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
