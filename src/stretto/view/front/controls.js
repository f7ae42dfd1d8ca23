// What all views use: fields, tables, curves, messages, files in and out.
import { h } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import htm from "htm";
import uPlot from "uplot";
import { Timelines } from "stretto/timeline";
import { t } from "stretto/strings";

export const html = htm.bind(h);

let fields = 0;
const useName = (name) => useState(() => name ?? `field-${++fields}`)[0];

// Attributes of an input: what is being typed stays, whatever is drawn anew in the meantime, until `take` takes it.
export const useTyped = (value, take) => {
  const [typed, setTyped] = useState(null);
  return { value: typed ?? value, onInput: (event) => setTyped(event.target.value), onChange: (event) => { if (take(event) !== false) setTyped(null); } };
};

// A whole or decimal number, with a slider if `slider` is given ([least, most]).
export const NumberField = ({ label, value, onChange, least = 0, most, step = 1, slider, unit = "", name }) => {
  const id = useName(name);
  const set = (event) => { const to = event.target.valueAsNumber; return event.target.validity.valid && Number.isFinite(to) && (onChange(to), true); };
  return html`<div class="field">
    <label for=${id}>${t(label)}${unit && html` <span class="quiet">${unit}</span>`}</label>
    <div class="inputs">
      ${slider && html`<input type="range" aria-label=${t(label)} min=${slider[0]} max=${slider[1]} step=${step} value=${value} onInput=${set} />`}
      <input id=${id} type="number" min=${least} max=${most} step=${step === 1 ? 1 : "any"} ...${useTyped(value, set)} />
    </div></div>`;
};

// `choices` are values, or pairs of a value and its text.
export const Choice = ({ label, value, choices, onChange, name }) => {
  const id = useName(name);
  return html`<div class="field"><label for=${id}>${t(label)}</label>
    <select id=${id} value=${value} onChange=${(event) => onChange(event.target.value)}>
      ${choices.map((choice) => (Array.isArray(choice) ? choice : [choice, choice])).map(([key, text]) =>
        html`<option value=${key} selected=${key === value}>${t(text)}</option>`)}
    </select></div>`;
};

export const Check = ({ label, value, onChange, name }) => {
  const id = useName(name);
  return html`<div class="field check"><input id=${id} type="checkbox" checked=${value} onChange=${(event) => onChange(event.target.checked)} />
    <label for=${id}>${t(label)}</label></div>`;
};

export const TextField = ({ label, value, onChange, placeholder = "", name }) => {
  const id = useName(name);
  return html`<div class="field"><label for=${id}>${t(label)}</label>
    <input id=${id} type="text" placeholder=${placeholder} spellcheck=${false}
      ...${useTyped(value, (event) => { onChange(event.target.value); })} /></div>`;
};

export const Button = ({ children, onClick, disabled = false, label }) =>
  html`<button type="button" disabled=${disabled} aria-label=${label && t(label)} onClick=${onClick}>${children}</button>`;

// An error of the other side: message and nearest fix; nothing if `error` is null.
export const Problem = ({ error }) => error && html`<div class="problem" role="alert">
  <p>${error.message}</p>${error.hint && html`<p class="quiet">${error.hint}</p>`}</div>`;

const UNITS = { us: 1e-6, ms: 1e-3, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30 };
const sortable = (cell) => {
  const [value, unit] = String(cell).replaceAll(",", "").split(" ");
  return parseFloat(value) * (UNITS[unit] ?? 1);
};

// A table whose first row is its header; a click on a column's name sorts by it. Columns of numbers are aligned
// right, unless `left` is set: some columns of the table have formulas, and others have none.
export const Table = ({ rows, caption, onRow, marked, left }) => {
  const [order, setOrder] = useState(null); // {column, down}
  if (!rows?.length) return null;
  const [head, ...body] = rows, numeric = head.map((_, at) => body.every((row) => row[at] === "" || !Number.isNaN(sortable(row[at]))));
  const indices = body.map((_, at) => at);
  if (order) {
    const { column, down } = order;
    const key = (at) => (body[at][column] === "" ? Infinity : sortable(body[at][column]));
    const compare = numeric[column] ? (a, b) => key(a) - key(b)
      : (a, b) => String(body[a][column]).localeCompare(String(body[b][column]), "en", { numeric: true });
    indices.sort((a, b) => (down ? -1 : 1) * compare(a, b));
  }
  const sort = (column) => setOrder({ column, down: order?.column === column && !order.down });
  return html`<div class="wide" tabindex="0" role="region" aria-label=${t(caption)}><table><caption>${t(caption)}</caption>
    <thead><tr>${head.map((name, at) => html`<th scope="col" class=${numeric[at] && !left ? "" : "text"}
      aria-sort=${order?.column === at ? (order.down ? "descending" : "ascending") : null}>
      <button type="button" class="sort" onClick=${() => sort(at)}>${t(name) || "#"}</button></th>`)}</tr></thead>
    <tbody>${indices.map((at) => html`<tr key=${at} class=${marked === at ? "marked" : ""} onClick=${onRow && (() => onRow(at))}>
      ${body[at].map((cell, column) => (column ? html`<td class=${numeric[column] && !left ? "" : "text"}>${cell}</td>` : html`<th scope="row">${cell}</th>`))}
    </tr>`)}</tbody></table></div>`;
};

