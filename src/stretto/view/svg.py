"""Building blocks of SVG pictures, and their conversion to PNG by resvg (the extra `png`)."""

from __future__ import annotations

from html import escape

from stretto.errors import StrettoError

FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"

_STYLE = f"""
text {{ font-family: {FONT}; fill: #1f2328; }}
.ground {{ fill: #ffffff; stroke: #d1d9e0; }}
.quiet {{ fill: #59636e; }}
.line {{ stroke: #8c959f; }}
.idle {{ fill: #f3f4f6; }}
.hatch {{ stroke: #d3d8de; }}
.box {{ fill: none; stroke: #8c959f; }}
.numbers {{ font-size: 13px; text-anchor: middle; }}
.numbers text {{ fill: #000000; }}
.numbers .light {{ fill: #ffffff; }}
.held {{ fill: #b9c0c9; }}
.base {{ stroke: #b9c0c9; stroke-width: 0.5; }}
.mark {{ stroke: #26262e; stroke-width: 2; }}
.row rect {{ stroke: #57606a; stroke-opacity: 0.4; stroke-width: 0.5px; }}
.pair {{ stroke: #26262e; stroke-width: 1.5; }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e6edf3; }}
.ground {{ fill: #0d1117; stroke: #3d444d; }}
.quiet {{ fill: #9198a1; }}
.line {{ stroke: #656c76; }}
.idle {{ fill: #1c2128; }}
.hatch {{ stroke: #363d47; }}
.box {{ stroke: #656c76; }}
.held {{ fill: #4a525d; }}
.base {{ stroke: #4a525d; }}
.mark {{ stroke: #e6edf3; }}
.pair {{ stroke: #e6edf3; }}
.row rect {{ stroke: #6e7681; stroke-opacity: 1; stroke-width: 0.75px; }}
}}"""


def element(name: str, body: str = "", /, **attributes: str | float) -> str:
    """Return one element; `_` in an attribute's name becomes `-`, a trailing one is dropped (`class_`)."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items()
    )
    return f"<{name}{pairs}>{body}</{name}>" if body else f"<{name}{pairs}/>"


def text_line(text: str, x: float, y: float, size: float = 12, **attributes: str | float) -> str:
    """Return a line of text with its baseline at y."""
    return element("text", escape(text), x=x, y=y, font_size=size, **attributes)


def page(width: float, height: float, title: str, about: str, parts: list[str], definitions: str = "") -> str:
    """Return a complete document; `about` describes the picture for screen readers."""
    ground = element("rect", x=0.5, y=0.5, width=width - 1, height=height - 1, rx=6, class_="ground")
    head = [
        element("title", escape(title)),
        element("desc", escape(about)),
        element("style", _STYLE + "\n"),
        element("defs", definitions) if definitions else "",
    ]
    body = "\n".join(part for part in [*head, ground, *parts] if part)
    return (
        element(
            "svg",
            f"\n{body}\n",
            xmlns="http://www.w3.org/2000/svg",
            width=width,
            height=height,
            viewBox=f"0 0 {_value(width)} {_value(height)}",
            role="img",
        )
        + "\n"
    )


def _value(value: str | float) -> str:
    return (
        escape(value) if isinstance(value, str) else f"{round(value, 2):g}" if value < 1e5 else f"{value:.0f}"
    )


_FAMILIES = "DejaVu Sans"


def png_of(svg: str, zoom: float = 2.0) -> bytes:
    """Return an SVG picture of this module as PNG with a light background, magnified by `zoom`.

    Raises:
        StrettoError: the renderer is not installed, or the picture is too large for it.
    """
    try:
        from resvg_py import svg_to_bytes  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise StrettoError(
            "PNG pictures need the package resvg_py, which is not installed",
            hint="pip install 'stretto[png]', or write the picture with --svg",
        ) from None
    try:
        return bytes(svg_to_bytes(svg_string=svg, zoom=zoom, sans_serif_family=_FAMILIES))
    except ValueError as error:
        raise StrettoError(
            f"the picture cannot be drawn as PNG: {error}", hint="write it with --svg"
        ) from None
