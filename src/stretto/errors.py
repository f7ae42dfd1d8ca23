"""What a user got wrong, said so that they can mend it."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


class StrettoError(ValueError):
    """Bad input: what is wrong in one line, and the nearest fix as a hint.

    Commands print it as `error: ...` with the hint below and leave with exit code 2.

    Attributes:
        others: further problems of the same input, which are printed after it.
    """

    def __init__(self, message: str, *, hint: str | None = None, others: Sequence[StrettoError] = ()) -> None:
        self.message = _short(message)
        self.hint = None if hint is None else _short(hint)
        self.others = tuple(others)
        super().__init__(self.message)

    def within(self, section: str) -> Problem:
        """The same as a problem of a section of the config."""
        return Problem(section, None, self.message, self.hint)

    def __str__(self) -> str:
        text = f"{self.message}\nhint: {self.hint}" if self.hint else self.message
        left = len(self.others) - MOST_OTHERS
        more = [f"{left} more problem{'s' * (left > 1)} after these"] if left > 0 else []
        return "\n".join([text, *map(str, self.others[:MOST_OTHERS]), *more])

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.others)


LONGEST = 2000  # characters of a message, and of a hint
MOST_OTHERS = 5  # problems of one input that are printed after the first


def _short(text: str) -> str:
    """The text with its middle left out where it is too long to be read, as with a value of megabytes."""
    if len(text) <= LONGEST:
        return text
    width = LONGEST // 2 - 25  # of each end, so that a message that is made anew is not cut again
    return f"{text[:width]} [... {len(text) - 2 * width} characters ...] {text[-width:]}"


class Problem(StrettoError):
    """A broken rule: the field, its value, what must hold, and the nearest fix.

    Attributes:
        field: as the config names it, or as the part of a job that is being built does.
        value: None where the rule tells it.
    """

    def __init__(self, field: str, value: object, rule: str, fix: str | None = None) -> None:
        super().__init__(f"{field}{'' if value is None else f' is {value}'}: {rule}", hint=fix)
        self.field, self.value = field, value
        self.rule, self.fix = rule, fix

    def within(self, section: str) -> Problem:
        """The same, of a field of a section of the config."""
        return Problem(f"{section}.{self.field}", self.value, self.rule, self.fix)

    def __reduce__(self) -> tuple[object, ...]:
        return Problem, (self.field, self.value, self.rule, self.fix)


class UnknownName(StrettoError):
    """A name that stands in no table."""


class TorchMissing(StrettoError, ImportError):
    """PyTorch is not installed, and `feature` computes with it."""

    def __init__(self, feature: str) -> None:
        super().__init__(f"{feature} needs PyTorch, which is not installed", hint="pip install torch")
        self.feature = feature

    def __reduce__(self) -> tuple[object, ...]:
        return TorchMissing, (self.feature,)

    @staticmethod
    def is_cause(error: ModuleNotFoundError) -> bool:
        """Whether an import failed for want of PyTorch."""
        return (error.name or "").partition(".")[0] == "torch"


def _rebuild(
    kind: type[StrettoError], message: str, hint: str | None, others: Sequence[StrettoError]
) -> StrettoError:
    error = kind(message, hint=hint)
    error.others = tuple(others)
    return error


def joined(problems: Sequence[StrettoError]) -> StrettoError:
    """The problems of one input as one error: the first, with the others after it, each of them once."""
    first, *others = {problem.message: problem for problem in problems}.values()
    return StrettoError(first.message, hint=first.hint, others=others)


def nearest(name: str, allowed: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The allowed name that looks most like `name`, if any comes as close as `cutoff`, which is 1 for the
    same name.
    """
    closest = difflib.get_close_matches(name, list(allowed), n=1, cutoff=cutoff)
    return closest[0] if closest else None


def nearest_file(name: str, files: Iterable[str]) -> str | None:
    """As `nearest`, of files in a folder, some of which are always a little alike; else the one whose name
    without its kind comes close.
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


def load_module(path: Path) -> ModuleType:
    """Run the user's Python file as a module, with its folder in the path, as if Python ran it as a script;
    a file that was loaded before is not run again.
    """
    loaded = sys.modules.get(path.stem)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    sys.path.insert(0, str(path.resolve().parent))
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
