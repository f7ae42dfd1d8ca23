"""`stretto data`: build token folders from text and click folders from click logs, and inspect them."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from stretto.cli import data_clicks
from stretto.cli.options import Json, grouped
from stretto.cli.output import coloured, command_app, stage_progress
from stretto.cli.report import CommandReport
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from rich.text import Text

    from stretto.run.data.megatron import MegatronDataset
    from stretto.run.data.token_folder import TokenFolder
    from stretto.run.data.token_source import TokenSource
    from stretto.run.data.tokenizer import Tokenizer

app = command_app(
    help="Build token folders from text and click folders from click logs, and inspect them.",
    no_args_is_help=True,
)
app.command(epilog=data_clicks.CLICKS_EXAMPLE)(data_clicks.clicks)
app.command(epilog=data_clicks.SYNTH_EXAMPLE)(data_clicks.synth_clicks)


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The options of `stretto data build`."""

    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Files of text, JSON, CSV or Parquet, folders, globs, URLs, or python-stdlib.",
        ),
    ]
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The folder to write; default: one in the user's cache."),
    ] = None
    vocab: Annotated[
        int | None,
        typer.Option(metavar="N", help="Vocabulary size of the tokenizer to train.  [default: 4096]"),
    ] = None
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DIR", help="Use this tokenizer.json, or a model's folder, instead of training one."
        ),
    ] = None
    end_of_text: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="The token that ends each document, by text or id.  [default: what its model's files name]",
        ),
    ] = None
    begin_of_text: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="The token that begins each, or '' for none.  [default: what its model's files name]",
        ),
    ] = None
    text_field: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The field of JSON, or column of CSV and Parquet, that holds the text."
        ),
    ] = "text"
    input_format: Annotated[
        Literal["text", "jsonl", "json", "csv", "tsv", "parquet"] | None,
        typer.Option(
            help="The format of all files; default: by the content and the name of each.", show_default=False
        ),
    ] = None
    on_error: Annotated[
        Literal["stop", "skip"],
        typer.Option(help="Stop at a row that cannot be read, or skip and count up to a tenth of a file's."),
    ] = "stop"
    chat: Annotated[
        Literal["assistant", "all"] | None,
        typer.Option(
            help="The rows are conversations; train on the tokens of the assistant, or on all.",
            show_default=False,
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME", help="With --chat: another Jinja template than the tokenizer's default."
        ),
    ] = None
    form: Annotated[
        Literal["stretto", "megatron"],
        typer.Option(
            "--format", help="A token folder, or Megatron's PREFIX.bin and PREFIX.idx, with --out PREFIX."
        ),
    ] = "stretto"
    force: Annotated[bool, typer.Option("--force", help="Replace the tokens of another source in DIR.")] = (
        False
    )
    as_json: Json = False

    def check(self) -> None:
        """Raise StrettoError for options that exclude each other, or an output that is not on a disk."""
        from stretto.run.config.sources import is_url

        if self.chat is None and self.chat_template is not None:
            raise StrettoError(
                "--chat-template without --chat", hint="--chat assistant says that the rows are conversations"
            )
        if self.tokenizer is not None and self.vocab is not None:
            raise StrettoError(
                f"--vocab {self.vocab} with --tokenizer {self.tokenizer}: the tokenizer has its own "
                "vocabulary",
                hint="leave one of them out",
            )
        if self.form == "megatron" and self.out is None:
            raise StrettoError(
                "--format megatron without --out",
                hint="name the dataset with --out PREFIX, for PREFIX.bin and PREFIX.idx",
            )
        if self.form == "megatron" and self.chat is not None:
            raise StrettoError(
                f"--format megatron with --chat {self.chat}: it has no place for the tokens that are "
                "trained on",
                hint="leave out --format, for a token folder",
            )
        if self.out is not None and is_url(self.out):
            copy = {"s3": "aws s3 cp --recursive", "gs": "gcloud storage cp -r", "hdfs": "hdfs dfs -put"}
            command = copy.get(self.out.partition("://")[0], "copy")
            raise StrettoError(
                f"--out {self.out}: a build is written to a disk",
                hint=f"build with --out DIR, then: {command} DIR {self.out}",
            )


