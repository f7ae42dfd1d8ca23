"""Tokenise a corpus into a token folder once; a fingerprint of files and settings identifies the result."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.run.config.data import ReadOptions
from stretto.run.config.sources import megatron_prefix
from stretto.run.data.block_cache import cache_dir
from stretto.run.data.boundaries import Boundary
from stretto.run.data.conversation import Conversations, TrainOn
from stretto.run.data.corpus import Corpus, CorpusFile, Source, find_corpus
from stretto.run.data.megatron import DatasetVocabulary, MegatronDataset, MegatronWriter
from stretto.run.data.readers import TextPiece, cut_pieces
from stretto.run.data.row_errors import describe_skipped
from stretto.run.data.token_folder import (
    FILES,
    VERSION,
    TokenFolder,
    TokenWriter,
    open_if_current,
    read_index,
)
from stretto.run.data.tokenizer import Tokenizer, check_vocab, in_batches
from stretto.run.data.tokenizer_files import TokenizerPath

DEFAULT_VOCAB = 4096
TRAINING_CHARACTERS = 8_000_000
"""Enough text for the merges of a few ten thousand tokens to settle; training takes about 2 s on 2 cores."""
_RECIPE = 2
"""Incremented when the same source would give other tokens than before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildProgress:
    """Progress of a build: `characters` of about `total`; `stage` is "train tokenizer" or "encode"."""

    stage: str
    characters: int
    total: int
    documents: int = 0
    tokens: int = 0


Report = Callable[[BuildProgress], None]


def build(
    source: Source | Sequence[Source],
    out: Source | None = None,
    *,
    cache: Source | None = None,
    vocab: int = DEFAULT_VOCAB,
    tokenizer: TokenizerPath | None = None,
    reading: ReadOptions | None = None,
    chat: TrainOn | None = None,
    chat_template: str | None = None,
    end_of_text: Boundary | None = None,
    begin_of_text: Boundary | None = None,
    by_name: bool = False,
    replace: bool = False,
    progress: Report | None = None,
) -> TokenFolder:
    """Return the token folder of `source`, built unless it exists already.

    `source`: `python-stdlib`, files, directories or globs (see `find_corpus`). The result is at `out`, or in
    `cache` (default `cache_dir()`) under its fingerprint. A byte-level BPE of up to `vocab` tokens is trained
    on the source, unless `tokenizer` names another (see `read_tokenizer`); `vocab` is then ignored. With
    `replace`, tokens of another source at `out` are overwritten. Several processes may build the same folder
    at once.

    Every document of text ends, and in some families begins, with a token that the files of the tokenizer's
    model name; `end_of_text` and `begin_of_text` name others. With `by_name` training and held-out text are
    kept apart by the names of files (see `find_corpus`).

    With `chat` the rows of the source are conversations, and the folder has a mask of the tokens to train on:
    those of the assistant, or all. They are rendered by the tokenizer's chat template; `chat_template` names
    a file with another, or one of several (see `ChatTemplate.find`).

    Raises:
        StrettoError: bad source, text, tokenizer or vocabulary; `out` holds other files, or the tokens of
            another source without `replace`.
    """
    sources = [source] if isinstance(source, str | os.PathLike) else list(source)
    check_vocab(vocab)
    ready = None
    if tokenizer is not None:
        ready = Tokenizer.load(tokenizer, chat=chat is not None, end=end_of_text, begin=begin_of_text)
    conversations = Conversations.load(tokenizer, chat, chat_template)
    corpus = find_corpus(sources, reading, by_name=by_name)
    key = _key(corpus, _tokens_key(ready, vocab, end_of_text, begin_of_text), conversations)
    target = (
        Path(out).expanduser()
        if out is not None
        else Path(cache or cache_dir()).expanduser() / "tokens" / key
    )
    _check_target(target)
    if (current := open_if_current(target, key)) is not None:
        _report_bad_rows(target, current.index.bad_rows)
        return current
    if out is not None and not replace:
        _check_source(target, [str(s) for s in sources])
    report = progress or (lambda _: None)
    chosen = ready or _train(corpus, vocab, report).with_boundaries(end_of_text, begin_of_text)
    with (
        _writing(target),
        TokenWriter(
            target,
            chosen,
            key=key,
            source=[str(s) for s in sources],
            masked=conversations is not None,
            config=None if conversations is None else json.loads(conversations.config_bytes() or b"{}"),
        ) as writer,
    ):
        corpus.begin()
        done = 0
        for split, files in (corpus.splits or {"all": corpus.files}).items():
            before = writer.tokens
            if files and conversations is None:
                _encode(corpus, files, chosen, writer, done=done, report=report)
            elif files and conversations is not None:
                _encode_conversations(conversations, corpus, files, chosen, writer, done=done, report=report)
            if split != "all":
                names = list(dict.fromkeys(file.top.name for file in files))
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                done += sum(file.size for file in files)
                writer.named_splits[split] = (writer.tokens - before, ", ".join(names[:3]) + more)
        writer.commit()
    folder = TokenFolder(target, chosen)
    _report_bad_rows(target, folder.index.bad_rows)
    return folder


