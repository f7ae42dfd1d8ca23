"""The directive `live`: a figure that a command has drawn, and that the interactive page draws anew while the
reader changes it.

    ```{live} schedules?programs=[{"name":"1f1b"}]&ranks=4&microbatches=8
    :still: stretto schedule 1f1b --ranks 4 --microbatches 8 --svg
    :alt: what the picture shows
    :height: 480
    ```

The argument is the page's view and state, as in its address (src/stretto/view/front/state.js). The command of
the still runs when the site is built; after `--svg` it gets a file, else its output is shown.
"""

from __future__ import annotations

import hashlib
import io
import os
import shlex
import shutil
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock
from urllib.parse import parse_qsl, quote, urlencode

from docutils import nodes
from docutils.parsers.rst import directives
from labels import label
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.writers.html5 import HTML5Translator

from stretto.cli import main

ROOT = Path(__file__).parents[2]
STILLS = "_stills"  # folder of the site, and of docs/_cache


class live(nodes.General, nodes.Element):  # noqa: N801
    """A still, and the address of the page that takes its place; its only child is the alternative text."""


class Live(SphinxDirective):
    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar[dict[str, Any]] = {
        "still": directives.unchanged_required,
        "alt": directives.unchanged_required,
        "height": directives.positive_int,
    }

    def run(self) -> list[nodes.Node]:
        if missing := {"still", "alt"} - self.options.keys():
            raise self.error(f"live takes :{sorted(missing)[0]}:")
        view, _, query = self.arguments[0].partition("?")
        state = urlencode(parse_qsl(query, keep_blank_values=True), quote_via=quote)
        command = " ".join(self.options["still"].split())
        if not command.startswith("stretto "):
            raise self.error(f"the still is no stretto command: {command}")
        node = live(
            address=f"{view}?{state}" if state else view,
            command=command,
            height=self.options.get("height", 480),
        )
        alt = nodes.paragraph(self.options["alt"], self.options["alt"])
        self.set_source_info(alt)
        node += alt
        return [node]


@cache
def source_digest() -> str:
    """A digest of all that a still may depend on."""
    digest = hashlib.sha256()
    folders = (ROOT / "src", ROOT / "configs", ROOT / "examples")
    for path in sorted(path for folder in folders for path in folder.rglob("*")):
        if path.suffix in (".py", ".yaml") and path.is_file():
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def still(command: str, cache_folder: Path) -> Path:
    """The picture or the output of a command, made once for a state of the sources."""
    key = hashlib.sha256(f"{command}\0{source_digest()}".encode()).hexdigest()[:16]
    draws = command.endswith(" --svg")
    path = cache_folder / f"{key}{'.svg' if draws else '.txt'}"
    if path.exists():
        return path
    cache_folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    arguments = [*shlex.split(command)[1:], *([str(unfinished)] if draws else [])]
    printed, errors = io.StringIO(), io.StringIO()
    # in this process, which imports the package once for all stills
    with (
        chdir(ROOT),
        mock.patch.dict(os.environ, NO_COLOR="1", COLUMNS="100"),
        redirect_stdout(printed),
        redirect_stderr(errors),
    ):
        code = main.run(arguments)
    if code:
        raise RuntimeError(f"{command}: {errors.getvalue()}")
    if not draws:
        unfinished.write_text(printed.getvalue(), encoding="utf-8")
    unfinished.replace(path)
    return path


def visit_live(self: HTML5Translator, node: live) -> None:
    picture = still(node["command"], Path(self.builder.srcdir) / "_cache" / STILLS)
    root = "../" * self.builder.current_docname.count("/")
    alt, config = escape(node.astext()), self.config
    page = f"{root}{'../' if config.language.startswith('zh') else ''}page/index.html"
    address = escape(f"{page}#{node['address']}")
    if picture.suffix == ".svg":
        folder = Path(self.builder.outdir) / STILLS
        folder.mkdir(exist_ok=True)
        shutil.copyfile(picture, folder / picture.name)
        shown = f'<img src="{root}{STILLS}/{picture.name}" alt="{alt}">'
    else:
        shown = f"<pre>{escape(picture.read_text(encoding='utf-8'))}</pre>"
    self.body.append(
        f'<figure class="live" data-address="{address}" data-height="{node["height"]}" data-title="{alt}">\n'
        f'<div class="live-still" role="group" aria-label="{alt}">{shown}</div>\n<figcaption>\n'
    )
    if config.live_page:
        texts = {
            "back": "Back to the picture",
            "wait": "Starting Python in this browser, some seconds the first time",
            "file": "This figure runs in a browser once a web server serves the site",
        }
        data = " ".join(f'data-{name}="{label(config, text)}"' for name, text in texts.items())
        self.body.append(
            f'<button type="button" hidden {data}>{label(config, "Try it")}</button>\n'
            f'<a href="{address}">{label(config, "Open as a page")}</a>\n<span role="status"></span>\n'
        )
    typed = escape(node["command"].removesuffix(" --svg"))
    self.body.append(f"<code>{typed}</code>\n</figcaption>\n</figure>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("live_page", False, "html", bool)
    app.add_node(live, html=(visit_live, None))
    app.add_directive("live", Live)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
