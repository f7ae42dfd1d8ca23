"""Rows that cannot be read: the build stops at the first, or leaves them out, counted by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stretto.errors import StrettoError
from stretto.run.config.data import OnError

MOST_SKIPPED = 0.1
"""Share of a file's rows that may be left out: where it is more, the rows are not what the config says."""
_SOON = 1000  # rows after which the share is judged before the file's end
_EXAMPLES = 5


class RowError(StrettoError):
    """A row that cannot be read.

    Attributes:
        kind: the kind of error under which the row is counted.
    """

    def __init__(self, kind: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.kind, self.message, self.hint)


def _rebuild(kind: str, message: str, hint: str | None) -> RowError:
    return RowError(kind, message, hint=hint)


@dataclass(kw_only=True)
class RowErrors:
    """The rows of a source that could not be read.

    Attributes:
        rows: number of rows read, bad ones included.
        counts: number of rows left out, by kind.
        examples: messages of the first rows left out.
    """

    on_error: OnError = "stop"
    rows: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])
    examples: list[str] = field(default_factory=list[str])
    _rows_before: int = 0  # this file
    _skipped_before: int = 0

    def begin_file(self) -> None:
        """Start counting the rows of the next file."""
        self._rows_before, self._skipped_before = self.rows, self.counts.total()

    def skip(self, error: RowError) -> None:
        """Leave a row out.

        Raises:
            RowError: the build is to stop at bad rows.
            StrettoError: too many rows of the file are bad.
        """
        if self.on_error == "stop":
            raise error
        self.counts[error.kind] += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(error.message)
        if self.rows - self._rows_before >= _SOON:
            self.end_file(error.message)

    def end_file(self, example: str | None = None) -> None:
        """Check the share of bad rows in the file.

        Raises:
            StrettoError: it is too large.
        """
        rows, skipped = self.rows - self._rows_before, self.counts.total() - self._skipped_before
        if skipped > MOST_SKIPPED * rows:
            raise StrettoError(
                f"{skipped:,} of {rows:,} rows of a file cannot be read ({_list(self.counts)}), more than"
                f" {MOST_SKIPPED:.0%}; for example {example or self.examples[-1]}",
                hint="look at the file: is it of the format, and are its texts in the field, that you named?",
            )

    def as_dict(self) -> dict[str, Any] | None:
        """Return the counts for a token folder's metadata, or None if no row was left out."""
        if not self.counts:
            return None
        return {"rows": self.rows, "skipped": dict(self.counts), "examples": self.examples}


def describe_skipped(errors: Mapping[str, Any]) -> str:
    """Return the counts of `RowErrors.as_dict` as text."""
    total, first = sum(errors["skipped"].values()), "; ".join(errors["examples"])
    return f"{total:,} of {errors['rows']:,} rows left out ({_list(errors['skipped'])}); the first: {first}"


def _list(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items(), key=lambda item: -item[1]))
