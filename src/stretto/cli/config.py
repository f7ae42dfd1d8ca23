"""`stretto config`: a config as it resolves, or the reference of every field."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.face import Json, command_app, report
from stretto.errors import StrettoError

app = command_app()


@app.command(epilog="Example: stretto config configs/quickstart.yaml optim.lr=3e-4")
def config(
    path: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A YAML file.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="Fields to override.")
    ] = None,
    reference: Annotated[bool, typer.Option(help="Print the reference of every field (Markdown).")] = False,
    check: Annotated[bool, typer.Option(help="Check fields against each other and this machine.")] = True,
    as_json: Json = False,
) -> None:
    """Check CONFIG and print it with every field filled in."""
    if reference:
        from stretto.run.config.reference import reference as text

        shown = text()
        report({"reference": shown}, as_json, lambda _: print(shown, end=""))
        return
    if path is None:
        raise StrettoError("no config given", hint="stretto config configs/quickstart.yaml, or --reference")
    from stretto.recommender.config.check import check as check_recommender
    from stretto.recommender.config.load import load_config
    from stretto.run.config.check import check as check_language
    from stretto.run.config.load import dump
    from stretto.run.config.schema import TrainConfig

    found = load_config(path, overrides or [])
    if check:
        if isinstance(found, TrainConfig):
            check_language(found)
        else:
            check_recommender(found)
    report(found.model_dump(mode="json"), as_json, lambda _: print(dump(found), end=""))
