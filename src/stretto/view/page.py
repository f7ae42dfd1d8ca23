"""The front end as pages: of the studio, of Python in a worker, or of answers that the page carries."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from stretto.view.panel import Panel
from stretto.view.panel_record import panels_record

Table = tuple[str, Sequence[Sequence[str]]]  # caption, and rows whose first is the header

FRONT = files("stretto.view") / "front"

# name of each module in imports, and its file
MODULES = {
    "preact": "vendor/preact.js",
    "preact/hooks": "vendor/hooks.js",
    "htm": "vendor/htm.js",
    "uplot": "vendor/uplot.js",
    **{f"stretto/{path.name[:-3]}": path.name for path in FRONT.iterdir() if path.name.endswith(".js")},
}
STYLES = ("vendor/uplot.css", "style.css")
# a page may load what lies beside it; nothing of another host
STUDIO_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:"
)
_WORKER_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline' data: 'wasm-unsafe-eval'; connect-src 'self'; "
    "style-src 'unsafe-inline'; img-src data: blob:; worker-src 'self'"
)
_RECORDED_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data: blob:"
)


def studio_page() -> str:
    """The page of `stretto studio`, whose modules lie beside it."""
    imports = {name: f"./{file}" for name, file in MODULES.items()}
    head = [f'<link rel="stylesheet" href="{style}">' for style in STYLES]
    head.append(f'<script type="importmap">{json.dumps({"imports": imports})}</script>')
    return _filled(
        backend="studio",
        policy=STUDIO_POLICY,
        title="Stretto",
        head="\n".join(head),
        body='<script type="module">import "stretto/app";</script>',
    )


def worker_page(first: Mapping[str, Any]) -> str:
    """The page beside which Python lies. Its modules are in it, so that it opens from a folder, too.

    Args:
        first: the `questions` that the worker answers, and the `answers`, by the JSON of their questions,
            that need not wait for it.
    """
    body = f'<script id="first" type="application/json">{script_json(first)}</script>\n'
    return _in_one_file("worker", _WORKER_POLICY, "Stretto", body, 'import("stretto/app");')


def recorded_page(title: str, view: str, answers: Mapping[str, Any]) -> str:
    """A page of one view in one file, which carries the answers to its questions and loads nothing.

    Args:
        view: the view's id.
        answers: the answer of each question that the view asks.
    """
    start = f'location.hash ||= "#{view}"; import("stretto/app");'
    body = f'<script id="answers" type="application/json">{script_json(answers)}</script>\n'
    return _in_one_file("recorded", _RECORDED_POLICY, escape(title), body, start)


def _in_one_file(backend: str, policy: str, title: str, body: str, start: str) -> str:
    """The page with its styles and modules in it, which `start` then starts."""
    imports = {name: _data_address(file) for name, file in MODULES.items()}
    head = [f"<style>{_text(style)}</style>" for style in STYLES]
    head.append(f'<script type="importmap">{json.dumps({"imports": imports})}</script>')
    return _filled(
        backend=backend,
        policy=policy,
        title=title,
        head="\n".join(head),
        body=f'{body}<script type="module">{start}</script>',
    )


def timeline_page(
    title: str, panels: Sequence[Panel], *, above: Sequence[Table] = (), below: Sequence[Table] = ()
) -> str:
    """A page of timelines under one time axis, in one file.

    Args:
        above, below: captions and rows of tables; the first row is the header.
    """
    answer = {
        "title": title,
        "above": [{"caption": caption, "rows": rows} for caption, rows in above],
        "below": [{"caption": caption, "rows": rows} for caption, rows in below],
        "timelines": panels_record(panels),
    }
    return recorded_page(title, "timelines", {"timelines": answer})


def script_json(data: Any) -> str:
    """Data as JSON that is safe in a script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _filled(**parts: str) -> str:
    """The template with its parts, in one pass, so that inserted text is not substituted again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _text("index.html"))


@cache
def _text(name: str) -> str:
    return (FRONT / name).read_text(encoding="utf-8")


def _data_address(name: str) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(_text(name).encode()).decode()}"
