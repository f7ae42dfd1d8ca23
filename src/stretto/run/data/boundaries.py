"""The tokens that end and begin a text, as the files of a tokenizer's model name them.

A published model says it in `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` and
`config.json`, in the template that its `tokenizer.json` puts around a text, or in the format of its
vocabulary. Nothing is taken from a list of names: `</s>` ends Llama 2's texts, and is HTML in Gemma's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import tokenizers

from stretto.errors import StrettoError, nearest

Boundary = str | int
"""A token as a user names it: by its text, or by its id, also in digits."""
END, BEGIN = "end_of_text", "begin_of_text"
_TOKENIZER, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_CALLED = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>")
"""Special tokens whose names say that they end a text; they decide between several that the files name."""
_ADD_BEGIN = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")
"""Classes of transformers that put `bos_token` before a text unless `add_bos_token` denies it."""
_PROBES = ("a", "the", "0", ".")


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Ids of the token that ends a text, and of the one that begins it, if there is one."""

    end: int
    begin: int | None = None

    def describe(self, text_of: Mapping[int, str] | None = None) -> str:
        """As text, such as `texts end with <eos> (1)`; `text_of` maps ids to their texts."""
        end = f"texts end with {_named(self.end, text_of)}"
        return f"{end} and begin with {_named(self.begin, text_of)}" if self.begin is not None else end


def boundaries_of(meta: Mapping[str, Any]) -> Boundaries | None:
    """The boundaries recorded in a checkpoint; None if it has none."""
    end, begin = meta.get(END), meta.get(BEGIN)
    if type(end) is not int or type(begin) not in (int, type(None)):
        return None
    return Boundaries(end, begin)


def _named(token: int, text_of: Mapping[int, str] | None) -> str:
    return f"{text_of[token]} ({token})" if text_of and token in text_of else f"token {token}"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the files of a model say about its special tokens.

    Attributes:
        config: of `tokenizer_config.json`, with what `special_tokens_map.json` adds.
        generation: of `generation_config.json`, else of `config.json`.
        template: all chat templates in one text.
    """

    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    generation: Mapping[str, Any] = field(default_factory=dict[str, Any])
    template: str = ""

    @classmethod
    def find(cls, place: Path) -> ModelFiles:
        """Read the files beside a tokenizer's; beside `PREFIX.tokenizer.json`, its own config alone.

        Raises:
            StrettoError: a file cannot be read.
        """
        folder, prefix = (place, "") if place.is_dir() else (place.parent, "")
        if place.name.endswith(_TOKENIZER) and not place.is_dir():
            prefix = place.name.removesuffix(_TOKENIZER)
        config = _read(folder / f"{prefix}{_CONFIG}")
        if prefix:
            return cls(config)
        named = {name: value for name, value in config.items() if value is not None}
        texts = [json.dumps(config.get("chat_template") or "", ensure_ascii=False)]
        files = [folder / "chat_template.jinja", *(folder / "additional_chat_templates").glob("*.jinja")]
        texts += [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
        model = _read(folder / "config.json")
        inner = model.get("text_config")  # of models that read images too
        generation = {**(cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}), **model}
        return cls(
            {**_read(folder / "special_tokens_map.json"), **named},
            _read(folder / "generation_config.json") or generation,
            "\n".join(texts),
        )

    @classmethod
    def parse(cls, where: str, config: bytes) -> ModelFiles:
        """With the content of a `tokenizer_config.json` alone, which came from beside `where`.

        Raises:
            StrettoError: it is no JSON object.
        """
        return cls(_object(f"{_CONFIG} of {where}", lambda: config))

    def text(self, name: str) -> str | None:
        """The text of a token of the tokenizer's config, such as `eos_token`."""
        value: object = self.config.get(name)
        text = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
        return text if isinstance(text, str) and text else None

    def ids(self, name: str) -> list[int]:
        """The ids of one or several tokens in the model's config, such as `eos_token_id`."""
        value: object = self.generation.get(name)
        listed = cast("list[object]", value) if isinstance(value, list) else [value]
        return [one for one in listed if type(one) is int]