def build_megatron(
    source: Source | Sequence[Source],
    prefix: Path,
    *,
    vocab: int = DEFAULT_VOCAB,
    tokenizer: TokenizerPath | None = None,
    reading: ReadOptions | None = None,
    end_of_text: Boundary | None = None,
    begin_of_text: Boundary | None = None,
    replace: bool = False,
    progress: Report | None = None,
) -> MegatronDataset:
    """Tokenise `source` into a Megatron indexed dataset, `prefix.bin` and `prefix.idx`; arguments as `build`.

    Raises:
        StrettoError: bad source, text, tokenizer or vocabulary; there is a dataset, and not `replace`.
    """
    sources = [source] if isinstance(source, str | os.PathLike) else list(source)
    check_vocab(vocab)
    ready = None if tokenizer is None else Tokenizer.load(tokenizer, end=end_of_text, begin=begin_of_text)
    if ready is not None:
        _ = ready.boundaries
    corpus = find_corpus(sources, reading)
    if not replace and (existing := megatron_prefix(str(prefix))) is not None:
        raise StrettoError(
            f"{existing}: there is a Megatron dataset already",
            hint="name another --out, or replace it with --force",
        )
    report = progress or (lambda _: None)
    chosen = ready or _train(corpus, vocab, report).with_boundaries(end_of_text, begin_of_text)
    with _writing(prefix), MegatronWriter(prefix, chosen) as writer:
        corpus.begin()
        _encode(corpus, corpus.files, chosen, writer, done=0, report=report)
        writer.commit()
    _report_bad_rows(prefix, writer.bad_rows)
    return MegatronDataset(prefix, DatasetVocabulary.of(prefix, None))


def _report_bad_rows(target: Path, bad_rows: Mapping[str, Any] | None) -> None:
    """Warn of rows that the tokens lack."""
    if bad_rows is not None:
        print(f"warning: {target}: {describe_skipped(bad_rows)}", file=sys.stderr, flush=True)


@contextmanager
def _writing(target: Path) -> Generator[None]:
    """Turn an OSError while files are written into a StrettoError."""
    try:
        yield
    except OSError as error:
        raise StrettoError(
            f"{target}: cannot be written: {error.strerror or error}", hint="make room, or name another --out"
        ) from None


def shared_tokenizer(
    sources: Sequence[Source],
    tokenizer: Tokenizer | None,
    *,
    cache: Source | None = None,
    vocab: int = DEFAULT_VOCAB,
    reading: ReadOptions | None = None,
    progress: Report | None = None,
) -> Path:
    """Return a file in the cache with a tokenizer for several sources: `tokenizer`, or one trained on all of
    them unless it exists already.

    Raises:
        StrettoError: bad source, text or vocabulary.
    """
    folder = Path(cache or cache_dir()).expanduser() / "tokenizers"
    corpus = None if tokenizer is not None else find_corpus(sources, reading)
    key = tokenizer.fingerprint if tokenizer is not None else ""
    if corpus is not None:
        check_vocab(vocab)
        key = _key(corpus, f"bpe {vocab}", None)
    path = folder / f"{key}.json"
    if not path.exists():
        if corpus is not None:
            tokenizer = _train(corpus, vocab, progress or (lambda _: None))
        assert tokenizer is not None
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{key}.{os.getpid()}.new"  # several processes may do the same at once
        tokenizer.save(temporary)
        temporary.replace(path)
    return path


def _tokens_key(tokenizer: Tokenizer | None, vocab: int, end: Boundary | None, begin: Boundary | None) -> str:
    """The part of the key of tokenizer and boundaries.

    Raises:
        StrettoError: the files of its model do not name them.
    """
    if tokenizer is not None:
        return f"{tokenizer.fingerprint} {tokenizer.boundaries}"
    return f"bpe {vocab}" + (f" {end!r} {begin!r}" if (end, begin) != (None, None) else "")


