"""How a notebook shows objects of lower folders: by functions of `view`, imported when a cell shows one.

The one way from a folder up to `view`: a notebook asks the object for its picture (`_repr_svg_`,
`_repr_html_`), and pictures are drawn above all that they show.
"""

from __future__ import annotations

from importlib import import_module


def render(function: str, value: object) -> str | None:
    """Return what a function of `stretto.view.notebook` makes of the value; None if it has no picture."""
    return getattr(import_module("stretto.view.notebook"), function)(value)
