"""A search of layouts as one HTML page: ranking, time against memory, parts of the step, memory, timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

from stretto.errors import StrettoError
from stretto.planner.estimate import NOISE, Estimate, timeline_of
from stretto.view.html import panels_html, script_json, table_html
from stretto.view.panel import Panel, panel
from stretto.view.plan_charts import PATTERNS, device_memory_bars, memory_bars, points_key, scatter, step_bars
from stretto.view.plan_texts import (
    GIB,
    differences,
    mfu_text,
    plan_setting,
    search_text,
    uncertainty_text,
)

if TYPE_CHECKING:
    from stretto.planner.assumptions import Assumptions
    from stretto.planner.memory.fits import Bytes
    from stretto.planner.search.ranking import Plan, Ranked

_MOST_BLOCKS = 20_000  # of the timeline; more are slow to draw and only repeat the pattern


def plan_page(plan: Plan, model: str, commands: Mapping[str, str] | None = None) -> str:
    """Return the page of a plan for the model of this name; it loads no other files.

    Args:
        commands: commands for next steps, by purpose.

    Raises:
        StrettoError: no layout was timed.
    """
    best = plan.ranking[0] if plan.ranking else plan.nearest
    if best is None:
        raise StrettoError("no layout was timed, so no page can be drawn", hint="relax the requirements")
    estimate = best.estimate
    job, cluster = estimate.job, estimate.cluster
    about = plan_setting(job, cluster, plan.assumptions, model)
    drawing, data = scatter(plan.evaluated, cluster.device.memory, [ranked.layout for ranked in plan.ranking])
    parts = [PATTERNS, _definitions({**about, "search": search_text(plan)}), _answers(plan, best)]
    if plan.ranking:
        parts.append(f"<h2>Ranking</h2>{table_html(_ranking(plan), 'The best first; click a name to sort')}")
    parts += [
        f"<h2>Time against memory</h2>{points_key(plan.evaluated)}",
        f'<div class="figure">{drawing}</div><script id="candidates" type="application/json">'
        f"{script_json(data)}</script>",
        f"<h2>Where the step goes</h2>{step_bars(plan.ranking or [best])}",
    ]
    if len(plan.ranking) > 1:
        caption = (
            f"Seconds that each needs more than the first, {best.layout}; "
            f"two measurements of one layout differ by {100 * NOISE:.1f}%"
        )
        parts.append(f"<h2>How the others differ</h2>{table_html(differences(plan.ranking), caption)}")
    if estimate.memory is not None:
        bars = device_memory_bars(plan.ranking or [best])
        parts.append(f"<h2>Memory of the fullest rank, by layout</h2>{bars}")
        every = len(estimate.memory.ranks) == job.layout.pp
        ranks = "every pipeline rank" if every else "the pipeline ranks that can be the fullest"
        parts.append(f"<h2>Memory of {ranks}, of the first</h2>{memory_bars(estimate.memory)}")
    rejected = ""
    if plan.rejected:
        rows = [("reason", "candidates", "for example")]
        rows += [(reason, f"{group.count:,}", group.example) for reason, group in plan.rejected.items()]
        rejected = f"<h2>Rejected</h2>{table_html(rows, 'Not in the ranking')}"
    lines = {purpose: f"<code>{escape(line)}</code>" for purpose, line in (commands or {}).items()}
    parts += [
        rejected,
        f"<h2>Go on</h2>{_definitions(lines, escaped=True)}" if lines else "",
        "<h2>The step of the first, replayed</h2>",
    ]
    title = f"Plan of {model} on {about['cluster'].partition(' (')[0]}"
    timeline = _timeline(estimate, plan.assumptions)
    return panels_html([timeline], title, above="\n".join(parts), more="page_plan")


def _definitions(texts: Mapping[str, str], escaped: bool = False) -> str:
    """Return a list of names and texts, which are HTML if `escaped`."""
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{text if escaped else escape(text)}</dd>" for name, text in texts.items()
    )
    return f'<dl class="facts">{items}</dl>'


def _answers(plan: Plan, best: Ranked) -> str:
    """Return the layouts to choose from: the first, the fastest safe one, and the baselines without a
    search.
    """
    if not plan.ranking:
        outcome = "Nothing fits" if plan.complete else "Cut short: nothing found that fits so far"
        return f'<div class="answers">{_card(f"{outcome}; nearest", best, None)}</div>'
    cards = [_card("First", best, None)]
    named = {"Safe: the fastest that certainly fits": plan.safe}
    named |= {f"Plain: {name}": baseline for name, baseline in plan.baselines.items()}
    for name, ranked in named.items():
        if ranked is None or ranked.layout == best.layout:
            none = plan.missing.get(name.removeprefix("Plain: "), "none was found")
            text = escape(none) if ranked is None else "it is the first"
            cards.append(f"<section><h2>{escape(name)}</h2><p>{text}</p></section>")
        else:
            cards.append(_card(name, ranked, best.estimate))
    return f'<div class="answers">{"".join(cards)}</div>'


def _card(name: str, ranked: Ranked, fastest: Estimate | None) -> str:
    """Return one layout with its figures, and its time relative to the fastest."""
    estimate, fit = ranked.estimate, ranked.estimate.memory
    figures = [
        f"<b>{estimate.seconds:.4g} s</b> a step ({estimate.low:.3g} to {estimate.high:.3g})",
        f"{estimate.tokens_per_s:,.0f} tokens/s, MFU {mfu_text(estimate.mfu)}, "
        f"bubble {100 * estimate.bubble:.1f}%",
    ]
    if uncertainty := uncertainty_text(estimate.widths):
        figures.append(f"the step is uncertain by {uncertainty}")
    if fastest is not None:
        figures[0] += f", {100 * (estimate.seconds / fastest.seconds - 1):+.1f}%"
    if fit is not None:
        mid, interval = _gib(fit.device)
        room = "" if fit.capacity == float("inf") else f" of {fit.capacity / GIB:.1f}"
        figures.append(f"{mid}{room} GiB ({interval}): <b>{fit.verdict}</b>")
    lines = "".join(f"<p>{line}</p>" for line in figures)
    return (
        f"<section><h2>{escape(name)}</h2><p><code>{escape(ranked.layout)}</code></p>{lines}"
        f'<p class="quiet">{escape(ranked.reason)}</p></section>'
    )


def _ranking(plan: Plan) -> Sequence[Sequence[str]]:
    priced = any(ranked.tokens_per_dollar is not None for ranked in plan.ranking)
    head = "", "layout", "step s", "interval", "tokens/s", "TFLOP/s", "MFU", "bubble", "memory GiB"
    rows: list[tuple[str, ...]] = [(*head, "interval", "verdict", *(("tokens/$",) if priced else ()), "why")]
    for rank, ranked in enumerate(plan.ranking, 1):
        estimate, fit = ranked.estimate, ranked.estimate.memory
        price = "" if ranked.tokens_per_dollar is None else f"{ranked.tokens_per_dollar:,.0f}"
        rows.append(
            (
                str(rank),
                ranked.layout,
                f"{estimate.seconds:.4g}",
                f"{estimate.low:.3g} to {estimate.high:.3g}",
                f"{estimate.tokens_per_s:,.0f}",
                f"{estimate.tflops_per_gpu:.1f}",
                mfu_text(estimate.mfu),
                f"{100 * estimate.bubble:.1f}%",
                *(("", "") if fit is None else _gib(fit.device)),
                "" if fit is None else fit.verdict,
                *((price,) if priced else ()),
                ranked.reason,
            )
        )
    return rows


def _gib(size: Bytes) -> tuple[str, str]:
    """Return the middle and the interval as text."""
    return f"{size.mid / GIB:.1f}", f"{size.low / GIB:.1f} to {size.high / GIB:.1f}"


def _timeline(estimate: Estimate, assumptions: Assumptions) -> Panel:
    """Return a panel of the step's program, cut to the first microbatches if it has too many blocks."""
    job = estimate.job
    count, pp = job.microbatches or 1, job.layout.pp
    stages = job.program().stages
    limit = max(2 * pp, _MOST_BLOCKS // (3 * stages) // pp * pp)
    short = replace(job, global_batch=job.layout.dp * job.micro_batch * limit) if count > limit else job
    drawn = panel(timeline_of(replace(estimate, job=short), assumptions)[0])
    note = f"; the first {limit} of {count} microbatches" if short is not job else ""
    return replace(drawn, title=f"{job.schedule}, {pp} pipeline ranks", line=drawn.line + note, unit="s")
