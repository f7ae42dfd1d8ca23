"""Open what `data.source` names: tokens as they lie, or text, which is tokenised first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from stretto.errors import StrettoError
from stretto.run.config.data import DEFAULT_RATIO, DataConfig
from stretto.run.config.sources import BIN, IDX, INDEX, holds_tokens, is_url, megatron_prefix, token_folder
from stretto.run.data.block_cache import BlockCache, block_cache
from stretto.run.data.boundaries import Boundary
from stretto.run.data.build import Report, build, shared_tokenizer
from stretto.run.data.megatron import DatasetVocabulary, MegatronDataset, dataset_file
from stretto.run.data.part_names import both_parts, parts_of
from stretto.run.data.remote import RemotePath
from stretto.run.data.split import SPLITS
from stretto.run.data.token_folder import TokenFolder
from stretto.run.data.token_source import JoinedSource, TokenData, TokenSource
from stretto.run.data.tokenizer_files import TokenizerPath
from stretto.run.data.user_source import written_sources, written_tokens
from stretto.user_file import is_function_name


def open_source(data: DataConfig, vocab: int | None = None, report: Report | None = None) -> TokenData:
    """Return the tokens of a config's source. Text of a mixture is tokenised with `data.tokenizer`, else with
    the tokenizer of those of its sources that are tokens, else with one that is trained on all of the text.

    Args:
        vocab: rows of the model's embedding, if configured: the vocabulary of tokens whose tokenizer is
            unknown.
        report: called with the progress while text is tokenised.

    Raises:
        StrettoError: unusable text, tokens or tokenizer; text and tokens in one list.
    """
    if data.weights is None:
        return _stream(data, vocab, report)
    from stretto.run.data.mixture import Mixture  # imports torch

    alone = {name: replace(data, source=name, phases=[]) for name in data.weights}
    streams = {name: _stream(each, vocab, report) for name, each in alone.items() if holds_tokens([name])}
    texts = [name for name in alone if name not in streams]
    tokenizer, boundaries = data.tokenizer, dict[str, object]()
    if texts and tokenizer is None:
        named = next((stream for stream in streams.values() if stream.fingerprint is not None), None)
        shared = None if named is None else named.tokenizer()
        if shared is not None:
            begin = shared.begin[0] if shared.begin else ""
            boundaries = {"end_of_text": shared.endoftext, "begin_of_text": begin}
        tokenizer = str(
            shared_tokenizer(
                written_sources(texts, data),
                shared,
                cache=data.cache,
                vocab=data.vocab,
                reading=data.reading,
                progress=report,
            )
        )
    for name in texts:
        text = replace(alone[name], tokenizer=tokenizer, **boundaries)
        streams[name] = _stream(text, vocab, report)
    return Mixture({name: streams[name] for name in alone}, data.weights)


def _stream(data: DataConfig, vocab: int | None, report: Report | None) -> TokenSource:
    """Return the tokens of a source that is no mixture; arguments and errors as for `open_source`."""
    if holds_tokens(data.sources):
        chosen = {"end": data.end_of_text, "begin": data.begin_of_text}
        written = {name: written_tokens(name, data, vocab) for name in data.sources if is_function_name(name)}
        sources = [
            open_tokens(written.get(name, name), data.tokenizer, vocab, block_cache(data), **chosen)
            for name in data.sources
        ]
        return sources[0] if len(sources) == 1 else _joined(sources, data)
    return build(
        written_sources(data.sources, data),
        cache=data.cache,
        vocab=data.vocab,
        tokenizer=data.tokenizer,
        reading=data.reading,
        chat=data.chat,
        chat_template=data.chat_template,
        end_of_text=data.end_of_text,
        begin_of_text=data.begin_of_text,
        by_name=data.split is None,
        progress=report,
    )


def _joined(sources: Sequence[TokenSource], data: DataConfig) -> JoinedSource:
    """Return sources as one; in the order of their splits, if their names tell these apart.

    Raises:
        StrettoError: one of them has splits of its own, and no ratio is configured.
    """
    if data.split is not None:
        return JoinedSource(sources)
    if split_source := next((source.name for source in sources if source.named_splits), None):
        raise StrettoError(
            f"{split_source} keeps training and held-out text apart, which a part of a stream cannot",
            hint="name the sources by weights: data.source={A: 1, B: 1}; or cut the stream: data.split="
            + DEFAULT_RATIO,
        )
    parts = parts_of([PurePath(name) for name in data.sources])
    if not both_parts(parts):
        return JoinedSource(sources)
    splits = {
        split: [source for source, part in zip(sources, parts, strict=True) if (part or "train") == split]
        for split in SPLITS
    }
    return JoinedSource(
        [source for split in splits.values() for source in split],
        {
            split: (sum(source.size for source in of_split), ", ".join(source.name for source in of_split))
            for split, of_split in splits.items()
        },
    )


def open_tokens(
    name: str,
    tokenizer: TokenizerPath | None = None,
    vocab: int | None = None,
    cache: BlockCache | None = None,
    *,
    end: Boundary | None = None,
    begin: Boundary | None = None,
) -> TokenFolder | MegatronDataset:
    """Return the token folder or Megatron dataset at a path or URL.

    Args:
        tokenizer: tokenizer of a Megatron dataset, unless it lies next to it.
        vocab: as for `open_source`.
        cache: cache of blocks of sources at URLs; None for the user's, of the default size.
        end: the token that ends documents; a token folder must have been built with it. None for the
            recorded one.
        begin: likewise.

    Raises:
        StrettoError: neither of them, or an unusable one.
    """
    if is_url(name):
        place = RemotePath(name, cache or block_cache(DataConfig()))
        prefix = _remote_prefix(place)
    else:
        place = token_folder(name) or Path(name).expanduser()
        prefix = megatron_prefix(name)
    if prefix is not None:
        return MegatronDataset(prefix, DatasetVocabulary.of(prefix, tokenizer, vocab, end=end, begin=begin))
    folder = TokenFolder(place)
    if (end, begin) != (None, None):
        wanted = folder.tokenizer().with_boundaries(end, begin)
        if wanted.boundaries != folder.tokenizer().boundaries:
            raise StrettoError(
                f"{name}: its {folder.describe_boundaries()}, and the config says that"
                f" {wanted.describe_boundaries()}",
                hint="build the folder again, or leave data.end_of_text and data.begin_of_text out",
            )
    return folder


def _remote_prefix(place: RemotePath) -> RemotePath | None:
    """Return the prefix of the Megatron dataset that a URL names, or None for a token folder.

    Raises:
        StrettoError: it is neither.
    """
    if place.suffix in (BIN, IDX):
        return place.with_name(place.name.removesuffix(place.suffix))
    if (place / INDEX).is_file():
        return None
    if any(dataset_file(place, suffix).is_file() for suffix in (BIN, IDX)):
        return place
    raise StrettoError(
        f"{place}: neither a token folder ({place}/{INDEX}) nor a Megatron dataset ({place}{IDX})",
        hint="check the path; text is named by its files, such as "
        f"{place}/*.jsonl, and tokenised on this machine first",
    )
