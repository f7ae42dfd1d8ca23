"""What a version promises: public names that will be removed work for one more minor version, and warn.

CONTRIBUTING.md, "Versions and deprecation", has the rules.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto import __version__
from stretto.errors import StrettoError


class DeprecatedName(FutureWarning):
    """A public name that the next minor version does not have; shown to users, not only to developers."""


@dataclass(frozen=True, kw_only=True)
class Deprecated:
    """A public name that will be removed.

    Attributes:
        name: as users write it: a field (`metrics.tensorboard`), a name (`stretto.Mesh`), a command or an
            option with its command (`stretto plan --write`).
        instead: what to write in its place; of a name, command or option, the new one in the same form.
        since: the first minor version that warns, such as "0.2"; the next one has removed the name.
        kind: of a field, the type of its values.
        fields: of a field, returns the values of other fields, by name, that mean the same as its value.
    """

    name: str
    instead: str
    since: str
    kind: type = object
    fields: Callable[[Any], Mapping[str, Any]] | None = None

    @property
    def removed(self) -> str:
        """The minor version that does not have the name any more."""
        major, minor = self.since.split(".")
        return f"{major}.{int(minor) + 1}"

    def check(self, place: str = "", stacklevel: int = 2) -> None:
        """Warn that the name is used.

        Args:
            place: where, such as a file and its line.
            stacklevel: of the warning, as `warnings.warn` counts it: 2 is the caller.

        Raises:
            StrettoError: this version has removed the name.
        """
        prefix = f"{place}: " if place else ""
        if _release(__version__) >= _release(self.removed):
            removed = f"{prefix}{self.name} was removed in version {self.removed}"
            raise StrettoError(removed, hint=f"write {self.instead}")
        warnings.warn(
            f"{prefix}{self.name} is deprecated, and version {self.removed} will not have it: write "
            f"{self.instead}",
            DeprecatedName,
            stacklevel=stacklevel,
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


# Removed names stay, so that they are refused by name, until the version after.
DEPRECATED: tuple[Deprecated, ...] = ()


def replace_deprecated(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `stretto` with the new names of deprecated commands and options, each with its
    warning.
    """
    replaced = list(arguments)
    for each in DEPRECATED:
        program, *path = each.name.split(" ")
        if program != "stretto" or not path:
            continue
        old, new = path.pop(), each.instead.split(" ")[-1]
        end = replaced.index("--") if "--" in replaced else len(replaced)
        for index in range(len(path), end if old.startswith("-") else min(end, len(path) + 1)):
            name, equals, value = replaced[index].partition("=")
            if name == old and replaced[: len(path)] == path:
                each.check()
                replaced[index] = f"{new}{equals}{value}"
    return replaced
