"""A search of layouts as one HTML page: ranking, time against memory, parts of the step, memory, timeline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

from stretto.errors import StrettoError
from stretto.planner.estimate import NOISE, Estimate, timeline_of
from stretto.view.html import panels_html, table_html
from stretto.view.panel import Panel, panel
from stretto.view.plan_charts import PATTERNS, device_memory_bars, memory_bars, points_key, scatter, step_bars
from stretto.view.plan_texts import GIB, counts, differences, doubts_text, setting

if TYPE_CHECKING:
    from stretto.planner.assumptions import Assumptions
    from stretto.planner.memory.fits import Bytes
    from stretto.planner.search.ranking import Plan, Ranked

_MOST_BLOCKS = 20_000  # of the timeline; more are slow to draw and show nothing new


def plan_page(plan: Plan, model: str, commands: Mapping[str, str] | None = None) -> str:
    """The page for a model of that name; it loads nothing.

    Args:
        commands: to go on with, by what each does.

    Raises:
        StrettoError: no layout was timed, so there is nothing to draw.
    """
    first = plan.ranking[0] if plan.ranking else plan.nearest
    if first is None:
        raise StrettoError("no layout was timed, so there is nothing to draw", hint="ask for less at once")
    estimate = first.estimate
    job, cluster = estimate.job, estimate.cluster
    about = setting(job, cluster, plan.assumptions, model)
    parts = [PATTERNS, _facts({**about, "search": counts(plan)}), _answer(plan, first)]
    if plan.ranking:
        parts.append(f"<h2>Ranking</h2>{table_html(_ranking(plan), 'The best first; click a name to sort')}")
    parts += [
        f"<h2>Time against memory</h2>{points_key(plan.evaluated)}",
        _scatter(plan, cluster.device.memory),
        f"<h2>Where the step goes</h2>{step_bars(plan.ranking or [first])}",
    ]
    if len(plan.ranking) > 1:
        caption = (
            f"Seconds that each needs more than the first, {first.layout}; "
            f"two measurements of one layout differ by {100 * NOISE:.1f}%"
        )
        parts.append(f"<h2>How the others differ</h2>{table_html(differences(plan.ranking), caption)}")
    if estimate.memory is not None:
        parts.append(
            f"<h2>Memory of the fullest rank, by layout</h2>{device_memory_bars(plan.ranking or [first])}"
        )
        every = len(estimate.memory.ranks) == job.layout.pp
        ranks = "every pipeline rank" if every else "the pipeline ranks that can be the fullest"
        parts.append(f"<h2>Memory of {ranks}, of the first</h2>{memory_bars(estimate.memory)}")
    parts += [_rejected(plan), _commands(commands or {}), "<h2>The step of the first, replayed</h2>"]
    title = f"Plan of {model} on {about['cluster'].partition(' (')[0]}"
    return panels_html(
        [_timeline(estimate, plan.assumptions)], title, above="\n".join(parts), more="page_plan"
    )


def _facts(facts: Mapping[str, str]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return f'<dl class="facts">{items}</dl>'


def _answer(plan: Plan, first: Ranked) -> str:
    """The layouts to choose from: the first, the fastest safe one, and what people run without a search."""
    if not plan.ranking:
        outcome = "Nothing fits" if plan.complete else "Cut short: nothing found that fits so far"
        cards = [_card(f"{outcome}; nearest", first, None)]
    else:
        named = {"Safe: the fastest that certainly fits": plan.safe}
        named |= {f"Plain: {name}": one for name, one in plan.baselines.items()}
        cards = [_card("First", first, None)]
        for name, one in named.items():
            same = one is not None and one.layout == first.layout
            cards.append(_note(name, same) if one is None or same else _card(name, one, first.estimate))
    return f'<div class="answers">{"".join(cards)}</div>'


def _note(name: str, same: bool) -> str:
    text = "it is the first" if same else "none was found"
    return f"<section><h2>{escape(name)}</h2><p>{text}</p></section>"


def _card(name: str, one: Ranked, than: Estimate | None) -> str:
    """One layout with its figures; `than`: the fastest, from which the distance is shown."""
    estimate, fit = one.estimate, one.estimate.memory
    figures = [
        f"<b>{estimate.seconds:.4g} s</b> a step ({estimate.low:.3g} to {estimate.high:.3g})",
        f"{estimate.tokens_per_s:,.0f} tokens/s, MFU {100 * estimate.mfu:.1f}%, "
        f"bubble {100 * estimate.bubble:.1f}%",
    ]
    if doubts := doubts_text(estimate.widths):
        figures.append(f"the step is uncertain by {doubts}")
    if than is not None:
        figures[0] += f", {100 * (estimate.seconds / than.seconds - 1):+.1f}%"
    if fit is not None:
        mid, interval = _gib(fit.device)
        room = "" if fit.capacity == float("inf") else f" of {fit.capacity / GIB:.1f}"
        figures.append(f"{mid}{room} GiB ({interval}): <b>{fit.verdict}</b>")
    lines = "".join(f"<p>{line}</p>" for line in figures)
    return (
        f"<section><h2>{escape(name)}</h2><p><code>{escape(one.layout)}</code></p>{lines}"
        f'<p class="quiet">{escape(one.reason)}</p></section>'
    )


def _ranking(plan: Plan) -> Sequence[Sequence[str]]:
    priced = any(one.tokens_per_dollar is not None for one in plan.ranking)
    head = "", "layout", "step s", "interval", "tokens/s", "TFLOP/s", "MFU", "bubble", "memory GiB"
    rows: list[tuple[str, ...]] = [(*head, "interval", "verdict", *(("tokens/$",) if priced else ()), "why")]
    for place, one in enumerate(plan.ranking, 1):
        estimate, fit = one.estimate, one.estimate.memory
        price = "" if one.tokens_per_dollar is None else f"{one.tokens_per_dollar:,.0f}"
        held = ("", "") if fit is None else _gib(fit.device)
        rows.append(
            (
                str(place),
                one.layout,
                f"{estimate.seconds:.4g}",
                f"{estimate.low:.3g} to {estimate.high:.3g}",
                f"{estimate.tokens_per_s:,.0f}",
                f"{estimate.tflops_per_gpu:.1f}",
                f"{100 * estimate.mfu:.1f}%",
                f"{100 * estimate.bubble:.1f}%",
                *held,
                "" if fit is None else fit.verdict,
                *((price,) if priced else ()),
                one.reason,
            )
        )
    return rows


def _gib(held: Bytes) -> tuple[str, str]:
    """The middle and the interval."""
    return f"{held.mid / GIB:.1f}", f"{held.low / GIB:.1f} to {held.high / GIB:.1f}"


def _scatter(plan: Plan, capacity: float) -> str:
    drawing, facts = scatter(plan.evaluated, capacity, [one.layout for one in plan.ranking])
    data = json.dumps(facts, separators=(",", ":")).replace("<", "\\u003c")
    script = f'<script id="candidates" type="application/json">{data}</script>'
    return f'<div class="figure">{drawing}</div>{script}'


def _rejected(plan: Plan) -> str:
    rows = [("reason", "candidates", "for example")]
    rows += [(reason, f"{one.count:,}", one.example) for reason, one in plan.rejected.items()]
    return f"<h2>Rejected</h2>{table_html(rows, 'Not in the ranking')}" if plan.rejected else ""


def _commands(commands: Mapping[str, str]) -> str:
    lines = "".join(
        f"<dt>{escape(what)}</dt><dd><code>{escape(line)}</code></dd>" for what, line in commands.items()
    )
    return f'<h2>Go on</h2><dl class="facts">{lines}</dl>' if commands else ""


def _timeline(estimate: Estimate, assumptions: Assumptions) -> Panel:
    """The step's program, with fewer microbatches where there are very many."""
    job = estimate.job
    count, pp = job.microbatches or 1, job.layout.pp
    stages = job.program().stages
    most = max(2 * pp, _MOST_BLOCKS // (3 * stages) // pp * pp)
    short = replace(job, global_batch=job.layout.dp * job.micro_batch * most) if count > most else job
    drawn = panel(timeline_of(replace(estimate, job=short), assumptions)[0])
    note = f"; the first {most} of {count} microbatches" if short is not job else ""
    return replace(drawn, title=f"{job.schedule}, {pp} pipeline ranks", line=drawn.line + note, unit="s")
