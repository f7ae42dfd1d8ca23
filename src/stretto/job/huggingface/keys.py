"""Typed access to the keys of a `config.json`, with a record of the keys that were not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

from stretto.errors import Problem, StrettoError
from stretto.job.shape import LARGEST_LAYERS

LONGEST = 60  # characters of a value in a message


class KeyType(NamedTuple):
    """The type of a key's value: a description and a test."""

    rule: str
    holds: Callable[[object], bool]


def integer(low: int, high: int) -> KeyType:
    """Return the type of whole numbers within bounds; a size without one could cause a loop of 10^9 steps."""
    return KeyType(
        f"a whole number from {low} to {high}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high,
    )


def _is_number(value: object, above: float = -1e30) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return above < value < 1e30


SIZE: Final = integer(1, 10**8)
COUNT: Final = integer(0, 10**8)
LAYERS: Final = integer(1, LARGEST_LAYERS)
EXPERTS: Final = integer(1, 100_000)
NUMBER: Final = KeyType("a finite number", _is_number)
POSITIVE: Final = KeyType("a finite number above 0", lambda value: _is_number(value, above=0.0))
FLAG: Final = KeyType("true or false", lambda value: isinstance(value, bool))
WORD: Final = KeyType("a word", lambda value: isinstance(value, str))


REQUIRED: Final[Any] = object()  # the default of a required key


class ConfigKeys:
    """A `config.json`, or a section of it."""

    def __init__(self, values: Mapping[str, Any], section: str = "") -> None:
        self._values = values
        self._section = section
        self._used = set[str]()
        self._sections = dict[str, ConfigKeys]()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def name(self, key: str) -> str:
        """Return the key's full name for messages, prefixed by its section."""
        return f"{self._section}.{key}" if self._section else key

    def get(self, key: str, type: KeyType, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """Return the value of a key.

        Args:
            default: the value if the key is absent; `REQUIRED` makes that an error.
            null: the value if the key is null, which `transformers` takes as a value; `REQUIRED` makes that
                an error.

        Raises:
            StrettoError: the value has another type, or is missing.
        """
        self._used.add(key)
        value = self._values.get(key)
        if value is None:
            value = null if key in self._values else default
            if value is REQUIRED:
                raise StrettoError(
                    f"{self.name(key)} is missing in the model's config.json",
                    hint="a config.json of Hugging Face, as save_pretrained writes it, has it",
                )
            return value
        if not type.holds(value):
            raise self.problem(key, f"it must be {type.rule}")
        return value

    def raw(self, key: str) -> Any:
        """Return the unchecked value of a key, or None."""
        self._used.add(key)
        return self._values.get(key)

    def strings(self, key: str) -> list[str] | None:
        """Return a list of words, or None if the key is absent or null."""
        return self._list(key, WORD, "a list of words")

    def numbers(self, key: str) -> list[int] | None:
        """Return a list of whole numbers, or None if the key is absent or null."""
        return self._list(key, COUNT, "a list of whole numbers")

    def section(self, key: str) -> ConfigKeys | None:
        """Return a nested mapping, or None if it is absent or empty."""
        self._used.add(key)
        value = self._values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise self.problem(key, "it must be a mapping")
        if key not in self._sections:
            self._sections[key] = ConfigKeys(cast("Mapping[str, Any]", value), self.name(key))
        return self._sections[key]

    def joined(self, other: ConfigKeys | None) -> ConfigKeys:
        """Return this section with the keys of another added; the other's take precedence."""
        if other is None or not self._values:
            return other or self
        both = ConfigKeys({**self._values, **other._values}, self._section)
        other._sections[""] = both  # which reports the unused keys of both
        self._used |= self._values.keys()
        other._used |= other._values.keys()
        return both

    def with_default(self, key: str, value: Any) -> ConfigKeys:
        """Return this section with a value for a key if it lacks the key."""
        return ConfigKeys({key: value, **self._values}, self._section) if value is not None else self

    def problem(self, key: str, rule: str, fix: str | None = None) -> Problem:
        """Return an error about a key's value."""
        return Problem(self.name(key), shown(self._values.get(key)), rule, fix)

    def use(self, keys: Iterator[str] | frozenset[str]) -> None:
        """Count keys as used."""
        self._used |= set(keys)

    def use_all(self) -> None:
        """Count every key as used."""
        self._used |= self._values.keys()

    def unused(self) -> list[str]:
        """Return the full names of keys with a value that were not read, including those of sections."""
        unread = self._values.keys() - self._used
        names = [self.name(key) for key in self._values if key in unread and self._values[key] is not None]
        return names + [name for section in self._sections.values() for name in section.unused()]

    def _list(self, key: str, type: KeyType, rule: str) -> list[Any] | None:
        self._used.add(key)
        value = self._values.get(key)
        if value is None:
            return None
        items = cast("list[Any]", value) if isinstance(value, list | tuple) else [None]
        if not all(type.holds(item) for item in items):
            raise self.problem(key, f"it must be {rule}")
        return list(items)


def shown(value: object) -> str:
    """Return a value as messages show it, with large values abbreviated."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, list | tuple | Mapping):
        return f"a {'mapping' if isinstance(value, Mapping) else 'list'} of {len(cast('list[Any]', value))}"
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
