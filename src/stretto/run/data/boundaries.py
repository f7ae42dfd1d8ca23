"""The tokens that end and begin a text, as the files of a tokenizer's model name them.

A published model says it in `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` and
`config.json`, in the template that its `tokenizer.json` puts around a text, or in the format of its
vocabulary. Nothing is taken from a list of names: `</s>` ends Llama 2's texts, and is HTML in Gemma's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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
        """Return a text such as `texts end with <eos> (1)`; `text_of` maps ids to their texts."""
        names = [
            f"{text_of[token]} ({token})" if text_of and token in text_of else f"token {token}"
            for token in (self.end, self.begin)
            if token is not None
        ]
        return f"texts end with {' and begin with '.join(names)}"


def boundaries_of(meta: Mapping[str, Any]) -> Boundaries | None:
    """Return the boundaries recorded in a checkpoint, or None if it has none."""
    end, begin = meta.get(END), meta.get(BEGIN)
    if type(end) is not int or type(begin) not in (int, type(None)):
        return None
    return Boundaries(end, begin)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Special tokens according to the files of a model.

    Attributes:
        config: content of `tokenizer_config.json`, with what `special_tokens_map.json` adds.
        generation: content of `generation_config.json`, else of `config.json`.
        template: all chat templates in one text.
    """

    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    generation: Mapping[str, Any] = field(default_factory=dict[str, Any])
    template: str = ""

    @classmethod
    def find(cls, place: Path) -> ModelFiles:
        """Read the files in the folder of a tokenizer's; for `PREFIX.tokenizer.json` its own config alone.

        Raises:
            StrettoError: a file cannot be read.
        """
        folder, prefix = (place, "") if place.is_dir() else (place.parent, "")
        if place.name.endswith(_TOKENIZER) and not place.is_dir():
            prefix = place.name.removesuffix(_TOKENIZER)
        config = read_json_object(folder / f"{prefix}{_CONFIG}")
        if prefix:
            return cls(config)
        named = {name: value for name, value in config.items() if value is not None}
        texts = [json.dumps(config.get("chat_template") or "", ensure_ascii=False)]
        files = [folder / "chat_template.jinja", *(folder / "additional_chat_templates").glob("*.jinja")]
        texts += [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
        model = read_json_object(folder / "config.json")
        inner = model.get("text_config")  # of models that read images too
        generation = {**(cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}), **model}
        return cls(
            {**read_json_object(folder / "special_tokens_map.json"), **named},
            read_json_object(folder / "generation_config.json") or generation,
            "\n".join(texts),
        )

    @classmethod
    def parse(cls, origin: str, config: bytes) -> ModelFiles:
        """Read the content of a `tokenizer_config.json` alone; `origin`: the tokenizer, for messages.

        Raises:
            StrettoError: it is no JSON object.
        """
        return cls(read_json_object(f"{_CONFIG} of {origin}", config))

    def text(self, name: str) -> str | None:
        """Return the text of a token of the tokenizer's config, such as `eos_token`."""
        value: object = self.config.get(name)
        text = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
        return text if isinstance(text, str) and text else None

    def ids(self, name: str) -> list[int]:
        """Return the ids of one or several tokens in the model's config, such as `eos_token_id`."""
        value: object = self.generation.get(name)
        ids = cast("list[object]", value) if isinstance(value, list) else [value]
        return [id_ for id_ in ids if type(id_) is int]


def read_json_object(path: Path | str, content: bytes | None = None) -> dict[str, Any]:
    """Return the JSON object in a file, or in its content if that is given; nothing if no file exists.

    Raises:
        StrettoError: it cannot be read, or is no JSON object.
    """
    try:
        body: object = json.loads(Path(path).read_bytes() if content is None else content)
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
    """Return the tokens that end and begin the texts of a tokenizer's model.

    Args:
        name: the tokenizer, for messages.
        stated: the end of text that the format of the file itself names.
        chat: the texts are conversations, which end with `eos_token` even if that only ends a turn.
        end: the user's choice; None if the files decide.
        begin: likewise; an empty text if texts begin with no token.

    Raises:
        StrettoError: the files name no such token, or several; the tokenizer does not have it.
    """
    tokens = _Tokens(inner, name, files, stated)
    return Boundaries(
        tokens.end(chat) if end is None else find_token(inner, name, END, end),
        tokens.begin() if begin is None else None if begin == "" else find_token(inner, name, BEGIN, begin),
    )


