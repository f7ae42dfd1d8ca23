"""`stretto generate`: text from a trained model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app
from stretto.errors import StrettoError, read_text
from stretto.job.devices import METAVAR, check_device

if TYPE_CHECKING:
    from stretto.run.generate.text import Prompt, Wording

app = command_app()


@app.command(
    epilog="Examples: stretto generate runs/quickstart --prompt 'def ' --tokens 100 --temperature 0.7; "
    "stretto generate runs/chat --chat --prompt 'How are you?'; "
    "stretto generate runs/chat --chat --prompts questions.jsonl --json; "
    "stretto generate runs/llama-70b --tp 8 --dtype bfloat16 --prompt 'Once upon a time'"
)
def generate(
    path: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run's folder (its newest checkpoint), or a checkpoint."),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="What the text starts with; with --chat the user's message. May be repeated."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A prompt a line; in a .jsonl file rows with prompt, or messages to answer (with tools and "
            "chat_template_kwargs).",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Divides the logits; 0: always take the likeliest token.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample from this many likeliest tokens; 0: from all.")
    ] = 50,
    top_p: Annotated[
        float, typer.Option(help="Of these, from the likeliest that together have this probability; 1: all.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A text or special token that ends the text, beside the model's own. May be repeated.",
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer messages, by the tokenizer's chat template.")
    ] = False,
    chat_template: Annotated[
        str | None,
        typer.Option(metavar="FILE|NAME", help="Another template than the tokenizer's default; with --chat."),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="The same seed gives the same text; the second prompt has the next seed.")
    ] = 0,
    tp: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Split the model over N tensor-parallel ranks, each of which loads and caches its part. "
            "Default: 1; under torchrun, all processes.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"], typer.Option(help="Of weights and products.")
    ] = "float32",
    device: Annotated[
        str,
        typer.Option(
            metavar=METAVAR,
            help="Kind of device; auto: an accelerator for each rank if there is one.",
        ),
    ] = "auto",
    checkpoint: Annotated[
        int | None, typer.Option(metavar="STEP", min=0, help="The run's checkpoint of this step.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on which local ranks meet; 0: any.")] = 0,
    as_json: Json = False,
) -> None:
    """Generate text with a checkpoint's model, whatever layout wrote it, in one process or on several.

    The text is the same on any number of ranks, but for what rounding changes.
    """
    from stretto.cli.output import failures_reported
    from stretto.run.config.schema import LoopConfig
    from stretto.run.evaluate.trained import find_trained
    from stretto.run.generate.job import Request, run_generation
    from stretto.run.generate.text import Sampling, Wording

    check_device(device, "--device")
    if chat_template is not None and not chat:
        raise StrettoError(f"--chat-template {chat_template}: renders messages", hint="add --chat")
    where = find_trained(path, checkpoint).checkpoint
    ranks = tp or int(os.environ.get("WORLD_SIZE", 1))
    stops = stop or []
    wording = Wording.load(where, stop=stops, template=chat_template)
    starts = [_prompt(wording, text, chat) for text in prompt or ()]
    starts += [] if prompts is None else _from_file(wording, prompts, chat)
    starts = starts or [_prompt(wording, "", chat)]
    live = not as_json and len(starts) == 1
    request = Request(
        checkpoint=where,
        prompts=starts,
        sampling=Sampling(
            tokens=tokens, temperature=temperature, top_k=top_k or None, top_p=top_p, seed=seed
        ),
        stop=stops,
        template=chat_template,
        tp=ranks,
        train=LoopConfig(device=device, threads=_threads(ranks)),
        dtype=dtype,
        live=("" if chat else starts[0].text) if live else None,
    )
    with failures_reported():
        result = run_generation(request, port)
    if result.outcome is None:
        from stretto.run.train.launch import exit_code

        raise typer.Exit(exit_code(result))
    if not live and os.environ.get("RANK", "0") == "0":
        _report(where, result.outcome["texts"], chat, as_json)


def _threads(ranks: int) -> int:
    """Of each rank: those that the environment sets, else its part of the cores."""
    return int(os.environ.get("OMP_NUM_THREADS", "0")) or max(1, (os.cpu_count() or 1) // ranks)


def _report(checkpoint: Path, outputs: list[dict[str, Any]], chat: bool, as_json: bool) -> None:
    """Print the texts of several prompts, or of any number as JSON."""
    import json

    whole = [one["text"] if chat else one["prompt"] + one["text"] for one in outputs]
    if as_json:
        facts = {"checkpoint": str(checkpoint), "outputs": outputs}
        print(json.dumps({"text": whole[0], **facts} if len(whole) == 1 else facts))
        return
    for number, text in enumerate(whole):
        print(f"--- {number + 1} of {len(whole)}\n{text}")


def _prompt(wording: Wording, text: str, chat: bool) -> Prompt:
    return wording.chat([{"role": "user", "content": text}]) if chat else wording.prompt(text)


def _from_file(wording: Wording, path: Path, chat: bool) -> list[Prompt]:
    """The prompts of a file."""
    from stretto.run.config.data import ReadOptions
    from stretto.run.data.conversation import Conversation, parse_row
    from stretto.run.data.file_format import suffix_of
    from stretto.run.data.readers import read_rows
    from stretto.run.data.row_errors import RowErrors

    if not path.is_file():
        raise StrettoError(f"{path}: no such file", hint="name a file with a prompt on each line")
    if suffix_of(path.name) not in (".jsonl", ".ndjson", ".json", ".parquet"):
        lines = read_text(path).splitlines()
        return [_prompt(wording, line, chat) for line in lines if line.strip()]
    starts: list[Prompt] = []
    for where, row in read_rows(path, ReadOptions(), RowErrors()):
        text = row.get("prompt")
        if isinstance(text, str):
            starts.append(_prompt(wording, text, chat))
            continue
        one = parse_row(row if "messages" in row else {**row, "messages": text}, where)
        assert isinstance(one, Conversation)
        if not chat:
            raise StrettoError(f"{where}: has messages", hint="--chat answers them")
        messages = list(one.messages)
        while len(messages) > 1 and messages[-1]["role"] == "assistant":  # an answer that data has already
            messages.pop()
        starts.append(wording.chat(messages, one.tools, one.arguments))
    return starts
