"""SVG pictures as PNG, by resvg: a wheel without system libraries, the extra `png`."""

from __future__ import annotations

from stretto.errors import StrettoError

_FAMILIES = "DejaVu Sans"


def png_of(svg: str, zoom: float = 2.0) -> bytes:
    """The PNG of one of our SVG pictures, on its light ground; `zoom` pixels for each of the picture's own.

    Raises:
        StrettoError: the renderer is not installed, or `zoom` makes the picture larger than it can be.
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
