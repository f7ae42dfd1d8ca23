"""`stretto data`: build token folders from text and click folders from click logs, and inspect them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from stretto.cli import data_clicks, data_show
from stretto.cli.options import Json
from stretto.cli.output import command_app, report, stage_progress
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.run.data.megatron import MegatronDataset
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
            metavar="SOURCE",
            help="Files of text, JSON, CSV or Parquet, folders, globs, URLs, or python-stdlib.",
        ),
    ],
    out: Annotated[
        str | None,
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
    end_of_text: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="The token that ends each document, by text or id.  [default: what its model's files name]",
        ),
    ] = None,
    begin_of_text: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="The token that begins each, or '' for none.  [default: what its model's files name]",
        ),
    ] = None,
    text_field: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The field of JSON, or column of CSV and Parquet, that holds the text."
        ),
    ] = "text",
    input_format: Annotated[
        Literal["text", "jsonl", "json", "csv", "tsv", "parquet"] | None,
        typer.Option(
            help="The format of all files; default: by the content and the name of each.", show_default=False
        ),
    ] = None,
    on_error: Annotated[
        Literal["stop", "skip"],
        typer.Option(help="Stop at a row that cannot be read, or skip and count up to a tenth of a file's."),
    ] = "stop",
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
    form: Annotated[
        Literal["stretto", "megatron"],
        typer.Option(
            "--format", help="A token folder, or Megatron's PREFIX.bin and PREFIX.idx, with --out PREFIX."
        ),
    ] = "stretto",
    force: Annotated[
        bool, typer.Option("--force", help="Replace the tokens of another source in DIR.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Tokenise text or conversations into a folder for `data.source` of a config.

    A folder that is there already, from the same files and settings, is kept.
    """
    from stretto.run.config.data import ReadOptions
    from stretto.run.config.sources import is_url
    from stretto.run.data.build import DEFAULT_VOCAB, build_megatron
    from stretto.run.data.build import build as build_folder
    from stretto.run.data.part_names import mixed_text

    if chat is None and chat_template is not None:
        raise StrettoError(
            "--chat-template without --chat", hint="--chat assistant says that the rows are conversations"
        )
    if tokenizer is not None and vocab is not None:
        raise StrettoError(
            f"--vocab {vocab} with --tokenizer {tokenizer}: the tokenizer has its own vocabulary",
            hint="leave one of them out",
        )
    if form == "megatron" and (out is None or chat is not None):
        raise StrettoError(
            "--format megatron without --out"
            if out is None
            else f"--format megatron with --chat {chat}: it has no place for the tokens that are trained on",
            hint="name the dataset with --out PREFIX, for PREFIX.bin and PREFIX.idx"
            if out is None
            else "leave out --format, for a token folder",
        )
    if out is not None and is_url(out):
        copy = {"s3": "aws s3 cp --recursive", "gs": "gcloud storage cp -r", "hdfs": "hdfs dfs -put"}
        command = copy.get(out.partition("://")[0], "copy")
        raise StrettoError(
            f"--out {out}: a build is written to a disk",
            hint=f"build with --out DIR, then: {command} DIR {out}",
        )
    size = DEFAULT_VOCAB if vocab is None else vocab
    reading = ReadOptions(text_field=text_field, input_format=input_format, on_error=on_error)
    if warning := mixed_text(sources):
        print(warning, file=sys.stderr)
    with stage_progress(as_json, lambda at: (at.stage, at.characters)) as progress:
        if form == "megatron" and out is not None:
            built = build_megatron(
                sources,
                Path(out).expanduser(),
                vocab=size,
                tokenizer=tokenizer,
                reading=reading,
                end_of_text=end_of_text,
                begin_of_text=begin_of_text,
                replace=force,
                progress=progress,
            )
        else:
            built = build_folder(
                sources,
                out,
                vocab=size,
                tokenizer=tokenizer,
                reading=reading,
                chat=chat,
                chat_template=chat_template,
                end_of_text=end_of_text,
                begin_of_text=begin_of_text,
                replace=force,
                progress=progress,
            )
    _show(built, as_json)


@app.command(epilog="Example: stretto data info tokens --verify")
def info(
    path: Annotated[
        str,
        typer.Argument(
            metavar="DIR|PREFIX|URL", help="A token or click folder, or a Megatron dataset; tokens at a URL."
        ),
    ],
    tokenizer: data_show.TokenizerOption = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte of large files too.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a folder or dataset holds, and check that it is complete."""
    from stretto.run.config.sources import is_click_folder

    if is_click_folder(Path(path)):
        _click_info(Path(path), verify, as_json)
        return
    tokens = data_show.open_any(path, tokenizer)
    if verify:
        tokens.verify()
    _show(tokens, as_json, **({"verified": True} if verify else {}))


def _click_info(path: Path, verify: bool, as_json: bool) -> None:
    from stretto.recommender.clicks.folder import ClickFolder

    folder = ClickFolder(path)
    if verify:
        folder.verify()
    data_clicks.show(folder, as_json, **({"verified": True} if verify else {}))


_LABELS = {  # of facts whose name is not clear
    "skipped": "files skipped",
    "blank": "blank documents",
    "bad_rows": "rows left out",
    "trained": "tokens trained on",
}


def _folder_facts(folder: TokenFolder) -> dict[str, Any]:
    index = folder.index
    facts: dict[str, Any] = {"documents": index.documents, "tokens": index.tokens}
    if index.trained is not None:
        facts["trained"] = index.trained
    return facts | {
        "path": str(folder.path),
        "vocab": index.vocab,
        "dtype": index.dtype,
        "bytes": sum(sums.bytes for sums in index.files.values()),
        "source": index.source,
        "skipped": index.skipped,
        "blank": index.blank,
        "bad_rows": 0 if index.bad_rows is None else sum(index.bad_rows["skipped"].values()),
        "tokenizer": index.tokenizer,
        "boundaries": folder.describe_boundaries(),
    }


def _dataset_facts(dataset: MegatronDataset) -> dict[str, Any]:
    known = dataset.fingerprint is not None
    return {
        "documents": dataset.documents,
        "sequences": dataset.sequences,
        "tokens": dataset.size,
        "path": dataset.name,
        "vocab": dataset.vocab if known else None,
        "dtype": dataset.dtype.name,
        "bytes": dataset.size * dataset.dtype.itemsize,
        "tokenizer": dataset.fingerprint,
        "boundaries": dataset.describe_boundaries(),
    }


def _show(tokens: TokenFolder | MegatronDataset, as_json: bool, **more: Any) -> None:
    from stretto.run.data.token_folder import TokenFolder

    facts = _folder_facts(tokens) if isinstance(tokens, TokenFolder) else _dataset_facts(tokens)
    facts |= more

    def table(console: Console) -> None:
        from rich.table import Table

        rows = Table(show_header=False, box=None)
        for name, value in facts.items():
            value = "not known (name it with --tokenizer)" if value is None else value
            shown = (
                f"{value:,}" if type(value) is int else " ".join(value) if type(value) is list else str(value)
            )
            rows.add_row(_LABELS.get(name, name), shown)
        console.print(rows)

    report(facts, as_json, table)
