"""Write docs/gallery.md and its pictures: every schedule at 4 ranks and 8 microbatches, replayed.

Run it after a schedule has changed: python docs/make_gallery.py
"""

from __future__ import annotations

import textwrap
import tomllib
from pathlib import Path
from typing import Any

from stretto import schedule, simulate
from stretto.program import names
from stretto.program.replay import Timeline
from stretto.view.panel import held, peak
from stretto.view.panel_svg import timeline_svg

RANKS, MICROBATCHES = 4, 8
HERE = Path(__file__).parent
PICTURES = HERE / "pictures" / "gallery"

INTRO = f"""# Gallery of schedules

Every schedule that Stretto knows, with {RANKS} ranks and {MICROBATCHES} microbatches. Figures and pictures
come from the replay: a rank's share of a microbatch takes 1 each for the forward F, the input gradient I
and the weight gradient W (a full backward B takes 2), and transfers take no time. This page is written by
`docs/make_gallery.py`.

A number in a block is its microbatch. Its colour is the kind of action, its shade the chunk or the copy of
the weights; hatched is idle time, and the grey curve under a rank is the memory of its activations.
*Makespan* is the time at which all ranks are done, and *bubble* its idle part. *Own idle* is the longest that
a rank is idle between its own first and last action, which is what counts where nothing synchronises the
ranks. *Held* is the most activations on any rank, where one microbatch through all stages of a rank is 1.
*Least* is a lower bound: no order of the same work on the same placement beats it.

For a larger picture with zoom and the dependencies of every block: `stretto schedule zb-v --ranks {RANKS}
--microbatches {MICROBATCHES} --html page.html`. To compare several: `stretto schedule
--compare gpipe,1f1b,zb-v ...`.
"""


def texts() -> dict[str, dict[str, Any]]:
    """Source, text and options of each schedule, by name."""
    return tomllib.loads((HERE / "gallery_texts.toml").read_text(encoding="utf-8"))


def timelines() -> list[Timeline]:
    """Every schedule there is, replayed."""
    said = texts()
    return [
        simulate(schedule(name, RANKS, MICROBATCHES, **said.get(name, {}).get("options", {})))
        for name in names()
    ]


def page(shown: list[Timeline]) -> str:
    """The page's text."""
    said, about = texts(), names()
    parts = [_wrapped(INTRO), _table(shown)]
    for name, timeline in zip(about, shown, strict=True):
        entry = said.get(name, {"text": about[name][0].upper() + about[name][1:] + ".", "source": ""})
        source = f"Source: {entry['source']}." if entry["source"] else ""
        parts.append(f"## {name}\n\n![{name}](pictures/gallery/{name}.svg)")
        parts.append(_fill(entry["text"]))
        parts.append(_fill(f"{source} {_figures(timeline)}"))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def pictures(shown: list[Timeline]) -> dict[str, str]:
    """The SVG pictures by file name."""
    return {f"{name}.svg": timeline_svg(timeline) for name, timeline in zip(names(), shown, strict=True)}


def _table(shown: list[Timeline]) -> str:
    rows = ["| schedule | makespan | least | bubble | own idle | held | copies of weights | transfers |"]
    rows.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, timeline in zip(names(), shown, strict=True):
        cells = (
            f"[{name}](#{name})",
            f"{timeline.makespan:g}",
            f"{timeline.bound:g}",
            f"{timeline.bubble.rate:.1%}",
            f"{timeline.bubble.span:g}",
            f"{max(map(peak, held(timeline))):g}",
            f"{timeline.program.copies * max(timeline.weight_versions)}",
            f"{timeline.transfers}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _figures(timeline: Timeline) -> str:
    """The figures as a sentence."""
    by_rank = [f"{peak(curve):g}" for curve in held(timeline)]
    holds = f"every rank holds at most {by_rank[0]}"
    if len(set(by_rank)) > 1:
        holds = f"ranks hold at most {', '.join(by_rank)}"
    options = {key: value for key, value in timeline.program.parameters.items() if key in ("waves", "group")}
    if timeline.program.parameters.get("chunks", 1) > 1:
        options = {"chunks": timeline.program.parameters["chunks"], **options}
    with_ = f" with {', '.join(f'{key}={value}' for key, value in options.items())}" if options else ""
    return (
        f"Here{with_}: makespan {timeline.makespan:g}, bubble {timeline.bubble.barrier:g} "
        f"({timeline.bubble.rate:.1%}), {holds}, {timeline.transfers} transfers."
    )


def _fill(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 100, break_long_words=False, break_on_hyphens=False)


def _wrapped(text: str) -> str:
    head, *paragraphs = text.split("\n\n")
    return "\n\n".join([head, *map(_fill, paragraphs)])


def main() -> None:
    """Write the page and its pictures."""
    shown = timelines()
    (HERE / "gallery.md").write_text(page(shown), encoding="utf-8")
    PICTURES.mkdir(exist_ok=True)
    fresh = pictures(shown)
    for old in PICTURES.glob("*.svg"):
        if old.name not in fresh:
            old.unlink()
    for name, svg in fresh.items():
        (PICTURES / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
