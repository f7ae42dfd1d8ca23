"""What a version promises: files of earlier versions are read or refused by name, and public names that will
be removed work for one more minor version, and warn.

CONTRIBUTING.md, "Versions and deprecation", has the rules.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.errors import StrettoError

__version__ = "0.1.0"


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """A format of files that carry their version.

    Attributes:
        name: as the files have it, if they name their format.
        kind: what such a file is, in messages.
        version: the one that this release writes, and the newest that it reads.
        renew: what to do with a file that is not read.
        last_readers: versions that are not read any more, and the last minor release that reads each.
    """

    name: str
    kind: str
    version: int = 1
    renew: str = "write it again"
    last_readers: Mapping[int, str] = field(default_factory=dict[int, str])

    def check(self, version: object, place: str, writer: str = "") -> int:
        """Return a file's version if this release reads it.

        Args:
            version: as it was read, of any type.
            place: the file, and the line if it is known.
            writer: the release that wrote the file, if it is known.

        Raises:
            StrettoError: it is no version, newer than this release, or not read any more.
        """
        if type(version) is not int or version < 1:
            raise StrettoError(
                f"{place}: version of the {self.kind} is {str(version)[:80]!r}, must be a whole number "
                f"from 1 to {self.version}",
                hint=self.renew,
            )
        if version > self.version:
            raise StrettoError(
                f"{place}: the {self.kind} has version {version}, written by a newer Stretto"
                f"{writer and f' ({writer})'}; {__version__} reads up to version {self.version}",
                hint="pip install --upgrade stretto",
            )
        if last := self.last_readers.get(version):
            raise StrettoError(
                f"{place}: the {self.kind} has version {version}, which Stretto {last} was the last to read"
                f"{writer and f', written by {writer}'}",
                hint=f"{self.renew}, or read it with: pip install 'stretto=={last}.*'",
            )
        return version


CONFIG = FileFormat(name="stretto.config", kind="config", renew="version: 1, or leave the line out")
PROGRAM = FileFormat(name="stretto.program", kind="program", version=3)
TRACE = FileFormat(name="stretto.trace", kind="trace")
CHECKPOINT = FileFormat(name="stretto-checkpoint", kind="checkpoint", renew="train again")
# 2 has a mask of the tokens that are trained on, 3 splits by the names of files
TOKEN_FOLDER = FileFormat(
    name="stretto-tokens", kind="token folder", version=3, renew="build the folder again"
)
CLICKS = FileFormat(name="stretto-clicks", kind="click folder", renew="make the folder again")
CLICK_TRANSFORM = FileFormat(
    name="stretto-click-transform", kind="click transform", renew="make the folder again"
)
PROFILE = FileFormat(name="stretto.profile", kind="cluster", renew="stretto calibrate writes it again")
LAYERS = FileFormat(name="stretto.layers", kind="profile of layers")
PLACEMENT = FileFormat(name="stretto.placement", kind="placement", renew="stretto plan writes it again")
METRICS = FileFormat(name="stretto.metrics", kind="record", renew="train again")


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
DEPRECATED: tuple[Deprecated, ...] = (
    Deprecated(
        name="metrics.tensorboard",
        instead="metrics.to=[tensorboard]",
        since="0.1",
        kind=bool,
        fields=lambda value: {"metrics.to": ["tensorboard"] if value else []},
    ),
)


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
