"""`stretto generate`: text from a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.output import Json, command_app

app = command_app()


@app.command(
    epilog="Example: stretto generate runs/quickstart --prompt 'def ' --tokens 100 --temperature 0.7"
)
def generate(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="A run's folder (its newest checkpoint) or a checkpoint."),
    ],
    prompt: Annotated[str, typer.Option(help="What the text starts with.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Divides the logits; 0: always take the likeliest token.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample from this many likeliest tokens; 0: from all.")
    ] = 50,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    as_json: Json = False,
) -> None:
    """Generate text with a checkpoint's model in one process, whatever layout wrote it."""
    import json
    import sys

    from stretto.run.train.text import find_checkpoint, load_model, load_tokenizer, write

    where = find_checkpoint(checkpoint)
    model = load_model(where, check=where == checkpoint)  # a newest checkpoint was checked when it was chosen
    tokenizer = load_tokenizer(where)
    pieces = write(
        model=model,
        tokenizer=tokenizer,
        prompt=prompt,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k or None,
        seed=seed,
    )
    if as_json:
        print(json.dumps({"text": prompt + "".join(pieces), "checkpoint": str(where)}))
        return
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
