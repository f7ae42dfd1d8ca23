"""`stretto page`: the page of schedules, layouts, memory, plans and tables as files for a static host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app
from stretto.cli.report import CommandReport
from stretto.errors import StrettoError

app = command_app()


@app.command(
    epilog="Example: stretto page site --pyodide package, where `npm pack pyodide && tar xzf pyodide-*.tgz` "
    "has unpacked Pyodide; then python -m http.server --directory site"
)
def page(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder to write.")],
    pyodide: Annotated[Path, typer.Option(help="Pyodide: the folder of its npm package or of a release.")],
    as_json: Json = False,
) -> None:
    """Write the page of schedules, layouts, memory, plans and tables as a folder, for any static host.

    Python runs in it (WebAssembly): the checker, the replay and the planner are those of the command line,
    and no server answers. `stretto studio` serves the same page with this machine's runs.
    """
    from stretto.web.site import write_site

    if folder.is_dir() and any(folder.iterdir()):
        raise StrettoError(f"{folder} is not empty", hint="name a new folder, or empty it")
    try:
        write_site(folder, pyodide)
    except OSError as error:
        raise StrettoError(f"cannot write {folder}: {error.strerror}") from None
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    report = CommandReport({"path": str(folder), "bytes": size})
    report.line(
        f"wrote {folder}: {size / 2**20:.1f} MiB; look at it: python -m http.server --directory {folder}"
    )
    report.print(as_json)
