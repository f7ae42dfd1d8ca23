// Candidates by memory and time: circles fit, triangles are tight, crosses do not fit.
import { html } from "stretto/markup";
import { useWidth } from "stretto/bars";
import { t } from "stretto/strings";

const HEIGHT = 420, LEFT = 58, RIGHT = 16, TOP = 22, BOTTOM = 44;

const roundStep = (length) => {
  const base = 10 ** Math.floor(Math.log10(length / 8));
  return base * [1, 2, 5, 10].find((factor) => length / (base * factor) <= 8);
};
const ticks = (low, high) => {
  const step = roundStep(high - low);
  return Array.from({ length: Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) + 1 }, (_, i) => (Math.ceil(low / step - 1e-9) + i) * step);
};
const logTicks = (low, high) => {
  if (high / low < 5) return ticks(low, high);
  const list = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const factor of [1, 2, 5]) { const value = factor * 10 ** power; if (value >= low && value <= high) list.push(value); }
  return list;
};

// `points` are columns {layout, seconds, gib, lower_bound, verdict, front}; `ranking` the layouts that are numbered.
export const Scatter = ({ points, capacity, ranking, marked, onPoint }) => {
  const [ref, width] = useWidth(), count = points.layout.length;
  if (!count) return null;
  const largest = Math.max(...points.gib), least = Math.min(...points.gib);
  const most = 1.05 * (capacity ? (largest <= capacity ? capacity : Math.min(largest, 1.5 * capacity)) : largest);
  const from = least > 0.4 * most ? Math.max(0, least - 0.1 * (most - least)) : 0;
  const fast = 0.94 * Math.min(...points.seconds), slow = 1.06 * Math.max(...points.seconds), low = HEIGHT - BOTTOM;
  // those far beyond the device's memory are drawn at the edge
  const x = (gib) => Math.min(width - 8, LEFT + ((gib - from) / (most - from)) * (width - LEFT - RIGHT));
  const y = (seconds) => low - (Math.log(seconds / fast) / Math.log(slow / fast)) * (low - TOP);
  const number = (value) => +value.toPrecision(4);
  const mark = (i) => {
    const [px, py] = [x(points.gib[i]), y(points.seconds[i])], verdict = points.verdict[i];
    if (verdict === "does not fit") return html`<path class="misfit" d=${`M${px - 3} ${py - 3}l6 6m0-6l-6 6`} />`;
    if (verdict === "tight") return html`<path class="tight" d=${`M${px} ${py - 5}l4.6 8h-9.2Z`} />`;
    return html`<circle class="fits" cx=${px} cy=${py} r="4.2" />`;
  };
  const title = (i) => [points.layout[i], `${number(points.seconds[i])} s`,
    `${points.lower_bound[i] ? `${t("at least")} ` : ""}${number(points.gib[i])} GiB`, t(points.verdict[i]),
    ...(points.front[i] ? [t("none is faster with less memory")] : [])].join("\n");
  const at = new Map(points.layout.map((layout, i) => [layout, i]));
  const front = points.layout.map((_, i) => i).filter((i) => points.front[i]).sort((a, b) => points.gib[a] - points.gib[b]);
  const placed = [], numbers = [];
  ranking.forEach((layout, row) => {
    const i = at.get(layout);
    if (i === undefined) return;
    const [px, py] = [x(points.gib[i]), y(points.seconds[i])];
    if (row === marked) numbers.push(html`<circle class="ring" cx=${px} cy=${py} r="8" />`);
    if (placed.some(([a, b]) => Math.abs(a - px) <= 18 && Math.abs(b - py) <= 13)) return;
    placed.push([px, py]);
    numbers.push(html`<text x=${px + 10} y=${py + 4} font-weight="600">${row + 1}</text>`);
  });
  const label = t("{count} candidates by memory of the fullest device and time of a step", { count });
  const legend = [["fits", "M2.8 7a4.2 4.2 0 1 0 8.4 0a4.2 4.2 0 1 0 -8.4 0"], ["tight", "M7 2l4.6 8h-9.2Z"], ["does not fit", "M4 4l6 6m0-6l-6 6"]]
    .filter(([verdict]) => points.verdict.includes(verdict));
  return html`<figure ref=${ref} class="scatter"><svg width=${width} height=${HEIGHT} role="img" aria-label=${label}>
      ${capacity && x(capacity) < width - 8 && html`<rect class="beyond" x=${x(capacity)} y=${TOP} width=${width - RIGHT - x(capacity)} height=${low - TOP} />`}
      ${ticks(from, most).map((gib) => html`<path class="grid" d=${`M${x(gib)} ${TOP}V${low}`} /><text class="quiet-text" x=${x(gib)} y=${low + 16} text-anchor="middle">${number(gib)}</text>`)}
      ${logTicks(fast, slow).map((seconds) => html`<path class="grid" d=${`M${LEFT} ${y(seconds)}H${width - RIGHT}`} /><text class="quiet-text" x=${LEFT - 8} y=${y(seconds) + 4} text-anchor="end">${number(seconds)}</text>`)}
      <text class="quiet-text" x=${(LEFT + width) / 2} y=${HEIGHT - 8} text-anchor="middle">${t("memory of the fullest device, GiB")}</text>
      <text class="quiet-text" x="4" y="12">${t("seconds of a step")}</text>
      ${capacity && html`<path class="limit" d=${`M${x(capacity)} ${TOP}V${low}`} /><text class="limit-text" x=${x(capacity) - 5} y=${TOP + 10} text-anchor="end">${t("the device's {gib} GiB", { gib: number(capacity) })}</text>`}
      ${front.length > 1 && html`<path class="front" d=${`M${front.map((i) => `${x(points.gib[i])} ${y(points.seconds[i])}`).join("L")}`} />`}
      ${points.layout.map((layout, i) => html`<g data-layout=${layout} onClick=${() => onPoint?.(layout)}><title>${title(i)}</title>${mark(i)}</g>`)}
      ${numbers}
    </svg>
    <ul class="legend" aria-label=${t("Legend")}>${legend.map(([verdict, d]) => html`<li><svg width="14" height="14" aria-hidden="true">
      <path class=${{ fits: "fits", tight: "tight" }[verdict] ?? "misfit"} d=${d} /></svg>${t(verdict)}</li>`)}
      <li><svg width="14" height="14" aria-hidden="true"><path class="front" d="M0 7H14" /></svg>${t("none is faster with less memory")}</li></ul>
  </figure>`;
};
