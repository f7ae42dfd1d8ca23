"""`stretto generate`: text from a trained model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stretto.cli.options import CheckpointStep, Json, Port, TrainedRun, grouped
from stretto.cli.output import command_app, failures_reported
from stretto.cli.report import CommandReport
from stretto.errors import Problem, StrettoError, read_text
from stretto.job.devices import METAVAR, check_device

if TYPE_CHECKING:
    from stretto.run.generate.text import Prompt, Wording

app = command_app()


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of `stretto generate`."""

    path: TrainedRun
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="What the text starts with; with --chat the user's message. May be repeated."),
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A prompt a line; in a .jsonl file rows with prompt, or messages to answer (with tools and "
            "chat_template_kwargs).",
        ),
    ] = None
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 100
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Divides the logits; 0: always take the likeliest token.")
    ] = 0.8
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample from this many likeliest tokens; 0: from all.")
    ] = 50
    top_p: Annotated[
        float, typer.Option(help="Of these, from the likeliest that together have this probability; 1: all.")
    ] = 1.0
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A text or special token that ends the text, beside the model's own. May be repeated.",
        ),
    ] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer messages, by the tokenizer's chat template.")
    ] = False
    chat_template: Annotated[
        str | None,
        typer.Option(metavar="FILE|NAME", help="Another template than the tokenizer's default; with --chat."),
    ] = None
    seed: Annotated[
        int, typer.Option(help="The same seed gives the same text; the second prompt has the next seed.")
    ] = 0
    tp: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Split the model over N tensor-parallel ranks, each of which loads and caches its part. "
            "Default: 1; under torchrun, all processes.",
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"], typer.Option(help="Of weights and products.")
    ] = "float32"
    device: Annotated[
        str,
        typer.Option(
            metavar=METAVAR,
            help="Kind of device; auto: an accelerator for each rank if there is one.",
        ),
    ] = "auto"
    checkpoint: CheckpointStep = None
    port: Port = 0
    as_json: Json = False


@app.command(
    epilog="Examples: stretto generate runs/quickstart --prompt 'def ' --tokens 100 --temperature 0.7; "
    "stretto generate runs/chat --chat --prompt 'How are you?'; "
    "stretto generate runs/chat --chat --prompts questions.jsonl --json; "
    "stretto generate runs/llama-70b --tp 8 --dtype bfloat16 --prompt 'Once upon a time'"
)
@grouped(GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Generate text with a checkpoint's model, whatever layout wrote it, in one process or on several.

    The text is the same on any number of ranks, but for what rounding changes.
    """
    from stretto.run.config.schema import LoopConfig
    from stretto.run.evaluate.trained import find_trained
    from stretto.run.generate.job import GenerationJob, run_generation
    from stretto.run.generate.text import Sampling, Wording

    chat, stop = options.chat, options.stop or []
    check_device(options.device, "--device")
    if not abs(options.seed) < 2**63:
        raise Problem("--seed", options.seed, "must be between -2**63 and 2**63", "--seed 0")
    if options.chat_template is not None and not chat:
        raise StrettoError(f"--chat-template {options.chat_template}: renders messages", hint="add --chat")
    checkpoint = find_trained(options.path, options.checkpoint).checkpoint
    ranks = options.tp or int(os.environ.get("WORLD_SIZE", 1))
    wording = Wording.load(checkpoint, stop=stop, template=options.chat_template)
    prompts = [_prompt(wording, text, chat) for text in options.prompt or ()]
    prompts += [] if options.prompts is None else _prompts_from_file(wording, options.prompts, chat)
    prompts = prompts or [_prompt(wording, "", chat)]
    streamed = not options.as_json and len(prompts) == 1
    cores = os.cpu_count() or 1
    request = GenerationJob(
        checkpoint=checkpoint,
        prompts=prompts,
        sampling=Sampling(
            tokens=options.tokens,
            temperature=options.temperature,
            top_k=options.top_k or None,
            top_p=options.top_p,
            seed=options.seed,
        ),
        stop=stop,
        template=options.chat_template,
        tp=ranks,
        train=LoopConfig(
            device=options.device,
            threads=int(os.environ.get("OMP_NUM_THREADS", "0")) or max(1, cores // ranks),
        ),
        dtype=options.dtype,
        live=("" if chat else prompts[0].text) if streamed else None,
    )
    with failures_reported():
        result = run_generation(request, options.port)
    if result.outcome is None:
        from stretto.run.train.launch import exit_code

        raise typer.Exit(exit_code(result))
    if not streamed and os.environ.get("RANK", "0") == "0":
        outputs = result.outcome["texts"]
        texts = [each["text"] if chat else each["prompt"] + each["text"] for each in outputs]
        single = {"text": texts[0]} if len(texts) == 1 else {}
        report = CommandReport({**single, "checkpoint": str(checkpoint), "outputs": outputs})
        for index, text in enumerate(texts, 1):
            report.verbatim(f"--- {index} of {len(texts)}\n{text}\n")
        report.print(options.as_json)


def _prompt(wording: Wording, text: str, chat: bool) -> Prompt:
    return wording.chat([{"role": "user", "content": text}]) if chat else wording.prompt(text)


def _prompts_from_file(wording: Wording, path: Path, chat: bool) -> list[Prompt]:
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
    prompts: list[Prompt] = []
    for origin, row in read_rows(path, ReadOptions(), RowErrors()):
        text = row.get("prompt")
        if isinstance(text, str):
            prompts.append(_prompt(wording, text, chat))
            continue
        conversation = parse_row(row if "messages" in row else {**row, "messages": text}, origin)
        assert isinstance(conversation, Conversation)
        if not chat:
            raise StrettoError(f"{origin}: has messages", hint="--chat answers them")
        messages = list(conversation.messages)
        while len(messages) > 1 and messages[-1]["role"] == "assistant":  # an answer that data has already
            messages.pop()
        prompts.append(wording.chat(messages, conversation.tools, conversation.arguments))
    return prompts
