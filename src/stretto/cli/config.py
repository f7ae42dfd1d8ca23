"""`stretto config`: a config as it resolves, or the reference of every field."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli import interop
from stretto.cli.interop import Emit, Output
from stretto.cli.options import Json
from stretto.cli.output import command_app, report
from stretto.errors import StrettoError

app = command_app()


@app.command(epilog="Example: stretto config configs/quickstart.yaml optim.lr=3e-4")
def config(
    path: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A YAML file.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="Fields to override.")
    ] = None,
    reference: Annotated[bool, typer.Option(help="Print the reference of every field (Markdown).")] = False,
    every: Annotated[bool, typer.Option("--all", help="Print every field, defaults included.")] = False,
    check: Annotated[bool, typer.Option(help="Check fields against each other and this machine.")] = True,
    emit: Emit = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Check CONFIG and print what it sets, or every field, or the job as another framework takes it."""
    target = interop.framework_named(emit, {"output": output})
    if reference:
        from stretto.cli.jobs import reference as text

        shown = text()
        report({"reference": shown}, as_json, lambda _: print(shown, end=""))
        return
    if path is None:
        raise StrettoError("no config given", hint="stretto config configs/quickstart.yaml, or --reference")
    from stretto.cli.jobs import check_job
    from stretto.recommender.config.load import load_config
    from stretto.run.config.load import dump, plain_values

    job = load_config(path, overrides or [])
    if check:
        check_job(job)
    if emit is not None:
        text = interop.emit.emitted_config(target, job, path)
        if output is not None or not as_json:
            interop.print_emitted(text, output)
        report({"emitted": text}, as_json, lambda _: None)
        return
    report(plain_values(job), as_json, lambda _: print(dump(job, defaults=every), end="" if every else _ALL))


_ALL = "# all other fields have their defaults: --all prints them too\n"