def _key(corpus: Corpus, tokenizer: str, conversations: Conversations | None) -> str:
    """Return the fingerprint of the files (path, size, version) and of the settings."""
    files = [(str(file.path.resolve()), file.name, file.size, file.version) for file in corpus.files]
    more = [] if conversations is None else [conversations.key]
    more += ["splits by name"] if corpus.splits else []
    settings = json.dumps(
        [VERSION, _RECIPE, tokenizer, asdict(corpus.reading), TRAINING_CHARACTERS, files, *more]
    )
    return hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()


def _check_target(target: Path) -> None:
    """Check that building at `target` replaces nothing but a token folder."""
    if not target.exists():
        return
    if not target.is_dir():
        raise StrettoError(f"{target}: is a file", hint="name a new directory")
    others = {entry.name for entry in target.iterdir()} - {*FILES}
    if others:
        raise StrettoError(
            f"{target}: holds other files ({min(others)}), which a build would remove",
            hint="name a new directory",
        )


def _check_source(target: Path, sources: list[str]) -> None:
    """Check that a token folder at `target`, which a build would replace, is of the same source."""
    try:
        index = read_index(target)
    except StrettoError as error:
        if not any((target / name).exists() for name in FILES):
            return
        raise StrettoError(
            f"{error.message}: whose tokens {target} holds is not known",
            hint="name another --out, or replace them with --force",
        ) from None
    if index.source != sources:
        raise StrettoError(
            f"{target}: holds the tokens of {' '.join(index.source)}",
            hint="name another --out, or replace them with --force",
        )


def _train(corpus: Corpus, vocab: int, report: Report) -> Tokenizer:
    """Train a tokenizer on the corpus."""
    report(BuildProgress(stage="train tokenizer", characters=0, total=min(corpus.size, TRAINING_CHARACTERS)))
    return Tokenizer.train(corpus.sample(TRAINING_CHARACTERS), vocab)


def _encoded(
    pieces: Iterable[TextPiece], tokenizer: Tokenizer
) -> Iterator[tuple[list[TextPiece], list[NDArray[np.uint32]]]]:
    """Yield pieces in batches, and the ids of each. While the library encodes a batch, the next is read, and
    the one before it is with the caller.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="encode") as thread:
        batch = list[TextPiece]()
        encoded: Future[list[NDArray[np.uint32]]] = thread.submit(list)
        for following in in_batches(pieces, lambda piece: len(piece.text)):
            submitted = thread.submit(tokenizer.encode_batch, [piece.text for piece in following])
            yield batch, encoded.result()
            batch, encoded = following, submitted
        yield batch, encoded.result()


def _encode(
    corpus: Corpus,
    files: Sequence[CorpusFile],
    tokenizer: Tokenizer,
    writer: TokenWriter | MegatronWriter,
    *,
    done: int,
    report: Report,
) -> None:
    """Encode the documents of some files of the corpus into `writer`; `done` characters were before them."""
    characters = done
    pieces = cut_pieces(corpus.pieces(files), lambda: tokenizer.cuts)
    for batch, encoded in _encoded(pieces, tokenizer):
        for piece, ids in zip(batch, encoded, strict=True):
            writer.add(ids, piece.ends)
        characters += sum(len(piece.text) for piece in batch)
        report(
            BuildProgress(
                stage="encode",
                characters=characters,
                total=corpus.size,
                documents=writer.documents,
                tokens=writer.tokens,
            )
        )
    if not writer.documents:
        raise StrettoError(
            "data source holds no text: every document is blank", hint="name files that hold text"
        )
    writer.skipped, writer.blank = corpus.skipped, corpus.blank
    writer.bad_rows = corpus.errors.as_dict()


def _encode_conversations(
    conversations: Conversations,
    corpus: Corpus,
    files: Sequence[CorpusFile],
    tokenizer: Tokenizer,
    writer: TokenWriter,
    *,
    done: int,
    report: Report,
) -> None:
    """Encode the conversations of some files of the corpus into `writer`; those with nothing to train on are
    counted as blank.
    """
    characters = done
    for batch in conversations.encoded(corpus, tokenizer, files):
        for sample in batch:
            if any(sample.trained[1:]):  # the first token is never predicted
                writer.add_masked(sample.ids, sample.trained)
            else:
                writer.blank += 1
            characters += sample.characters
        report(
            BuildProgress(
                stage="encode",
                characters=min(characters, corpus.size),  # a template may repeat what it renders
                total=corpus.size,
                documents=writer.documents,
                tokens=writer.tokens,
            )
        )
    if not writer.documents:
        raise StrettoError(
            f"data source has no conversation with a token to train on ({writer.blank} without)",
            hint="the messages of the assistant are trained on; data.chat=all trains on all tokens",
        )
    writer.skipped, writer.bad_rows = corpus.skipped, corpus.errors.as_dict()