@app.command(
    epilog="Examples: stretto data build texts/ notes.jsonl --out tokens --vocab 8192; "
    "stretto data build chats.jsonl --tokenizer MODEL_DIR --chat assistant --out chats"
)
@grouped(BuildOptions)
def build(options: BuildOptions) -> None:
    """Tokenise text or conversations into a folder for `data.source` of a config.

    A folder that is there already, from the same files and settings, is kept.
    """
    from stretto.run.config.data import ReadOptions
    from stretto.run.data.build import DEFAULT_VOCAB, build_megatron
    from stretto.run.data.build import build as build_folder
    from stretto.run.data.part_names import mixed_text

    options.check()
    megatron = options.form == "megatron"
    if megatron and (warning := mixed_text(options.sources, "give each a dataset of its own")):
        print(warning, file=sys.stderr)
    with stage_progress(options.as_json, lambda at: (at.stage, at.characters)) as progress:
        settings: dict[str, Any] = {
            "vocab": DEFAULT_VOCAB if options.vocab is None else options.vocab,
            "tokenizer": options.tokenizer,
            "reading": ReadOptions(
                text_field=options.text_field,
                input_format=options.input_format,
                on_error=options.on_error,
            ),
            "end_of_text": options.end_of_text,
            "begin_of_text": options.begin_of_text,
            "replace": options.force,
            "progress": progress,
        }
        if megatron and options.out is not None:
            built = build_megatron(options.sources, Path(options.out).expanduser(), **settings)
        else:
            settings |= {"chat": options.chat, "chat_template": options.chat_template, "by_name": True}
            built = build_folder(options.sources, options.out, **settings)
    _tokens_report(built).print(options.as_json)


TokenizerOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE|DIR", help="The tokenizer of a Megatron dataset.", show_default=False),
]


