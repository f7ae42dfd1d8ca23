"""`stretto data show`: documents of a token folder as text, and which tokens the loss counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli.options import Json
from stretto.cli.output import coloured, report
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.run.data.megatron import MegatronDataset
    from stretto.run.data.token_folder import TokenFolder
    from stretto.run.data.token_source import TokenSource
    from stretto.run.data.tokenizer import Tokenizer

TokenizerOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE|DIR", help="The tokenizer of a Megatron dataset.", show_default=False),
]
EXAMPLE = "Example: stretto data show chats --document 3 --count 2"


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of a document that are alike in whether the loss counts them."""

    text: str
    trained: bool
    ids: list[int]


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The beginning of a document: `tokens` is its whole length, `trained` how many of them count."""

    document: int
    tokens: int
    trained: int
    runs: list[Run]

    @property
    def shown(self) -> int:
        """Tokens in the runs."""
        return sum(len(run.ids) for run in self.runs)


def show(
    path: Annotated[
        str,
        typer.Argument(metavar="DIR|PREFIX|URL", help="A token folder, or a Megatron dataset."),
    ],
    document: Annotated[
        int, typer.Option("--document", "-d", min=0, metavar="N", help="The first document to show, from 0.")
    ] = 0,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Documents to show.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each to show.")] = 2048,
    tokenizer: TokenizerOption = None,
    as_json: Json = False,
) -> None:
    """Show documents of tokens as text, and which of their tokens are trained on.

    In colour the tokens that the loss counts are green and the others grey; in a pipe they stand
    between « and ».
    """
    from stretto.run.config.sources import is_click_folder

    if is_click_folder(Path(path).expanduser()):
        raise StrettoError(
            f"{path}: a click folder, which has samples and no documents", hint=f"stretto data info {path}"
        )
    source = open_any(path, tokenizer)
    documents = source.documents
    if document >= documents:
        raise StrettoError(
            f"document {document}: {path} has {documents}", hint=f"name one from 0 to {documents - 1}"
        )
    decoder = source.tokenizer()
    numbers = range(document, min(document + count, documents))
    previews = [preview(source, decoder, number, tokens) for number in numbers]

    def text(console: Console) -> None:
        for one in previews:
            _paint(console, one)

    report({"documents": [asdict(one) for one in previews]}, as_json, text)


def open_any(path: str, tokenizer: Path | None) -> TokenFolder | MegatronDataset:
    """The tokens at a path, whether or not it is known what tokenizer made them.

    Raises:
        StrettoError: none there, or unusable ones.
    """
    from stretto.run.data.open import open_tokens

    return open_tokens(path, tokenizer, vocab=1 << 32)


def preview(source: TokenSource, tokenizer: Tokenizer, document: int, most: int) -> Preview:
    """The first `most` tokens of a document."""
    start, end = (int(offset) for offset in source.offsets[document : document + 2])
    ids: list[int] = source.tokens[start : min(end, start + most)].tolist()
    mask = [True] * (end - start) if source.mask is None else source.mask[start:end].astype(bool).tolist()
    runs = list[Run]()
    for trained, group in groupby(zip(mask, ids, strict=False), lambda pair: pair[0]):
        members = [one for _, one in group]
        runs.append(Run(tokenizer.decode(members, special=True), trained, members))
    return Preview(document=document, tokens=end - start, trained=sum(mask), runs=runs)


def _paint(console: Console, one: Preview) -> None:
    from rich.text import Text

    colours = coloured(console)
    console.print(f"document {one.document}: {one.tokens} tokens, {one.trained} trained on", style="bold")
    body = Text()
    for run in one.runs:
        if colours:
            body.append(run.text, style="green" if run.trained else "bright_black")
        else:
            body.append(f"«{run.text}»" if run.trained else run.text)
    if one.shown < one.tokens:
        body.append(f"\n... {one.tokens - one.shown} more tokens")
    console.print(body, soft_wrap=True)