def _read(path: Path) -> dict[str, Any]:
    return _object(path, path.read_bytes)


def _object(path: Path | str, read: Callable[[], bytes]) -> dict[str, Any]:
    try:
        body: object = json.loads(read())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise StrettoError(f"{path}: cannot be read: {error}", hint="copy it from its model again") from None
    if not isinstance(body, dict):
        raise StrettoError(f"{path}: not a JSON object", hint="copy it from its model again")
    return cast("dict[str, Any]", body)


def find_boundaries(
    inner: tokenizers.Tokenizer,
    name: str,
    files: ModelFiles,
    *,
    stated: int | None = None,
    chat: bool = False,
    end: Boundary | None = None,
    begin: Boundary | None = None,
) -> Boundaries:
    """The tokens that end and begin the texts of a tokenizer's model.

    Args:
        name: of the tokenizer, for messages.
        stated: the end of text that the format of the file itself names.
        chat: the texts are conversations, which end with `eos_token` even if that ends a turn only.
        end: the user's choice; None: the files decide.
        begin: likewise; an empty text: none.

    Raises:
        StrettoError: the files name no such token, or several; the tokenizer does not have it.
    """
    tokens = _Tokens(inner, name, files, stated)
    return Boundaries(
        tokens.end(chat) if end is None else find_token(inner, name, END, end),
        tokens.begin() if begin is None else None if begin == "" else find_token(inner, name, BEGIN, begin),
    )


def find_token(inner: tokenizers.Tokenizer, name: str, setting: str, token: Boundary) -> int:
    """The id of a token that a setting of the data names.

    Raises:
        StrettoError: the tokenizer does not have it.
    """
    number = token_number(token)
    if number is not None:
        if 0 <= number < 1 << 32 and inner.id_to_token(number) is not None:
            return number
        rule = f"{name} has {inner.get_vocab_size(with_added_tokens=True)} tokens and none with this id"
    else:
        id_ = _id_of(inner, str(token))
        if id_ is not None:
            return id_
        rule = f"{name} has no such token"
    special = _special(inner)
    near = nearest(str(token), special.values())
    listed = ", ".join(f"{text} ({id_})" for id_, text in list(special.items())[:8]) or "none"
    hint = f"did you mean {near}?" if near else f"its special tokens: {listed}"
    raise StrettoError(f"data.{setting} is {token!r}: {rule}", hint=hint)


def token_number(token: Boundary) -> int | None:
    """The id that a user names; None for a text."""
    if isinstance(token, int):
        return token
    return int(token) if token.isascii() and token.isdigit() else None


def _id_of(inner: tokenizers.Tokenizer, text: str) -> int | None:
    try:
        return inner.token_to_id(text)
    except UnicodeEncodeError:  # half of a surrogate pair, which no token has
        return None


def _special(inner: tokenizers.Tokenizer) -> dict[int, str]:
    added = inner.get_added_tokens_decoder()
    return {id_: token.content for id_, token in sorted(added.items()) if token.special}


