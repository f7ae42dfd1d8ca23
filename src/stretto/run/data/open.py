"""Open what `data.source` names: tokens as they lie, or text, which is tokenised first."""

from __future__ import annotations

from pathlib import Path

from stretto.run.config.schema import DataConfig
from stretto.run.config.sources import holds_tokens, megatron_prefix
from stretto.run.data.build import Report, build
from stretto.run.data.joined import JoinedSource
from stretto.run.data.megatron import MegatronDataset, Vocabulary
from stretto.run.data.token_folder import TokenFolder
from stretto.run.data.token_source import TokenSource


def open_source(data: DataConfig, vocab: int | None = None, report: Report | None = None) -> TokenSource:
    """The tokens of a config's source.

    Args:
        vocab: rows of the model's embedding, where the config gives them: the vocabulary of tokens whose
            tokenizer is not known.
        report: called with the progress while text is tokenised.

    Raises:
        StrettoError: unusable text, tokens or tokenizer; text and tokens in one list.
    """
    if holds_tokens(data.sources):
        tokenizer = None if data.tokenizer is None else Path(data.tokenizer).expanduser()
        sources = [open_tokens(name, tokenizer, vocab) for name in data.sources]
        return sources[0] if len(sources) == 1 else JoinedSource(sources)
    return build(
        data.sources,
        cache=data.cache,
        vocab=data.vocab,
        tokenizer=data.tokenizer,
        text_field=data.text_field,
        chat=data.chat,
        chat_template=data.chat_template,
        progress=report,
    )


def open_tokens(
    name: str, tokenizer: Path | None = None, vocab: int | None = None
) -> TokenFolder | MegatronDataset:
    """The token folder or Megatron dataset at a path.

    Args:
        tokenizer: of a Megatron dataset, unless it lies beside it.
        vocab: as `open_source`.

    Raises:
        StrettoError: neither of them, or an unusable one.
    """
    if (prefix := megatron_prefix(name)) is not None:
        return MegatronDataset(prefix, Vocabulary.of(prefix, tokenizer, vocab))
    return TokenFolder(Path(name).expanduser())
