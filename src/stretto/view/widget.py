"""A timeline in a notebook that pans and zooms, and whose selected action Python knows (anywidget)."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from stretto.errors import StrettoError, nearest
from stretto.program.replay.timeline import Event
from stretto.view.page import FRONT
from stretto.view.panel import with_path
from stretto.view.panel_record import panels_record

if TYPE_CHECKING:
    from stretto.program.replay import Timeline

_IMPORT = re.compile(r'^import \{[^}]*\} from "stretto/(\w+)";\n', re.MULTILINE)


def timeline_widget(timeline: Timeline) -> Any:
    """Return a widget that draws a timeline in Jupyter and other notebooks, a subclass of anywidget's.

    Drag to pan, Ctrl and the wheel to zoom, click or Enter to select. Its traits can be set and observed:

        selected: name of the selected action, such as "2F0", or None; another raises StrettoError.
        view: the times [from, to] that are shown, or None until they change.

    Its property `event` is the selected action with its rank, start and end, or None.

    Raises:
        StrettoError: anywidget is not installed.
    """
    panel = with_path(timeline)
    events = {str(b.action): Event(b.row, b.action, b.start, b.end) for b in panel.blocks}
    return _widget_class()(data=panels_record([panel]), css=shadow_style(), events=events)


@cache
def _widget_class() -> Any:
    try:
        import anywidget  # pyright: ignore[reportMissingImports]
        import traitlets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise StrettoError(
            "widgets need the package anywidget, which is not installed",
            hint="pip install 'stretto[notebook]'",
        ) from None

    class TimelineWidget(anywidget.AnyWidget):  # pyright: ignore[reportUntypedBaseClass]
        _esm = joined_module("widget")
        data = traitlets.Dict().tag(sync=True)
        css = traitlets.Unicode().tag(sync=True)
        selected = traitlets.Unicode(None, allow_none=True).tag(sync=True)
        view = traitlets.List(traitlets.Float(), None, allow_none=True).tag(sync=True)

        def __init__(self, events: dict[str, Event], **traits: Any) -> None:
            super().__init__(**traits)
            self.events = events

        @traitlets.validate("selected")
        def _check_selected(self, proposal: Any) -> str | None:
            name = proposal["value"]
            if name is not None and name not in self.events:
                similar = nearest(name, self.events)
                raise StrettoError(
                    f"selected is {name!r}, which is no action of this timeline",
                    hint=f"did you mean {similar!r}?" if similar else "an action is written as in 2F0",
                )
            return name

        def __repr__(self) -> str:
            return f"TimelineWidget({self.data['panels'][0]['title']!r}, selected={self.selected!r})"

        @property
        def event(self) -> Event | None:
            return self.events.get(self.selected or "")

    return TimelineWidget


@cache
def joined_module(name: str) -> str:
    """Return a module of the front end with those that it imports, as one module that imports nothing."""
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        text = (FRONT / f"{name}.js").read_text(encoding="utf-8")
        for imported in _IMPORT.findall(text):
            if imported not in parts:
                add(imported)
        parts[name] = re.sub(r"^export (?!default)", "", _IMPORT.sub("", text), flags=re.MULTILINE)

    add(name)
    return "\n".join(parts.values())


@cache
def shadow_style() -> str:
    """Return the front end's style sheet for a shadow tree, whose root is `:host`."""
    text = (FRONT / "style.css").read_text(encoding="utf-8")
    return re.sub(r":root(\S*)", lambda match: f":host({match[1]})" if match[1] else ":host", text)
