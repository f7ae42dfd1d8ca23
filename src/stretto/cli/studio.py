"""`stretto studio`: the page with this machine's runs and proofs."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.options import Json
from stretto.cli.output import command_app
from stretto.cli.report import CommandReport
from stretto.errors import StrettoError

app = command_app()


@app.command(epilog="Example: stretto studio ~/experiments --no-browser")
def studio(
    folder: Annotated[
        Path, typer.Argument(help="The folder with runs/ and your configs; commands run in it.")
    ] = Path("."),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any.")] = 0,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the address in a browser.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Show a page with the runs of a folder as they train, with proofs, schedules, layouts and plans.

    Runs are compared, started, stopped and resumed there. The server listens on this machine alone, and
    answers only those who have the token of the address that it prints; from another machine reach it with
    --port 8500 through ssh -L 8500:127.0.0.1:8500. Ctrl-C ends it; trainings that it has started save first.
    """
    try:
        from stretto.web.server import StudioServer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "anyio"):
            raise
        hint = "pip install 'stretto[studio]'"
        raise StrettoError(f"stretto studio needs {error.name}, which is not installed", hint=hint) from None
    from stretto.web.studio import Studio

    with Studio(folder) as opened:
        server = StudioServer(opened.questions, port, opened.ended)
        report = CommandReport({"address": server.address, "folder": str(opened.folder.root)})
        report.line(f"studio of {opened.folder.root}, until Ctrl-C: {server.address}")
        report.print(as_json)
        sys.stdout.flush()
        if browser and not as_json and (sys.platform in ("darwin", "win32") or "DISPLAY" in os.environ):
            import webbrowser

            webbrowser.open(server.ticket_address())
        for number in (signal.SIGTERM, signal.SIGHUP):  # jobs are ended then too
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
        with suppress(KeyboardInterrupt):
            server.serve()
        if running := opened.jobs.running():
            text = (
                "a job of this studio ends"
                if len(running) == 1
                else f"{len(running)} jobs of this studio end"
            )
            print(f"{text}; Ctrl-C again waits no longer", file=sys.stderr)
            opened.stop_jobs()