// Timelines under one time axis; `drawn(timelines)` hands out the object, for pictures and edits; `onMove` is told
// of actions that are dragged.
export const Timeline = ({ data, onSelect, onMove, drawn }) => {
  const root = useRef(null), timelines = useRef(null);
  useLayoutEffect(() => {
    timelines.current = new Timelines(root.current, { t, onSelect });
    drawn?.(timelines.current);
    return () => timelines.current.close();
  }, []);
  useLayoutEffect(() => { timelines.current.onMove = onMove; });
  useLayoutEffect(() => { if (data) timelines.current.show(data); }, [data]);
  return html`<div ref=${root} class="timelines"></div>`;
};

const readColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Curves over one axis, which grow with their data. `lines` are {label, values, stroke?, stepped?, dashed?};
// `x` their common positions, or lines have positions of their own: {label, x, y}.
export const Curves = ({ x, lines, label, xLabel = "", unit = "", height = 220 }) => {
  const root = useRef(null), plot = useRef(null);
  const data = x ? [x, ...lines.map((line) => line.values)] : uPlot.join(lines.map((line) => [line.x, line.y]));
  const looks = JSON.stringify(lines.map(({ label: name, stroke, stepped, dashed }) => [name, stroke, stepped, dashed]));
  useEffect(() => {
    const axis = { stroke: readColour("text"), grid: { stroke: readColour("edge") }, ticks: { stroke: readColour("edge") } };
    plot.current = new uPlot({
      width: root.current.clientWidth || 600, height,
      scales: { x: { time: false } },
      axes: [{ ...axis, label: t(xLabel) }, { ...axis, label: unit, size: 64 }],
      series: [{ label: t(xLabel) || "x" }, ...lines.map((line) => ({
        label: t(line.label), stroke: line.stroke ?? readColour("series"), width: 1.6, dash: line.dashed ? [6, 4] : undefined,
        ...(line.stepped ? { paths: uPlot.paths.stepped({ align: 1 }) } : {}),
      }))],
    }, data, root.current);
    const resizes = new ResizeObserver(() => { if (root.current) plot.current?.setSize({ width: root.current.clientWidth, height }); });
    resizes.observe(root.current);
    return () => { resizes.disconnect(); plot.current.destroy(); plot.current = null; };
  }, [looks, unit, height]);
  useEffect(() => {
    const { data: [before], scales: { x: seen } } = plot.current;
    const zoomed = before.length > 1 && Number.isFinite(seen.min) && (seen.min > before[0] || seen.max < before.at(-1));
    plot.current.setData(data, !zoomed); // a part that was zoomed into stays in sight
    if (zoomed) plot.current.redraw();
  }, [x, lines]);
  return html`<div ref=${root} class="curves" role="img" aria-label=${t(label)} data-points=${data[0].length}></div>`;
};

// A command that the studio has started, and its output: the last lines stay in sight while it runs.
export const Output = ({ job }) => {
  const end = useRef(null);
  useLayoutEffect(() => { if (job.code === null) end.current.scrollTop = end.current.scrollHeight; }, [job.lines.length, job.earlier]);
  const states = { 0: "done", 75: "stopped and saved", 130: "stopped" };
  const state = job.code === null ? "running" : states[job.code] ?? (job.code < 0 ? "ended by signal {code}" : "failed with exit code {code}");
  return html`<details open=${job.code !== 0} class="job"><summary><code>${job.command}</code> <b>${t(state, { code: Math.abs(job.code ?? 0) })}</b></summary>
    ${job.earlier > 0 && html`<p class="quiet">${t("{count} earlier lines are not shown", { count: job.earlier })}</p>`}
    <pre ref=${end} class="output" tabindex="0" role="region" aria-label=${t("Output")}>${job.lines.join("\n")}</pre></details>`;
};

export const save = (name, content, type = "text/plain") => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
};

export const copy = async (text, say) => {
  await navigator.clipboard.writeText(text);
  say?.(t("copied"));
};

// A place to drop a file on, or to choose one: `onFile(name, text)`.
export const Drop = ({ label, accept, onFile }) => {
  const [over, setOver] = useState(false), id = useName();
  const take = async (file) => { if (file) onFile(file.name, await file.text()); };
  return html`<div class=${`drop ${over ? "over" : ""}`}
    onDragOver=${(event) => { event.preventDefault(); setOver(true); }} onDragLeave=${() => setOver(false)}
    onDrop=${(event) => { event.preventDefault(); setOver(false); take(event.dataTransfer.files[0]); }}>
    <label for=${id}>${t(label)}</label>
    <input id=${id} type="file" accept=${accept} onChange=${(event) => { take(event.target.files[0]); event.target.value = ""; }} /></div>`;
};

// The answer to a question, asked again when it changes: {answer, error, busy}. The last answer stays until the next.
export const useAnswer = (ask, question) => {
  const [reply, setReply] = useState({ answer: null, error: null, busy: true }), key = JSON.stringify(question);
  useEffect(() => {
    const stop = new AbortController();
    setReply((before) => ({ ...before, busy: true }));
    if (question === null) return undefined;
    ask(question, { signal: stop.signal, onPart: (part) => { if (!stop.signal.aborted) setReply({ answer: part, error: null, busy: true }); } })
      .then((answer) => { if (!stop.signal.aborted) setReply({ answer, error: null, busy: false }); })
      .catch((error) => { if (!stop.signal.aborted) setReply((before) => ({ ...before, error, busy: false })); });
    return () => stop.abort();
  }, [key]);
  return reply;
};
