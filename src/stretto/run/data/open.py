"""Open what `data.source` names: tokens as they lie, or text, which is tokenised first."""

from __future__ import annotations

from pathlib import Path

from stretto.run.config.schema import DataConfig
from stretto.run.data.build import Report, build
from stretto.run.data.token_folder import TokenFolder, is_token_folder
from stretto.run.data.token_source import TokenSource


def open_source(data: DataConfig, report: Report | None = None) -> TokenSource:
    """The tokens of a config's source.

    Args:
        report: called with the progress while text is tokenised.

    Raises:
        StrettoError: unusable text, tokens or tokenizer.
    """
    if holds_tokens(data):
        return TokenFolder(Path(data.sources[0]).expanduser())
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


def holds_tokens(data: DataConfig) -> bool:
    """Whether the source is tokens already, whose vocabulary is known without reading any text."""
    return len(data.sources) == 1 and is_token_folder(Path(data.sources[0]).expanduser())
