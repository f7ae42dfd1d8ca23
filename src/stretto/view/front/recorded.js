// Views that only pages in one file have: what a command has measured or replayed.
import { Table, Timeline, html, useAnswer } from "stretto/controls";
import { useWidth } from "stretto/bars";
import { t } from "stretto/strings";

// Timelines with tables above and below: {title, above, below: [{caption, rows}], timelines}.
const TimelinePage = ({ ask }) => {
  const { answer } = useAnswer(ask, { ask: "timelines" });
  if (!answer) return null;
  document.title = answer.title;
  const tables = (list) => list.map(({ caption, rows }) => html`<${Table} rows=${rows} caption=${caption} />`);
  return html`<h1>${answer.title}</h1>${tables(answer.above)}
    <p class="quiet keys">${t("Wheel zooms, drag pans, double click fits. Keys: arrows go from action to action, + - 0 zoom, a d pan, Esc lets go.")}</p>
    <${Timeline} data=${answer.timelines} />${tables(answer.below)}`;
};

export const timelinePage = { id: "timelines", title: "Timeline", asks: ["timelines"], only: "recorded", View: TimelinePage, defaults: {} };

const STEP = 44, ROW = 20;

// Bars on one scale from 0: measured as a bar, its range as a whisker, the prediction as a diamond.
const Figure = ({ title, bars, span }) => {
  const [ref, width] = useWidth(), right = width - 8;
  const ends = bars.flatMap(({ value, high, predicted }) => [value, high, predicted]).filter(Boolean);
  const x = (value) => 8 + (value * (right - 8)) / Math.max(...ends, 1e-300);
  const key = [["▬", "measured", ({ value }) => value], ["|—|", span, ({ low }) => low], ["◇", "predicted", ({ predicted }) => predicted]];
  return html`<section><h2>${t(title)}</h2>
    <ul class="legend" aria-label=${t("Legend")}>${key.filter(([, , has]) => bars.some((bar) => has(bar) !== null)).map(([sign, text]) => html`<li>${sign} ${t(text)}</li>`)}</ul>
    <figure ref=${ref} class="comparison"><svg width=${width} height=${bars.length * STEP + 8} role="img" aria-label=${t(title)}>
      ${bars.map(({ name, text, value, low, high, predicted }, at) => {
        const top = at * STEP + 20, middle = top + ROW / 2;
        return html`<g><text x="8" y=${top - 5} font-weight="600">${name}</text><text class="quiet-text" x=${right} y=${top - 5} text-anchor="end">${text}</text>
          <rect class="idle" x="8" y=${top} width=${right - 8} height=${ROW} />
          ${value !== null && html`<rect class="measured" x="8" y=${top} width=${x(value) - 8} height=${ROW} />`}
          ${low !== null && high !== null && html`<path class="whisker" d=${`M${x(low)} ${middle - 4}v8M${x(low)} ${middle}H${x(high)}M${x(high)} ${middle - 4}v8`} />`}
          ${predicted !== null && html`<path class="predicted" d=${`M${x(predicted)} ${top - 1}l6 ${ROW / 2 + 1}l-6 ${ROW / 2 + 1}l-6 ${-ROW / 2 - 1}z`} />`}</g>`;
      })}</svg></figure></section>`;
};

// A comparison of settings: {title, lines, rows, figures, untimed}.
const ComparisonPage = ({ ask }) => {
  const { answer } = useAnswer(ask, { ask: "comparison" });
  if (!answer) return null;
  document.title = answer.title;
  const lines = (list) => list.map((line) => html`<p>${line}</p>`);
  return html`<h1>${answer.title}</h1>${lines(answer.lines)}
    <${Table} rows=${answer.rows} caption="Fastest first; * is the baseline" />
    ${answer.figures.filter(({ bars }) => bars.length).map((figure) => html`<${Figure} ...${figure} />`)}
    ${answer.untimed.length > 0 && html`<h2>${t("Without figures")}</h2>${lines(answer.untimed)}`}`;
};

export const comparisonPage = { id: "comparison", title: "Comparison", asks: ["comparison"], only: "recorded", View: ComparisonPage, defaults: {} };