def find_token(inner: tokenizers.Tokenizer, name: str, setting: str, token: Boundary) -> int:
    """Return the id of a token that a setting of the data names.

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
    close = nearest(str(token), special.values())
    listed = ", ".join(f"{text} ({id_})" for id_, text in list(special.items())[:8]) or "none"
    hint = f"did you mean {close}?" if close else f"its special tokens: {listed}"
    raise StrettoError(f"data.{setting} is {token!r}: {rule}", hint=hint)


def token_number(token: Boundary) -> int | None:
    """Return the id that a user names, or None for a text."""
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
        """Return the token that ends a text: the one that the files name, if it does not end a turn of the
        chat template; of several, the one that is called the end of text.
        """
        special = _special(self.inner)
        named = self._token("eos_token")
        listed = [id_ for id_ in self.files.ids("eos_token_id") if id_ in special]  # others are text
        candidates = [*([] if named is None else [named]), *sorted({*listed} - {named})]
        if chat and candidates and (named is not None or len(candidates) == 1):
            return candidates[0]
        ends = [id_ for id_ in candidates if (self.inner.id_to_token(id_) or "") not in self.files.template]
        called = {id_ for id_, text in special.items() if text in _CALLED}
        called |= set() if self.stated is None else {self.stated}
        if len(ends) == 1 and (not called or ends[0] in called):
            return ends[0]
        if not ends:
            after = self._around()[1] if not candidates else []
            ends = after if len(after) == 1 else sorted(called)
            if len(ends) == 1:
                return ends[0]
        elif len(agreed := [id_ for id_ in ends if id_ in called]) == 1:
            return agreed[0]
        raise self._unknown(END, [*candidates, *sorted({*ends, *called} - {*candidates})])

    def begin(self) -> int | None:
        """Return the token that begins a text: the one that the tokenizer's own template or `add_bos_token`
        puts before it, or that the chat template begins with; None if nothing does.
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
        """Return the id of a token that the tokenizer's config names by its text.

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
        """Return the ids that the tokenizer itself puts before a text, and after it.

        Raises:
            StrettoError: they cannot be distinguished from the text.
        """
        if not self.inner.num_special_tokens_to_add(False):
            return [], []
        for probe in _PROBES:
            plain = self.inner.encode(probe, add_special_tokens=False).ids
            both = self.inner.encode(probe, add_special_tokens=True).ids
            for start in range(len(both) - len(plain) + 1) if plain else ():
                end = start + len(plain)
                if both[start:end] == plain:
                    return both[:start], both[end:]
        raise self._unknown(BEGIN, ())

    def _unknown(self, setting: str, candidates: Iterable[int]) -> StrettoError:
        names = [f"{self.inner.id_to_token(id_)} ({id_})" for id_ in candidates]
        kind = {END: "end-of-text", BEGIN: "begin-of-text"}[setting]
        problem = f"agree on; in question: {', '.join(names[:8])}" if names else "name"
        return StrettoError(
            f"{self.name}: has no {kind} token that the model's files {problem}", hint=_hint(setting)
        )


def _hint(setting: str) -> str:
    option = "--" + setting.replace("_", "-")
    none = ", or as an empty text if there is none" if setting == BEGIN else ""
    return f"name it by its text or id{none}: data.{setting}=TOKEN in a config, {option} TOKEN in data build"


def tokenizer_config(end: str, begin: str | None, config: Mapping[str, Any]) -> bytes:
    """Return the content of a `tokenizer_config.json` from which these tokens are read again.

    Args:
        end: the token that ends a text.
        begin: the token that begins a text, or None.
        config: content of the model's own, which stays.
    """
    # transformers' AutoTokenizer wants a class
    body: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    body |= {} if begin is None else {"bos_token": begin, "add_bos_token": True}
    body |= {name: value for name, value in config.items() if value is not None}
    return (json.dumps(body, indent=1, ensure_ascii=False) + "\n").encode()
