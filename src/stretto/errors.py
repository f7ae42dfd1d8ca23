"""Errors of users' input: what is wrong, and how to mend it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path


class StrettoError(ValueError):
    """Bad input: what is wrong in one line, and the nearest fix as a hint.

    Commands print it as `error: ...` with the hint below and exit with code 2.

    Attributes:
        others: further problems of the same input, printed after it.
    """

    def __init__(self, message: str, *, hint: str | None = None, others: Sequence[StrettoError] = ()) -> None:
        self.message = shortened(message)
        self.hint = None if hint is None else shortened(hint)
        self.others = tuple(others)
        super().__init__(self.message)

    def within(self, section: str) -> Problem:
        """Return this error as a problem of a section of the config."""
        return Problem(section, None, self.message, self.hint)

    def __str__(self) -> str:
        text = f"{self.message}\nhint: {self.hint}" if self.hint else self.message
        left = len(self.others) - MOST_OTHERS
        more = [f"{counted(left, 'more problem')} after these"] if left > 0 else []
        return "\n".join([text, *map(str, self.others[:MOST_OTHERS]), *more])

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.others)


LONGEST = 2000  # characters of a message, and of a hint
MOST_OTHERS = 5  # problems of one input that are printed after the first


def shortened(text: str) -> str:
    """Return the text without its middle if it is too long to read, such as a value of megabytes."""
    if len(text) <= LONGEST:
        return text
    width = LONGEST // 2 - 25  # of each end, so that a shortened message is not shortened again
    return f"{text[:width]} [... {len(text) - 2 * width} characters ...] {text[-width:]}"


class Problem(StrettoError):
    """A broken rule: the field, its value, what must hold, and the nearest fix.

    Attributes:
        field: name in the config, or in the part of the job that is being built.
        value: the value, or None if the rule states it.
    """

    def __init__(self, field: str, value: object, rule: str, fix: str | None = None) -> None:
        super().__init__(f"{field}{'' if value is None else f' is {value}'}: {rule}", hint=fix)
        self.field, self.value = field, value
        self.rule, self.fix = rule, fix

    def within(self, section: str) -> Problem:
        """Return this problem with the field's name inside a section of the config."""
        return Problem(f"{section}.{self.field}", self.value, self.rule, self.fix)

    def __reduce__(self) -> tuple[object, ...]:
        return Problem, (self.field, self.value, self.rule, self.fix)


class UnknownName(StrettoError):
    """A name that no table has."""


class PackageMissing(StrettoError, ImportError):
    """A package of the extra `train` is not installed, and `feature` computes with it."""

    PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "fsspec", "jinja2")  # as in pyproject.toml

    def __init__(self, feature: str, package: str) -> None:
        hint = "pip install 'stretto[train]', or 'stretto[recommender]' for recommenders"
        super().__init__(f"{feature} needs {package}, which is not installed", hint=hint)
        self.feature, self.package = feature, package

    def __reduce__(self) -> tuple[object, ...]:
        return PackageMissing, (self.feature, self.package)

    @staticmethod
    def of(error: BaseException, feature: str) -> PackageMissing | None:
        """Return the error of `feature` if an import failed because such a package is missing."""
        name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        return PackageMissing(feature, name) if name in PackageMissing.PACKAGES else None


def _rebuild(
    kind: type[StrettoError], message: str, hint: str | None, others: Sequence[StrettoError]
) -> StrettoError:
    error = kind(message, hint=hint)
    error.others = tuple(others)
    return error


def joined(problems: Sequence[StrettoError]) -> StrettoError:
    """Return the problems of one input as one error: the first, followed by the others, each once."""
    first, *others = {problem.message: problem for problem in problems}.values()
    return StrettoError(first.message, hint=first.hint, others=others)


def counted(number: int, noun: str) -> str:
    """Return "1 rank" or "2 ranks", "2 microbatches"."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def nearest(name: str, allowed: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the allowed name most similar to `name`, or None if none reaches `cutoff` (1: equal)."""
    closest = difflib.get_close_matches(name, list(allowed), n=1, cutoff=cutoff)
    return closest[0] if closest else None


def nearest_file(name: str, files: Iterable[str]) -> str | None:
    """Return the most similar file name of a folder, compared without suffixes if no full name is close.

    Stricter than `nearest`, since files of one folder are often a little alike.
    """
    names = sorted(files, reverse=True)
    stems = {Path(file).stem: file for file in names}
    stem = nearest(Path(name).stem, stems, cutoff=0.7)
    return nearest(name, names, cutoff=0.7) or (stem and stems[stem])


def read_text(path: Path) -> str:
    """Read a text file that the user named.

    Raises:
        StrettoError: the file does not exist, cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise StrettoError(f"cannot read {path}: {error.strerror}", hint="check the file's name") from None
    except UnicodeDecodeError:
        raise StrettoError(f"cannot read {path}: it is not UTF-8 text", hint="save it as UTF-8") from None
