"""A comparison as a table, as JSON, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli.output import memory_size, plain_table
from stretto.view.compare_page import Bar, Figure, compare_page

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stretto.run.compare.comparison import Comparison
    from stretto.run.compare.result import Result

GIB = 2**30

# columns that a narrow terminal leaves out, in this order
_OPTIONAL = ("quartiles", "interval", "pred. memory", "error", "sent", "speed", "memory")


def facts(comparison: Comparison) -> dict[str, Any]:
    """The comparison as the command's JSON; results in the order of the command line."""
    base = comparison.base
    return {
        "title": comparison.title,
        "baseline": None if base is None else base.name,
        "ranking": [one.name for one in comparison.ranked],
        "results": [
            {**asdict(one), "seconds": one.seconds, "speedup": comparison.speedup(one)}
            for one in comparison.results
        ],
        "losses": comparison.losses,
    }


def show(to: Console, comparison: Comparison, written: Path | None) -> None:
    """Print the table, fastest first, then what has no figures, and whether losses agree."""
    to.print(comparison.title, soft_wrap=True, markup=False)
    rows = _rows(comparison)
    if rows:
        to.print(_table(rows, to), soft_wrap=True)
    base = comparison.base
    if base is not None and len(rows) > 1:
        to.print(f"* baseline: {base.name}", soft_wrap=True, markup=False)
    for line in (*_others(comparison), *comparison.losses):
        to.print(line, soft_wrap=True, markup=False)
    if written is not None:
        to.print(f"wrote {written}", soft_wrap=True, markup=False)


def page(comparison: Comparison) -> str:
    """The comparison as an HTML page."""
    rows = _rows(comparison)
    table = [list(rows[0]), *(list(row.values()) for row in rows)] if rows else []
    return compare_page(
        title=f"Comparison of {comparison.title}",
        lines=comparison.losses,
        figures=[_times(comparison), _memories(comparison), _traffic(comparison)],
        table=table,
        others=_others(comparison),
    )


def _others(comparison: Comparison) -> list[str]:
    return [f"{one.status}: {one.name}: {one.error}" for one in comparison.others]


# ------------------------------------------------------------------ the table


def _rows(comparison: Comparison) -> list[dict[str, str]]:
    """Every row with the same columns; columns that no row fills are left out."""
    rows = [_row(comparison, place, one) for place, one in enumerate(comparison.ranked, 1)]
    empty = {name for name in (rows[0] if rows else ()) if not any(row[name] for row in rows)}
    return [{name: cell for name, cell in row.items() if name not in empty} for row in rows]


def _row(comparison: Comparison, place: int, one: Result) -> dict[str, str]:
    speedup = comparison.speedup(one)
    measured = one.status == "done"
    mark = "*" if comparison.base is one else ""
    quartiles = None if one.q1 is None or one.q3 is None else f"{one.q1:.3g}-{one.q3:.3g}"
    interval = None if one.low is None or one.high is None else f"{one.low:.3g}-{one.high:.3g}"
    error = None if one.median is None or one.predicted is None else one.predicted / one.median - 1
    speeds = "samples/s" if one.unit == "samples/s" else "tokens/s"
    return {
        "": f"{place}{mark}",
        "combination": one.name,
        "step s": "" if one.median is None else f"{one.median:.4g}",
        "quartiles": quartiles or "",
        "pred. s": "" if one.predicted is None else f"{one.predicted:.4g}",
        "interval": "" if measured else interval or "",
        "error": "" if error is None else f"{100 * error:+.0f}%",
        "speed": "" if speedup is None else f"{speedup:.2f}x",
        speeds: "" if one.speed is None else f"{one.speed:,.0f}",
        "memory": "" if one.memory is None else memory_size(one.memory),
        "pred. memory": "" if one.predicted_memory is None else memory_size(one.predicted_memory),
        "fits": one.verdict or "",
        "sent": "" if one.traffic is None else memory_size(one.traffic),
        "loss": "" if one.loss is None else f"{one.loss:.4f}",
    }


def _table(rows: Sequence[dict[str, str]], to: Console) -> Table:
    """As many columns as fit the terminal: figures are never cut."""
    from rich.measure import Measurement

    hidden = set[str]()
    while True:
        shown = [name for name in rows[0] if name not in hidden]
        table = plain_table(*shown)
        table.columns[0].min_width = None
        table.columns[1].justify = "left"
        for column in table.columns:
            column.min_width = None
        for row in rows:
            table.add_row(*(row[name] for name in shown))
        wide = Measurement.get(to, to.options.update(max_width=1000), table).maximum
        left = next((name for name in _OPTIONAL if name in shown), None)
        if wide <= to.width or left is None:
            return table
        hidden.add(left)


# ------------------------------------------------------------------ the page's figures


def _times(comparison: Comparison) -> Figure:
    bars = [
        Bar(
            name=_label(comparison, one),
            value=one.median,
            low=one.low if one.median is None else one.q1,
            high=one.high if one.median is None else one.q3,
            predicted=one.predicted,
            text=_both(
                None if one.median is None else f"{one.median:.4g} s",
                None if one.predicted is None else f"{one.predicted:.4g} s",
            ),
        )
        for one in comparison.ranked
    ]
    run = any(one.median is not None for one in comparison.ranked)
    return Figure(
        title="Seconds of a step", bars=bars, span="quartiles" if run else "interval of nine in ten"
    )


def _memories(comparison: Comparison) -> Figure:
    bars = [
        Bar(
            name=_label(comparison, one),
            value=one.memory,
            predicted=one.predicted_memory,
            text=_both(
                None if one.memory is None else memory_size(one.memory),
                None if one.predicted_memory is None else memory_size(one.predicted_memory),
            ),
        )
        for one in comparison.ranked
    ]
    return Figure(title="Memory of the fullest rank", bars=bars)


def _traffic(comparison: Comparison) -> Figure:
    bars = [
        Bar(name=_label(comparison, one), value=one.traffic, text=memory_size(one.traffic))
        for one in comparison.ranked
        if one.traffic is not None
    ]
    return Figure(title="Bytes that the busiest rank sends in a step, counted", bars=bars, key=False)


def _label(comparison: Comparison, one: Result) -> str:
    return one.name + (" (baseline)" if comparison.base is one else "")


def _both(measured: str | None, predicted: str | None) -> str:
    return ", ".join(
        f"{text} {kind}"
        for text, kind in ((measured, "measured"), (predicted, "predicted"))
        if text is not None
    )
