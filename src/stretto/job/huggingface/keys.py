"""The keys of a `config.json`, read by type, with an account of those that nothing has read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

from stretto.errors import Problem, StrettoError
from stretto.job.shape import LARGEST_LAYERS

LONGEST = 60  # characters of a value in a message


class KeyType(NamedTuple):
    """The type of a key's value: in words, and as a test."""

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


REQUIRED: Final[Any] = object()  # in place of the default of a key that must be given


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
        """The key as messages name it, with the section that it is in."""
        return f"{self._section}.{key}" if self._section else key

    def get(self, key: str, type: KeyType, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """Return the value of a key.

        Args:
            default: the value of an absent key; `REQUIRED`: that is an error.
            null: the value of a key that is null, which `transformers` takes as a value; likewise.

        Raises:
            StrettoError: a value of another type, or none.
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
        """The value of a key as it stands, or None."""
        self._used.add(key)
        return self._values.get(key)

    def strings(self, key: str) -> list[str] | None:
        """A list of words, or None where there is none."""
        return self._list(key, WORD, "a list of words")

    def numbers(self, key: str) -> list[int] | None:
        """A list of whole numbers, or None where there is none."""
        return self._list(key, COUNT, "a list of whole numbers")

    def section(self, key: str) -> ConfigKeys | None:
        """A mapping within; None where it is absent or empty."""
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
        """This section with the keys of another, which win."""
        if other is None or not self._values:
            return other or self
        both = ConfigKeys({**self._values, **other._values}, self._section)
        other._sections[""] = both  # it reports what is unused of either
        self._used |= self._values.keys()
        other._used |= other._values.keys()
        return both

    def with_default(self, key: str, value: Any) -> ConfigKeys:
        """This section with a value for a key that it may lack."""
        return ConfigKeys({key: value, **self._values}, self._section) if value is not None else self

    def problem(self, key: str, rule: str, fix: str | None = None) -> Problem:
        """The error of a key's value."""
        return Problem(self.name(key), shown(self._values.get(key)), rule, fix)

    def use(self, keys: Iterator[str] | frozenset[str]) -> None:
        """Count keys as used."""
        self._used |= set(keys)

    def use_all(self) -> None:
        """Count every key as used."""
        self._used |= self._values.keys()

    def unused(self) -> list[str]:
        """Names of the keys with a value that nothing has read, those of sections too."""
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
    """A value as messages show it: hostile ones are cut."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, list | tuple | Mapping):
        return f"a {'mapping' if isinstance(value, Mapping) else 'list'} of {len(cast('list[Any]', value))}"
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
