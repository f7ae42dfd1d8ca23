"""`stretto init`: a config to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app
from stretto.cli.report import CommandReport
from stretto.errors import StrettoError, nearest
from stretto.versions import CONFIG

app = command_app()


@app.command(epilog="Example: stretto init quickstart; stretto train quickstart.yaml")
def init(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="An example; without: list them.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; default: NAME.yaml in this folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write an example config, with comments, to change and train; or list the examples.

    `stretto train NAME` trains an example as it is.
    """
    from stretto.run.config.load import EXAMPLES, example_configs

    examples = example_configs()
    if name is None:
        report = CommandReport({"examples": examples})
        for each, about in examples.items():
            report.value(each, about, max(map(len, examples)) + 2)
        report.line("stretto init NAME writes one into this folder; stretto train NAME trains it as it is")
        report.print(as_json)
        return
    if name not in examples:
        closest = nearest(name, examples)
        raise StrettoError(
            f"there is no example {name!r}",
            hint=f"did you mean {closest}?" if closest else f"there is {', '.join(examples)}",
        )
    path = out or Path(f"{name}.yaml")
    if path.exists():
        raise StrettoError(f"{path} exists", hint="remove it, or --out OTHER.yaml")
    example = (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")
    report = CommandReport({"path": str(path), "example": name})
    comment, text = example.replace(f"configs/{name}.yaml", str(path)).split("\n\n", 1)
    report.write(path, f"{comment}\n\nversion: {CONFIG.version}  # of the fields\n\n{text}")
    report.line(f"check:  stretto config {path}")
    report.line(f"train:  stretto train {path}")
    report.print(as_json)
