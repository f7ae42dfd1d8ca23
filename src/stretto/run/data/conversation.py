"""Rows of fine-tuning data as conversations, and their tokens with a mask of those that the loss counts.

A row is `{"messages": [{"role": ..., "content": ...}, ...]}` as OpenAI and TRL have it, with `tools`
where the assistant calls functions; or `{"prompt": ..., "completion": ...}`, both texts or both lists of
messages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from stretto.errors import StrettoError, nearest
from stretto.run.data.chat_template import ChatTemplate, Rendered, template_request
from stretto.run.data.corpus import Corpus, CorpusFile
from stretto.run.data.readers import read_rows
from stretto.run.data.remote import Place
from stretto.run.data.row_errors import RowError
from stretto.run.data.tokenizer import Tokenizer, in_batches
from stretto.run.data.tokenizer_files import TokenizerPath

ROLES = ("system", "developer", "user", "assistant", "tool")
TrainOn = Literal["assistant", "all"]
_MESSAGES = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages, and which of them are trained on.

    Attributes:
        location: file and row, for error messages.
        trained: for each message, whether the model is to write it: those of the assistant, unless `weight`
            is 0 or they belong to the prompt of a row with a completion.
        tools: descriptions of functions.
        arguments: further variables of the template.
    """

    location: str
    messages: Sequence[Mapping[str, Any]]
    trained: Sequence[bool]
    tools: Sequence[Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A prompt and its continuation, without roles."""

    location: str
    prompt: str
    completion: str


Row = Conversation | Completion


def parse_row(row: Mapping[str, Any], location: str) -> Row:
    """Return one row of the data.

    Raises:
        StrettoError: neither form; no messages; an unknown role; content that is not text.
    """
    fields = {name: value for name, value in row.items() if value is not None}
    if "messages" in fields:
        messages = _messages(fields["messages"], "messages", location)
        return _conversation(fields, location, messages, [True] * len(messages))
    if {"prompt", "completion"} <= fields.keys():
        prompt, completion = fields["prompt"], fields["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return Completion(location=location, prompt=prompt, completion=completion)
        before, after = (_messages(fields[name], name, location) for name in ("prompt", "completion"))
        return _conversation(fields, location, [*before, *after], [False] * len(before) + [True] * len(after))
    if "conversations" in fields:
        raise StrettoError(
            f"{location}: is in ShareGPT's form (conversations with from and value)",
            hint=f"write each row as {_MESSAGES}",
        )
    columns = ", ".join(list(fields)[:8])
    raise StrettoError(
        f"{location}: no field 'messages'" + (f", only {columns}" if columns else ""),
        hint=f'{_MESSAGES}, or {{"prompt": "...", "completion": "..."}}',
    )


def _conversation(
    row: Mapping[str, Any], location: str, messages: list[dict[str, Any]], eligible: Sequence[bool]
) -> Conversation:
    if "functions" in row:
        raise StrettoError(f"{location}: 'functions' is no longer in use", hint="name them as 'tools'")
    tools, arguments = row.get("tools"), row.get("chat_template_kwargs", {})
    if tools is not None and not isinstance(tools, list):
        raise StrettoError(f"{location}: tools is not a list", hint="a list of JSON schemas of functions")
    if not isinstance(arguments, dict):
        raise StrettoError(
            f"{location}: chat_template_kwargs is not an object", hint='such as {"date": "..."}'
        )
    trained = [
        may and message["role"] == "assistant" and message.pop("weight", 1) != 0
        for may, message in zip(eligible, messages, strict=True)
    ]
    return Conversation(
        location=location,
        messages=messages,
        trained=trained,
        tools=cast("list[Any] | None", tools),
        arguments=cast("dict[str, Any]", arguments),
    )


def _messages(value: object, name: str, location: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise StrettoError(f"{location}: {name} is not a list", hint=_MESSAGES)
    if not value:
        raise StrettoError(f"{location}: {name} is empty", hint="remove the row")
    return [_message(item, f"{location}, {name}[{i}]") for i, item in enumerate(cast(list[Any], value))]


def _message(value: object, location: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise StrettoError(f"{location}: not an object", hint='{"role": "user", "content": "..."}')
    message = {key: item for key, item in cast(dict[str, Any], value).items() if item is not None}
    role = message.get("role")
    if role not in ROLES:
        close = nearest(str(role), ROLES)
        raise StrettoError(
            f"{location}: role {role!r}" if "role" in message else f"{location}: no role",
            hint=f"did you mean {close}?" if close else f"roles are {', '.join(ROLES)}",
        )
    if "function_call" in message:
        raise StrettoError(
            f"{location}: 'function_call' is no longer in use", hint="write it as one of 'tool_calls'"
        )
    # for a message that only calls tools some templates want null, others no text
    null = "content" in value and "content" not in message and message.get("tool_calls")
    content: Any = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list):
        parts = cast(list[Any], content)
        kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in parts]
        if other := next((kind for kind in kinds if kind != "text"), None):
            raise StrettoError(
                f"{location}: content has a part of type {other!r}", hint="only text can be trained on"
            )
        content = "".join(str(part.get("text", "")) for part in parts)
    if not (isinstance(content, str) or null):
        problem = "no content" if content is None else f"content is a {type(content).__name__}"
        raise StrettoError(f"{location}: {problem}", hint="content is a text")
    message["content"] = None if null else content
    if message.get("weight", 1) not in (0, 1):
        raise StrettoError(f"{location}: weight {message['weight']}", hint="0 (not trained on) or 1")
    return message


# ---------------------------------------------------------------------- what is trained on


def complete(row: Completion, train_on: TrainOn, begin: str, end: str) -> Rendered:
    """Return the text of a row without roles, between `begin` and `end`, and the span that is trained on."""
    text = f"{begin}{row.prompt}{row.completion}{end}"
    start = 0 if train_on == "all" else len(begin) + len(row.prompt)
    return Rendered(text, ((start, len(text)),))


def mark(
    rows: Sequence[Conversation], template: ChatTemplate, train_on: TrainOn
) -> Iterator[list[Rendered] | RowError]:
    """Yield the samples of each conversation, with the spans of characters that are trained on; or the error,
    if the template fails, or the assistant's text cannot be located.

    Raises:
        StrettoError: the template is not valid.
    """
    requests = [
        template_request(
            row.messages,
            tools=row.tools,
            arguments=row.arguments,
            trained=None if train_on == "all" else row.trained,
        )
        for row in rows
    ]
    for row, answer in zip(rows, template.answers(requests), strict=True):
        if isinstance(answer, RowError):
            yield RowError(answer.kind, f"{row.location}: {answer.message}", hint=answer.hint)
        elif train_on == "all":
            yield [Rendered(sample.text, ((0, len(sample.text)),)) for sample in answer]
        else:
            yield answer


_RECIPE = 2
"""Incremented when the same conversations would give other tokens or masks than before."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a conversation, which of them are trained on, and the length of its text."""

    ids: list[int]
    trained: list[bool]
    characters: int


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """The settings by which rows of conversations become tokens.

    Attributes:
        path: the tokenizer's file or folder.
        template: None if the tokenizer has none, which suffices for prompts and completions.
    """

    path: Path
    train_on: TrainOn
    template: ChatTemplate | None

    @classmethod
    def load(
        cls, tokenizer: TokenizerPath | None, train_on: TrainOn | None, choice: str | None
    ) -> Conversations | None:
        """Return the settings, or None for text (`train_on` is None).

        Args:
            choice: the template, as `ChatTemplate.find` takes it.

        Raises:
            StrettoError: no tokenizer is named, or the template cannot be read.
        """
        if train_on is None:
            return None
        if tokenizer is None:
            raise StrettoError(
                "conversations need the tokenizer of the model, with its chat template",
                hint="name its folder: data.tokenizer=DIR in a config, or --tokenizer DIR",
            )
        first = tokenizer if isinstance(tokenizer, str | os.PathLike) else tokenizer[0]
        path = Path(first).expanduser()
        return cls(path=path, train_on=train_on, template=ChatTemplate.find(path, choice))

    @property
    def key(self) -> list[str]:
        """Everything that decides tokens and masks, except tokenizer and files."""
        return [f"chat {_RECIPE}", self.train_on, "" if self.template is None else self.template.key]

    def config_bytes(self) -> bytes | None:
        """Return the `tokenizer_config.json` to store with the tokens."""
        return None if self.template is None else self.template.config_bytes()

    def encoded(
        self, corpus: Corpus, tokenizer: Tokenizer, files: Sequence[CorpusFile]
    ) -> Iterator[list[Encoded]]:
        """Yield all rows of some files of the corpus, in batches.

        Raises:
            StrettoError: a row that is no conversation, or that the template refuses.
        """
        begin = "".join(tokenizer.text_of(token) for token in tokenizer.begin)
        end = tokenizer.text_of(tokenizer.endoftext)
        for batch in in_batches(self._rendered(corpus, files, begin, end), lambda sample: len(sample.text)):
            tokens = tokenizer.encode_templated([sample.text for sample in batch])
            encoded = list[Encoded]()
            for sample, (ids, spans) in zip(batch, tokens, strict=True):
                edges = np.array(spans, dtype=np.int64).reshape(-1, 2)
                mask = np.zeros(len(edges), dtype=bool)
                for start, stop in sample.spans:  # tokens with a character in a span; an empty one has none
                    mask |= (edges[:, 0] < stop) & (edges[:, 1] > start)
                encoded.append(Encoded(ids, mask.tolist(), len(sample.text)))
            yield encoded

    def _rendered(
        self, corpus: Corpus, files: Sequence[CorpusFile], begin: str, end: str
    ) -> Iterator[Rendered]:
        split = samples = 0
        for file in files:
            for batch in in_batches(_parsed(file.path, corpus), _characters):
                chats = [row for row in batch if isinstance(row, Conversation)]
                template = self.template or (ChatTemplate.load(self.path) if chats else None)
                marked = iter(()) if template is None else mark(chats, template, self.train_on)
                for row in batch:
                    if isinstance(row, Completion):
                        yield complete(row, self.train_on, begin, end)
                    elif isinstance(answer := next(marked), RowError):
                        corpus.errors.skip(answer)
                    else:
                        if len(answer) > 1:
                            split, samples = split + 1, samples + len(answer)
                        yield from answer
            corpus.errors.end_file()
        if split:
            print(
                f"note: {split:,} conversations are {samples:,} samples: the template renders earlier turns"
                " otherwise than the last one",
                file=sys.stderr,
                flush=True,
            )


def _parsed(path: Place, corpus: Corpus) -> Iterator[Row]:
    """Yield the conversations and completions of a file."""
    for location, content in read_rows(path, corpus.reading, corpus.errors):
        try:
            row = parse_row(content, location)
        except StrettoError as error:
            corpus.errors.skip(RowError("no conversation", error.message, hint=error.hint))
        else:
            yield row


def _characters(row: Row) -> int:
    """Return the approximate length of a row's text, in characters."""
    if isinstance(row, Completion):
        return len(row.prompt) + len(row.completion)
    return sum(len(message["content"] or "") for message in row.messages)
