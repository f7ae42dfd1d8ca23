"""`stretto config`: a config as it resolves, or the reference of every field."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from stretto.cli import interop
from stretto.cli.interop import Emit, Output
from stretto.cli.options import Json, Overrides
from stretto.cli.output import command_app
from stretto.cli.report import CommandReport
from stretto.errors import StrettoError

app = command_app()


@app.command(epilog="Example: stretto config configs/quickstart.yaml optim.lr=3e-4")
def config(
    path: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A YAML file.")] = None,
    overrides: Overrides = None,
    reference: Annotated[bool, typer.Option(help="Print the reference of every field (Markdown).")] = False,
    every: Annotated[bool, typer.Option("--all", help="Print every field, defaults included.")] = False,
    check: Annotated[bool, typer.Option(help="Check fields against each other and this machine.")] = True,
    emit: Emit = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Check CONFIG and print what it sets, or every field, or the job as another framework takes it.

    A schedule or another part that CONFIG names as FILE.py:NAME is tried, so its file is run.
    """
    from stretto.cli.jobs import check_job
    from stretto.cli.jobs import reference as reference_page
    from stretto.recommender.config.load import load_config
    from stretto.run.config.load import dump, plain_values
    from stretto.run.config.schema import TrainConfig

    target = interop.framework_named(emit, {"output": output})
    if reference:
        page = reference_page()
        report = CommandReport({"reference": page})
        report.verbatim(page)
        report.print(as_json)
        return
    if path is None:
        raise StrettoError("no config given", hint="stretto config configs/quickstart.yaml, or --reference")
    job = load_config(path, overrides or [])
    if check:
        check_job(job)
    if emit is not None:
        emitted = interop.emit.emitted_config(target, job, path)
        report = CommandReport({"emitted": emitted})
        if output is not None or not as_json:
            interop.print_emitted(emitted, output)
    else:
        report = CommandReport(plain_values(job))
        report.verbatim(dump(job, defaults=every))
        if isinstance(job, TrainConfig) and job.model.preset is not None:
            model, changed = job.model, list[str]()
            for each in fields(model):
                factory: Any = each.default_factory
                default = factory() if each.default is MISSING else each.default
                changed += [each.name] if getattr(model, each.name) != default else []
            if changes := ", ".join(name for name in changed if name != "preset"):
                report.line(f"# these fields of model outweigh the preset {model.preset}: {changes}")
        if not every:
            report.line("# all other fields have their defaults: --all prints them too")
    report.print(as_json)
