"""Conversations as tokens with a mask: which of them the loss counts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stretto.errors import StrettoError
from stretto.run.data.chat_template import ChatTemplate, Rendered
from stretto.run.data.conversation import Completion, Conversation, Row, TrainOn, complete, mark, parse_row
from stretto.run.data.corpus import Corpus
from stretto.run.data.readers import read_rows
from stretto.run.data.remote import Place
from stretto.run.data.row_errors import RowError
from stretto.run.data.tokenizer import Tokenizer, in_batches
from stretto.run.data.tokenizer_files import TokenizerPath

_RECIPE = 2
"""Incremented when the same conversations would give other tokens or masks than before."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a conversation, whether each is trained on, and the length of its text."""

    ids: list[int]
    trained: list[bool]
    characters: int


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """How rows of conversations become tokens.

    Attributes:
        place: of the tokenizer.
        template: None: the tokenizer has none, which suffices for prompts and completions.
    """

    place: Path
    train_on: TrainOn
    template: ChatTemplate | None

    @classmethod
    def load(
        cls, tokenizer: TokenizerPath | None, train_on: TrainOn | None, choice: str | None
    ) -> Conversations | None:
        """The settings; None for text, where `train_on` is None.

        Args:
            choice: of the template, as `ChatTemplate.find` takes it.

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
        place = Path(first).expanduser()
        return cls(place=place, train_on=train_on, template=ChatTemplate.find(place, choice))

    @property
    def facts(self) -> list[str]:
        """All that decides tokens and masks, beside tokenizer and files."""
        return [f"chat {_RECIPE}", self.train_on, "" if self.template is None else self.template.facts]

    def config_bytes(self) -> bytes | None:
        """The `tokenizer_config.json` to keep with the tokens."""
        return None if self.template is None else self.template.config_bytes()

    def encoded(self, corpus: Corpus, tokenizer: Tokenizer) -> Iterator[list[Encoded]]:
        """All rows of the corpus, in batches.

        Raises:
            StrettoError: a row that is no conversation, or that the template refuses.
        """
        begin = "".join(tokenizer.text_of(token) for token in tokenizer.begin)
        end = tokenizer.text_of(tokenizer.endoftext)
        for batch in in_batches(self._rendered(corpus, begin, end), lambda one: len(one.text)):
            tokens = tokenizer.encode_templated([one.text for one in batch])
            yield [
                Encoded(ids, _trained(spans, one), len(one.text))
                for one, (ids, spans) in zip(batch, tokens, strict=True)
            ]

    def _rendered(self, corpus: Corpus, begin: str, end: str) -> Iterator[Rendered]:
        corpus.begin()
        split = samples = 0
        for file in corpus.files:
            for batch in in_batches(_parsed(file.path, corpus), _characters):
                chats = [row for row in batch if isinstance(row, Conversation)]
                template = self.template or (ChatTemplate.load(self.place) if chats else None)
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
    """The conversations and completions of a file."""
    for where, content in read_rows(path, corpus.reading, corpus.errors):
        try:
            row = parse_row(content, where)
        except StrettoError as error:
            corpus.errors.skip(RowError("no conversation", error.message, hint=error.hint))
        else:
            yield row


def _characters(row: Row) -> int:
    """Approximate length of a row's text, in characters."""
    if isinstance(row, Completion):
        return len(row.prompt) + len(row.completion)
    return sum(len(message["content"] or "") for message in row.messages)


def _trained(spans: Sequence[tuple[int, int]], rendered: Rendered) -> list[bool]:
    """Which tokens are trained on: those with a character in a span that is. An empty token has none."""
    edges = np.array(spans, dtype=np.int64).reshape(-1, 2)
    mask = np.zeros(len(edges), dtype=bool)
    for start, stop in rendered.spans:
        mask |= (edges[:, 0] < stop) & (edges[:, 1] > start)
    return mask.tolist()
