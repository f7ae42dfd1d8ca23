"""`stretto data`: text to token folders, click logs to click folders, and what they hold."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli import data_clicks, data_synth
from stretto.cli.output import Json, command_app, report
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.run.data.build import Progress, Report
    from stretto.run.data.token_folder import TokenFolder

app = command_app(
    help="Text to token folders, click logs to click folders, and what they hold.", no_args_is_help=True
)
app.command(epilog=data_clicks.EXAMPLE)(data_clicks.clicks)
app.command(epilog=data_synth.EXAMPLE)(data_synth.synth_clicks)


@app.command(epilog="Example: stretto data build texts/ notes.jsonl --out tokens --vocab 8192")
def build(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE", help="Text, JSONL or Parquet files, folders, globs, or python-stdlib."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to make; default: one in the user's cache.")
    ] = None,
    vocab: Annotated[
        int | None, typer.Option(metavar="N", help="Entries of the tokenizer to train.  [default: 4096]")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Use this tokenizer.json instead of training one.")
    ] = None,
    text_field: Annotated[
        str, typer.Option(metavar="NAME", help="The field of JSONL and Parquet that holds the text.")
    ] = "text",
    as_json: Json = False,
) -> None:
    """Tokenise text into a folder that `data.source` of a config may name.

    A folder that is there already, from the same files and settings, is kept.
    """
    from stretto.run.data.build import DEFAULT_VOCAB
    from stretto.run.data.build import build as build_folder

    if tokenizer is not None and vocab is not None:
        raise StrettoError(
            f"--vocab {vocab} with --tokenizer {tokenizer}: the tokenizer has its own vocabulary",
            hint="leave one of them out",
        )
    with _progress(as_json) as progress:
        folder = build_folder(
            sources,
            out,
            vocab=DEFAULT_VOCAB if vocab is None else vocab,
            tokenizer=tokenizer,
            text_field=text_field,
            progress=progress,
        )
    _show(folder, as_json)


@app.command(epilog="Example: stretto data info tokens --verify")
def info(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A token or click folder.")],
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte, also of large files.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a folder holds, and check that it is whole."""
    from stretto.recommender.clicks.index import is_click_folder
    from stretto.run.data.token_folder import TokenFolder

    if is_click_folder(path):
        _click_info(path, verify, as_json)
        return
    folder = TokenFolder(path)
    if verify:
        folder.verify()
    _show(folder, as_json, **({"verified": True} if verify else {}))


def _click_info(path: Path, verify: bool, as_json: bool) -> None:
    from stretto.recommender.clicks.folder import ClickFolder

    folder = ClickFolder(path)
    if verify:
        folder.verify()
    data_clicks.show(folder, as_json, **({"verified": True} if verify else {}))


def _show(folder: TokenFolder, as_json: bool, **more: Any) -> None:
    index = folder.index
    facts: dict[str, Any] = {
        "documents": index.documents,
        "tokens": index.tokens,
        "path": str(folder.path),
        "vocab": index.vocab,
        "dtype": index.dtype,
        "bytes": sum(sums.bytes for sums in index.files.values()),
        "source": index.source,
        "skipped": index.skipped,
        "tokenizer": index.tokenizer,
        **more,
    }

    def table(console: Console) -> None:
        from rich.table import Table

        rows = Table(show_header=False, box=None)
        for name, value in facts.items():
            shown = (
                f"{value:,}" if type(value) is int else " ".join(value) if type(value) is list else str(value)
            )
            rows.add_row(name, shown)
        console.print(rows)

    report(facts, as_json, table)


@contextmanager
def _progress(as_json: bool) -> Generator[Report | None]:
    """A bar when stdout is a terminal, a line a stage when not, silence with --json."""
    if as_json:
        yield None
    elif not sys.stdout.isatty():
        yield _Lines()
    else:
        from rich.progress import Progress as Bar

        with Bar(transient=True) as bar:
            task = bar.add_task("read")

            def show(at: Progress) -> None:
                bar.update(task, description=at.stage, completed=at.characters, total=max(at.total, 1))

            yield show


class _Lines:
    """Says each stage once."""

    def __init__(self) -> None:
        self._stage = ""

    def __call__(self, at: Progress) -> None:
        if at.stage != self._stage:
            self._stage = at.stage
            print(f"{at.stage}: {at.total / 1e6:.1f} MB", flush=True)