@dataclass(frozen=True, slots=True)
class _Tokens:
    inner: tokenizers.Tokenizer
    name: str
    files: ModelFiles
    stated: int | None

    def end(self, chat: bool) -> int:
        """The token that ends a text: the one that the files name, if it does not end a turn of the chat
        template; of several, the one that is called the end of text.
        """
        special = _special(self.inner)
        named = self._token("eos_token")
        listed = [id_ for id_ in self.files.ids("eos_token_id") if id_ in special]  # others are text
        first = [] if named is None else [named]
        candidates = [*first, *sorted({*listed} - {named})]
        if chat and candidates and (named is not None or len(candidates) == 1):
            return candidates[0]
        rest = [id_ for id_ in candidates if (self.inner.id_to_token(id_) or "") not in self.files.template]
        called = {id_ for id_, text in special.items() if text in _CALLED}
        called |= set() if self.stated is None else {self.stated}
        if len(rest) == 1 and (not called or rest[0] in called):
            return rest[0]
        if not rest:
            after = self._around()[1] if not candidates else []
            rest = after if len(after) == 1 else sorted(called)
            if len(rest) == 1:
                return rest[0]
        elif len(agreed := [id_ for id_ in rest if id_ in called]) == 1:
            return agreed[0]
        raise self._unknown(END, [*candidates, *sorted({*rest, *called} - {*candidates})])

    def begin(self) -> int | None:
        """The token that begins a text: the one that the tokenizer's own template or `add_bos_token` puts
        there, or that the chat template begins with; None if nothing does.
        """
        before, add = self._around()[0], self.files.config.get("add_bos_token")
        if len(before) > 1 or (before and add is False):
            raise self._unknown(BEGIN, before)
        if before:
            return before[0]
        kind = str(self.files.config.get("tokenizer_class")).removesuffix("Fast")
        named = self._token("bos_token")
        if add or (add is None and kind in _ADD_BEGIN):
            listed = [id_ for id_ in self.files.ids("bos_token_id") if id_ in _special(self.inner)]
            candidates = listed if named is None else [named]
            if len(candidates) != 1 and add:
                raise self._unknown(BEGIN, listed)
            return candidates[0] if len(candidates) == 1 else None
        written = add is None and "bos_token" in self.files.template
        return named if written and named != self._token("eos_token") else None

    def _token(self, key: str) -> int | None:
        """The id of a token that the tokenizer's config names by its text.

        Raises:
            StrettoError: the tokenizer does not have it.
        """
        text = self.files.text(key)
        id_ = None if text is None else _id_of(self.inner, text)
        if text is not None and id_ is None:
            setting = BEGIN if key == "bos_token" else END
            raise StrettoError(
                f"{self.name}: its config has {key} {text!r}, and the tokenizer no such token",
                hint=_hint(setting),
            )
        return id_

    def _around(self) -> tuple[list[int], list[int]]:
        """What the tokenizer itself puts before a text, and after it.

        Raises:
            StrettoError: it cannot be told from the text.
        """
        if not self.inner.num_special_tokens_to_add(False):
            return [], []
        for probe in _PROBES:
            plain = self.inner.encode(probe, add_special_tokens=False).ids
            both = self.inner.encode(probe, add_special_tokens=True).ids
            for at in range(len(both) - len(plain) + 1) if plain else ():
                if both[at : at + len(plain)] == plain:
                    return both[:at], both[at + len(plain) :]
        raise self._unknown(BEGIN, ())

    def _unknown(self, setting: str, candidates: Iterable[int]) -> StrettoError:
        names = [f"{self.inner.id_to_token(id_)} ({id_})" for id_ in candidates]
        what = {END: "end-of-text", BEGIN: "begin-of-text"}[setting]
        if not names:
            return StrettoError(
                f"{self.name}: has no {what} token that the model's files name", hint=_hint(setting)
            )
        some = ", ".join(names[:8])
        return StrettoError(
            f"{self.name}: has no {what} token that the model's files agree on; in question: {some}",
            hint=_hint(setting),
        )


def _hint(setting: str) -> str:
    option = "--" + setting.replace("_", "-")
    none = ", or as an empty text if there is none" if setting == BEGIN else ""
    return f"name it by its text or id{none}: data.{setting}=TOKEN in a config, {option} TOKEN in data build"


def tokenizer_config(end: str, begin: str | None, config: Mapping[str, Any]) -> bytes:
    """The content of a `tokenizer_config.json` from which these tokens are read again.

    Args:
        end: the token that ends a text.
        begin: likewise.
        config: what the model's own has, which stays.
    """
    # transformers' AutoTokenizer wants a class
    body: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    body |= {} if begin is None else {"bos_token": begin, "add_bos_token": True}
    body |= {name: value for name, value in config.items() if value is not None}
    return (json.dumps(body, indent=1, ensure_ascii=False) + "\n").encode()
