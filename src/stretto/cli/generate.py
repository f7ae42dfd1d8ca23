"""`stretto generate`: text from a trained model."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli.output import Json, command_app
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.run.train.text import Prompt, Writer

app = command_app()


@app.command(
    epilog="Examples: stretto generate runs/quickstart --prompt 'def ' --tokens 100 --temperature 0.7; "
    "stretto generate runs/chat --chat --prompt 'How are you?'; "
    "stretto generate runs/chat --chat --prompts questions.jsonl --json"
)
def generate(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="A run's folder (its newest checkpoint) or a checkpoint."),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="What the text starts with; with --chat the user's message. May be repeated."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A prompt a line; in a .jsonl file rows with prompt, or messages (and tools) to answer.",
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
    as_json: Json = False,
) -> None:
    """Generate text with a checkpoint's model in one process, whatever layout wrote it."""
    import json

    from stretto.run.train.text import Sampling, Writer, find_checkpoint

    where = find_checkpoint(checkpoint)
    writer = Writer.load(
        where,
        check=where == checkpoint,  # a newest checkpoint was checked when it was chosen
        stop=stop or (),
        template=chat_template,
    )
    sampling = Sampling(tokens=tokens, temperature=temperature, top_k=top_k or None, top_p=top_p, seed=seed)
    starts = [_prompt(writer, text, chat) for text in prompt or ()]
    starts += [] if prompts is None else _from_file(writer, prompts, chat)
    starts = starts or [_prompt(writer, "", chat)]
    if not as_json and len(starts) == 1:
        sys.stdout.write("" if chat else starts[0].text)
        for piece in writer.stream(starts[0], sampling):
            sys.stdout.write(piece)
            sys.stdout.flush()
        print()
        return
    written = writer.write(starts, sampling)
    whole = [one.text if chat else one.prompt + one.text for one in written]
    if as_json:
        facts = {"checkpoint": str(where), "outputs": [asdict(one) for one in written]}
        print(json.dumps({"text": whole[0], **facts} if len(whole) == 1 else facts))
        return
    for number, text in enumerate(whole):
        print(f"--- {number + 1} of {len(whole)}\n{text}")


def _prompt(writer: Writer, text: str, chat: bool) -> Prompt:
    return writer.chat([{"role": "user", "content": text}]) if chat else writer.prompt(text)


def _from_file(writer: Writer, path: Path, chat: bool) -> list[Prompt]:
    """The prompts of a file."""
    from stretto.run.data.conversation import Conversation, parse_row
    from stretto.run.data.readers import read_rows

    if not path.is_file():
        raise StrettoError(f"{path}: no such file", hint="name a file with a prompt on each line")
    if ".jsonl" not in path.suffixes:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [_prompt(writer, line, chat) for line in lines if line.strip()]
    starts: list[Prompt] = []
    for where, row in read_rows(path):
        text = row.get("prompt")
        if isinstance(text, str):
            starts.append(_prompt(writer, text, chat))
            continue
        one = parse_row(row if "messages" in row else {"messages": text}, where)
        assert isinstance(one, Conversation)
        if not chat:
            raise StrettoError(f"{where}: has messages", hint="--chat answers them")
        messages = list(one.messages)
        while len(messages) > 1 and messages[-1]["role"] == "assistant":  # an answer that data has already
            messages.pop()
        starts.append(writer.chat(messages, one.tools))
    return starts