@app.command(epilog="Example: stretto data info tokens --verify")
def info(
    path: Annotated[
        str,
        typer.Argument(
            metavar="DIR|PREFIX|URL", help="A token or click folder, or a Megatron dataset; tokens at a URL."
        ),
    ],
    tokenizer: TokenizerOption = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte of large files too.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a folder or dataset holds, and check that it is complete."""
    from stretto.run.config.sources import is_click_folder

    more = {"verified": True} if verify else {}
    if is_click_folder(Path(path)):
        from stretto.recommender.clicks.folder import ClickFolder

        clicks = ClickFolder(Path(path))
        if verify:
            clicks.verify()
        data_clicks.clicks_report(clicks, **more).print(as_json)
    else:
        tokens = _open_tokens(path, tokenizer)
        if verify:
            tokens.verify()
        _tokens_report(tokens, **more).print(as_json)


@app.command(epilog="Example: stretto data show chats --document 3 --count 2")
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
    source = _open_tokens(path, tokenizer)
    documents = source.documents
    if document >= documents:
        raise StrettoError(
            f"document {document}: {path} has {documents}", hint=f"name one from 0 to {documents - 1}"
        )
    decoder = source.tokenizer()
    indices = range(document, min(document + count, documents))
    previews = [preview(source, decoder, index, tokens) for index in indices]
    report = CommandReport({"documents": [asdict(each) for each in previews]})
    for each in previews:
        report.line(
            f"document {each.document}: {each.tokens} tokens, {each.trained} trained on", style="bold"
        )
        report.draw(lambda to, each=each: _painted(each, coloured(to)))
    report.print(as_json)


def _open_tokens(path: str, tokenizer: Path | None) -> TokenFolder | MegatronDataset:
    """Open the tokens at a path, whether or not their tokenizer is known.

    Raises:
        StrettoError: there are none, or unusable ones.
    """
    from stretto.run.data.open import open_tokens

    return open_tokens(path, tokenizer, vocab=1 << 32)


def _tokens_report(tokens: TokenFolder | MegatronDataset, **more: Any) -> CommandReport:
    """Report the contents of a token folder or a Megatron dataset."""
    from stretto.run.data.token_folder import TokenFolder

    if isinstance(tokens, TokenFolder):
        index = tokens.index
        record: dict[str, Any] = {"documents": index.documents, "tokens": index.tokens}
        if index.trained is not None:
            record["trained"] = index.trained
        if index.named_splits is not None:
            splits = index.named_splits.items()
            record["splits"] = {name: {"tokens": tokens, "files": files} for name, (tokens, files) in splits}
        record |= {
            "path": str(tokens.path),
            "vocab": index.vocab,
            "dtype": index.dtype,
            "bytes": sum(sums.bytes for sums in index.files.values()),
            "source": index.source,
            "skipped": index.skipped,
            "blank": index.blank,
            "bad_rows": 0 if index.bad_rows is None else sum(index.bad_rows["skipped"].values()),
            "tokenizer": index.tokenizer,
        }
    else:
        record = {
            "documents": tokens.documents,
            "sequences": tokens.sequences,
            "tokens": tokens.size,
            "path": tokens.name,
            "vocab": None if tokens.fingerprint is None else tokens.vocab,
            "dtype": tokens.dtype.name,
            "bytes": tokens.size * tokens.dtype.itemsize,
            "tokenizer": tokens.fingerprint,
        }
    record |= {"boundaries": tokens.describe_boundaries(), **more}
    labels = {
        "skipped": "files skipped",
        "blank": "blank documents",
        "bad_rows": "rows left out",
        "trained": "tokens trained on",
    }
    report = CommandReport(record)
    for name, value in record.items():
        value = "not known (name it with --tokenizer)" if value is None else value
        shown = f"{value:,}" if type(value) is int else " ".join(value) if type(value) is list else str(value)
        if type(value) is dict:
            splits = cast(dict[str, dict[str, Any]], value).items()
            shown = ", ".join(
                f"{split} {p['tokens']:,} tokens of {p['files']}" for split, p in splits if p["files"]
            )
        report.value(labels.get(name, name), shown, indent=18)
    return report


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens of a document that the loss either counts or excludes."""

    text: str
    trained: bool
    ids: list[int]


@dataclass(frozen=True, kw_only=True)
class DocumentPreview:
    """The beginning of a document: `tokens` is its full length, `trained` the number of tokens that count."""

    document: int
    tokens: int
    trained: int
    runs: list[TokenRun]


def preview(source: TokenSource, tokenizer: Tokenizer, document: int, limit: int) -> DocumentPreview:
    """Return the first `limit` tokens of a document."""
    start, end = (int(offset) for offset in source.offsets[document : document + 2])
    ids: list[int] = source.tokens[start : min(end, start + limit)].tolist()
    mask = [True] * (end - start) if source.mask is None else source.mask[start:end].astype(bool).tolist()
    runs = list[TokenRun]()
    for trained, group in groupby(zip(mask, ids, strict=False), lambda pair: pair[0]):
        members = [id_ for _, id_ in group]
        runs.append(TokenRun(tokenizer.decode(members, special=True), trained, members))
    return DocumentPreview(document=document, tokens=end - start, trained=sum(mask), runs=runs)


def _painted(document: DocumentPreview, colours: bool) -> Text:
    from rich.text import Text

    body = Text()
    for run in document.runs:
        if colours:
            body.append(run.text, style="green" if run.trained else "bright_black")
        else:
            body.append(f"«{run.text}»" if run.trained else run.text)
    hidden = document.tokens - sum(len(run.ids) for run in document.runs)
    if hidden:
        body.append(f"\n... {hidden} more tokens")
    return body
