"""`stretto data`: build token folders from text and click folders from click logs, and inspect them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from stretto.cli import data_clicks, data_show
from stretto.cli.output import Json, command_app, report, stage_progress
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.run.data.token_folder import TokenFolder

app = command_app(
    help="Build token folders from text and click folders from click logs, and inspect them.",
    no_args_is_help=True,
)
app.command(epilog=data_clicks.CLICKS_EXAMPLE)(data_clicks.clicks)
app.command(epilog=data_clicks.SYNTH_EXAMPLE)(data_clicks.synth_clicks)
app.command(epilog=data_show.EXAMPLE)(data_show.show)


@app.command(
    epilog="Examples: stretto data build texts/ notes.jsonl --out tokens --vocab 8192; "
    "stretto data build chats.jsonl --tokenizer MODEL_DIR --chat assistant --out chats"
)
def build(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE", help="Text, JSONL or Parquet files, folders, globs, or python-stdlib."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder to write; default: one in the user's cache."),
    ] = None,
    vocab: Annotated[
        int | None,
        typer.Option(metavar="N", help="Vocabulary size of the tokenizer to train.  [default: 4096]"),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DIR", help="Use this tokenizer.json, or a model's folder, instead of training one."
        ),
    ] = None,
    text_field: Annotated[
        str, typer.Option(metavar="NAME", help="The field of JSONL and Parquet rows that holds the text.")
    ] = "text",
    chat: Annotated[
        Literal["assistant", "all"] | None,
        typer.Option(
            help="The rows are conversations; train on the tokens of the assistant, or on all.",
            show_default=False,
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME", help="With --chat: another Jinja template than the tokenizer's default."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the tokens of another source in DIR.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Tokenise text or conversations into a folder for `data.source` of a config.

    A folder that is there already, from the same files and settings, is kept.
    """
    from stretto.run.data.build import DEFAULT_VOCAB
    from stretto.run.data.build import build as build_folder

    if chat is None and chat_template is not None:
        raise StrettoError(
            "--chat-template without --chat", hint="--chat assistant says that the rows are conversations"
        )
    if tokenizer is not None and vocab is not None:
        raise StrettoError(
            f"--vocab {vocab} with --tokenizer {tokenizer}: the tokenizer has its own vocabulary",
            hint="leave one of them out",
        )
    with stage_progress(as_json, lambda at: (at.stage, at.characters)) as progress:
        folder = build_folder(
            sources,
            out,
            vocab=DEFAULT_VOCAB if vocab is None else vocab,
            tokenizer=tokenizer,
            text_field=text_field,
            chat=chat,
            chat_template=chat_template,
            replace=force,
            progress=progress,
        )
    _show(folder, as_json)


@app.command(epilog="Example: stretto data info tokens --verify")
def info(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A token or click folder.")],
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte of large files too.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a token or click folder holds, and check that it is complete."""
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


_LABELS = {  # of facts whose name is not clear
    "skipped": "files skipped",
    "blank": "blank documents",
    "trained": "tokens trained on",
}


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
        "blank": index.blank,
        "tokenizer": index.tokenizer,
        **more,
    }
    if index.trained is not None:
        facts = {"documents": index.documents, "tokens": index.tokens, "trained": index.trained} | facts

    def table(console: Console) -> None:
        from rich.table import Table

        rows = Table(show_header=False, box=None)
        for name, value in facts.items():
            shown = (
                f"{value:,}" if type(value) is int else " ".join(value) if type(value) is list else str(value)
            )
            rows.add_row(_LABELS.get(name, name), shown)
        console.print(rows)

    report(facts, as_json, table)
