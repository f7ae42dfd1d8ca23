// What ranks of a program hold over time, by kind; versions of the weights of asynchronous schedules.
import { useMemo, useState } from "preact/hooks";
import { Choice, Curves, html, useAnswer } from "stretto/controls";
import { t } from "stretto/strings";

const STROKES = ["#2678be", "#c46210", "#1c8a74", "#9e5abe"]; // SERIES of view/colours.py

// Step curves [[time, value], ...] at common times, for one chart.
const align = (curves) => {
  const x = [...new Set(curves.flatMap((curve) => curve.map(([time]) => time)))].sort((a, b) => a - b);
  const values = curves.map((curve) => {
    let at = 0;
    return x.map((time) => {
      while (at + 1 < curve.length && curve[at + 1][0] <= time) at++;
      return curve[at]?.[0] <= time ? curve[at][1] : 0;
    });
  });
  return [x, values];
};
const sum = (rows) => rows[0].map((_, at) => rows.reduce((total, row) => total + row[at], 0));

export const Memory = ({ ask, programs, describe, costs, panels }) => {
  const [at, setAt] = useState(0), [rank, setRank] = useState("all"), shown = Math.min(at, programs.length - 1);
  const { answer } = useAnswer(ask, { ask: "program memory", program: describe(programs[shown]), costs });
  const picked = answer && rank !== "all" && answer.ranks[rank] ? +rank : "all";
  const drawn = useMemo(() => {
    if (!answer?.ranks.length) return null;
    const byRank = picked === "all" ? answer.ranks.map((kinds) => kinds) : [answer.ranks[picked]];
    const [x, values] = align(byRank.flat());
    const kinds = answer.kinds.length, of = (row) => values.slice(row * kinds, (row + 1) * kinds);
    const lines = picked === "all"
      ? byRank.map((_, row) => ({ label: t("rank {n}", { n: row }), values: sum(of(row)) }))
      : [...(kinds > 1 ? [{ label: "all kinds", values: sum(of(0)) }] : []), ...answer.kinds.map((label, kind) => ({ label, values: of(0)[kind] }))];
    return { x, lines: lines.map((line, n) => ({ ...line, stepped: true, stroke: colour(n, lines.length) })) };
  }, [answer, picked]);
  const versions = useMemo(() => {
    if (!answer?.versions?.length) return null;
    const [x, values] = align(answer.versions);
    return { x, lines: values.map((line, n) => ({ label: t("rank {n}", { n }), values: line, stepped: true, stroke: colour(n, values.length) })) };
  }, [answer]);
  const peak = answer?.peaks && Math.max(...answer.peaks), fullest = answer?.peaks?.indexOf(peak);
  return html`<section aria-label=${t("Memory")}><h2>${t("Memory of each rank over time")}</h2>
    <div class="fields">
      ${programs.length > 1 && html`<${Choice} name="memory-program" label="Schedule" value=${String(shown)} onChange=${(to) => setAt(+to)}
        choices=${programs.map((program, n) => [String(n), panels?.[n]?.title ?? program.name])} />`}
      <${Choice} name="memory-rank" label="Rank" value=${String(picked)} onChange=${setRank}
        choices=${[["all", "all ranks"], ...(answer?.ranks ?? []).map((_, n) => [String(n), t("rank {n}", { n })])]} />
      ${peak > 0 && html`<p id="peak">${t("peak {peak} on rank {rank}", { peak: +peak.toPrecision(5), rank: fullest })}
        ${" "}<span class="quiet">${costs.activations === undefined ? t("(1: a microbatch in all stages of a rank)") : ""}</span></p>`}
    </div>
    ${drawn && html`<${Curves} x=${drawn.x} lines=${drawn.lines} label="Memory of each rank over time" xLabel="time" />`}
    ${versions && html`<h3>${t("Versions of the weights")}</h3>
      <${Curves} x=${versions.x} lines=${versions.lines} label="Versions of the weights" xLabel="time" height=${160} />`}
    </section>`;
};

const colour = (n, count) => (count <= STROKES.length ? STROKES[n] : `hsl(${Math.round((300 * n) / count)} 60% 45%)`);
