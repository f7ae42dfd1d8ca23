// Timelines under one another that share one time axis: canvases with zoom, pan, tooltips, keys and search.
// `data` is what view/panel_record.py writes. The element's dataset says how many panels were drawn.
import { Chart, RIGHT, make, nameOf } from "stretto/timeline_chart";

const LEGIBLE = 11; // width in px of a typical action in the first view
const COLOURS = ["text", "quiet", "idle", "hatch", "rim", "held", "line", "needs", "feeds", "path"];

// `t` translates; `onSelect(action)` is told the name of the action that is hovered or selected, or null.
// `onMove({panel, row, name, index, done})`, if it is set, is told where in its rank's order an action is dragged, and
// at last dropped; index null: back to where it was.
export class Timelines {
  constructor(root, { t = (text) => text, onSelect = () => {} } = {}) {
    Object.assign(this, { root, t, onSelect, charts: [], waiting: false, listeners: new AbortController() });
    this.view = { from: 0, to: 1, path: false, chosen: null, drag: null, colours: {}, left: 0, curve: 0, data: null, font: "" };
    this.tip = make("div", { className: "tip", hidden: true });
    this.tip.setAttribute("role", "tooltip");
    this.live = make("div", { className: "unseen" });
    this.live.setAttribute("role", "status");
    this.panels = make("div");
    this.build();
    root.timelines = this; // for scripts beside the page
    root.replaceChildren(this.bar, this.panels, this.tip, this.live);
    const { signal } = this.listeners;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.retint(), { signal });
    this.themes = new MutationObserver(() => this.retint());
    this.themes.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    this.resizes = new ResizeObserver(() => this.retint());
    this.resizes.observe(root);
  }

  close() {
    this.listeners.abort();
    this.themes.disconnect();
    this.resizes.disconnect();
  }

  build() {
    const { t } = this;
    const button = (text, label, act) => {
      const element = make("button", { type: "button", textContent: text });
      if (text.length > 1) element.title = label; else element.setAttribute("aria-label", label);
      element.addEventListener("click", act);
      return element;
    };
    this.search = make("input", { type: "search", placeholder: t("go to, as in 2F0"), autocomplete: "off", spellcheck: false });
    this.search.setAttribute("aria-label", t("Go to action"));
    this.search.addEventListener("change", () => this.find(this.search.value));
    this.search.addEventListener("input", () => this.search.setCustomValidity(""));
    this.path = make("input", { type: "checkbox" });
    this.path.addEventListener("change", () => { this.view.path = this.path.checked; this.redraw(); });
    this.moves = make("input", { type: "checkbox", checked: true });
    this.movesLabel = make("label", { className: "moves", hidden: true }, this.moves, ` ${t("Dragging moves actions")}`);
    this.legend = make("ul", { className: "legend" });
    this.legend.setAttribute("aria-label", t("Legend"));
    this.bar = make("div", { className: "bar" },
      button("+", t("Zoom in"), () => this.zoom(0.7)), button("\u2212", t("Zoom out"), () => this.zoom(1 / 0.7)),
      button(t("Fit"), t("Show the whole timeline"), () => this.look(0, this.view.data.end)),
      button(t("Legible"), t("Show the beginning, with legible actions"), () => this.open()),
      this.search, this.movesLabel, this.legend);
    this.bar.setAttribute("role", "toolbar");
    this.bar.setAttribute("aria-label", t("Timeline"));
  }

  // Draw new data; the part of the time axis in sight stays unless the axis changes by more than a fifth.
  show(data) {
    const before = this.view.data, { view } = this;
    const selected = view.chosen && { at: this.charts.indexOf(view.chosen.chart), name: nameOf(view.chosen.block) };
    const focused = this.charts.findIndex((chart) => chart.canvas === document.activeElement);
    Object.assign(view, { data, left: data.left, curve: data.held ? 20 : 0, chosen: null });
    this.tip.hidden = true;
    this.charts = data.panels.map((panel) => new Chart(panel, view, this.t));
    for (const chart of this.charts) this.listen(chart);
    this.panels.replaceChildren(...this.charts.map((chart) => chart.section));
    this.writeLegend();
    this.retint();
    if (!before || Math.abs(before.end / data.end - 1) > 0.2) this.open();
    else this.look(view.from, view.to);
    this.root.dataset.ready = this.charts.length;
    this.movesLabel.hidden = !this.onMove || !data.panels.some((panel) => panel.orders);
    // an edit draws new charts: who works by keyboard stays where they were
    const chart = this.charts[focused], block = selected?.at === focused && chart?.named.get(selected.name);
    chart?.canvas.focus({ preventScroll: true });
    if (block) this.select(chart, block);
  }

  writeLegend() {
    const { t } = this, { data } = this.view;
    const entry = (swatches, text) => make("li", {}, ...swatches, ` ${text}`);
    const swatch = (className, background = "") => {
      const element = make("i", { className });
      element.style.background = background;
      return element;
    };
    const shades = (list) => (list.length > 4 ? [list[0], list[list.length - 1]] : list);
    const entries = data.kinds.map(({ kind, name, shades: all, action = true }) =>
      entry(shades(all).map(({ fill }) => swatch("", fill)), action ? `${kind} ${t(name)}` : t(name)));
    if (data.note) entries.push(make("li", { className: "quiet", textContent: `(${t(data.note)})` }));
    entries.push(entry([swatch("bubble")], t("bubble")));
    if (data.held) entries.push(entry([swatch("held")], t("activations held")));
    if (data.panels.some((panel) => panel.window)) entries.push(entry([swatch("step")], t("end of a step")));
    if (data.panels.some((panel) => panel.orders)) entries.push(entry([swatch("never")], t("never starts")));
    this.columns = make("li", { className: "columns", hidden: true,
      textContent: t("too narrow to draw one by one: columns show the share of each kind") });
    entries.push(this.columns, entry([swatch("needs")], t("waits for")), entry([swatch("feeds")], t("is waited for by")));
    if (data.panels.some((panel) => panel.path))
      entries.push(make("li", {}, make("label", {}, this.path, swatch("path"), ` ${t("critical path")}`)));
    this.legend.replaceChildren(...entries);
  }

  // The first view: everything if its actions are legible, otherwise the beginning (warm-up and steady state).
  open() {
    const { data } = this.view, lengths = this.charts.flatMap((chart) => chart.blocks.filter((b) => b.name === null).map((b) => b.end - b.start));
    const positive = lengths.filter((length) => length > 0).sort((a, b) => a - b);
    const typical = positive[positive.length >> 2] ?? data.end;
    const width = (this.charts[0]?.width ?? 600) - this.view.left - RIGHT;
    this.look(0, Math.min(data.end, (typical * width) / LEGIBLE));
  }

  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      for (const chart of this.charts) { chart.draw(); chart.mark(); }
      this.columns.hidden = !this.charts.some((chart) => chart.columns);
    });
  }

  // The answer to an edit of one panel, while it is dragged.
  retime(panel, answer) {
    this.charts[panel].retime(answer);
    const { view } = this;
    view.data.end = Math.max(...this.charts.map((chart) => chart.panel.last));
    this.look(view.from, view.to);
  }

  // Move a block by `step` places in its rank's order.
  shift(chart, block, step) {
    const order = chart.panel.orders[block.row], index = order.indexOf(nameOf(block)) + step;
    if (index >= 0 && index < order.length) this.tell(chart, block, index, true);
  }
  tell(chart, block, index, done) {
    this.onMove({ panel: this.charts.indexOf(chart), row: block.row, name: nameOf(block), index, done });
  }
  // whether a pointer that goes down on a block takes it along; by touch, only a selected one
  takes(chart, block, event) {
    if (!block || !this.onMove || !chart.panel.orders || !this.moves.checked || event.shiftKey) return false;
    return event.button === 0 && (event.pointerType !== "touch" || this.view.chosen?.block === block);
  }
  drag(event) {
    const { drag } = this.view, { chart } = drag, x = event.offsetX;
    if (Math.abs(x - drag.from) < 4 && !drag.moved) return; // a click is no drag
    drag.x = x;
    this.tip.hidden = true;
    if (x > chart.width - RIGHT - 8) this.pan(0.03);
    else if (x < this.view.left + 8) this.pan(-0.03);
    const index = chart.placeAt(drag, x);
    if (index !== drag.index) { drag.index = index; drag.moved = true; this.tell(chart, drag.block, index, false); }
    chart.mark();
  }
  drop(stays) {
    const { drag } = this.view;
    this.view.drag = null;
    drag.chart.mark();
    if (drag.index === drag.begin) return drag.moved && this.tell(drag.chart, drag.block, null, true);
    return this.tell(drag.chart, drag.block, stays ? drag.index : null, true);
  }

  look(from, to) {
    const { view } = this, { end } = view.data, span = Math.min(Math.max(to - from, end / 1e6), end);
    view.from = Math.min(Math.max(0, from), end - span);
    view.to = view.from + span;
    this.redraw();
  }
  zoom(factor, at = (this.view.from + this.view.to) / 2) {
    this.look(at - (at - this.view.from) * factor, at + (this.view.to - at) * factor);
  }
  pan(share) {
    const shift = share * (this.view.to - this.view.from);
    this.look(this.view.from + shift, this.view.to + shift);
  }

  choose(chart, block, x, y, aloud = false) {
    const { view } = this;
    if (view.chosen?.block === block && !aloud) return this.place(x, y);
    view.chosen = block && { chart, block };
    for (const each of this.charts) each.mark();
    this.onSelect(block ? nameOf(block) : null);
    this.tip.hidden = !block;
    if (!block) return undefined;
    const terms = chart.describe(block), list = make("dl");
    for (const [term, text] of terms) list.append(make("dt", { textContent: term }), make("dd", { textContent: text }));
    const kind = this.t(view.data.kinds.find((each) => each.kind === block.kind).name);
    this.tip.replaceChildren(make("b", { textContent: `${nameOf(block)} ${kind}` }), list);
    if (aloud) this.live.textContent = [`${nameOf(block)}, ${kind}`, ...terms.map((each) => each.join(" "))].join(", ");
    return this.place(x, y);
  }
  place(x, y) {
    const box = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.max(4, x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16)}px`;
    this.tip.style.top = `${Math.max(4, Math.min(y + 16, innerHeight - box.height - 4))}px`;
  }

  // Select by keyboard or search: bring into view, describe, and read aloud.
  select(chart, block) {
    const { view } = this, span = view.to - view.from;
    if (block.start < view.from || block.end > view.to) {
      const middle = (block.start + block.end) / 2;
      this.look(middle - span / 2, middle + span / 2);
    }
    const box = chart.canvas.getBoundingClientRect(), [x, y, width, height] = chart.box(block);
    this.choose(chart, block, box.left + x + width, box.top + y + height, true);
  }
  find(text) {
    const wanted = text.trim().toUpperCase(), absent = wanted ? this.t("there is no action {action}", { action: wanted }) : "";
    for (const chart of this.charts) {
      const block = chart.blocks.find((b) => nameOf(b) === wanted);
      if (block) return this.select(chart, block);
    }
    this.live.textContent = absent;
    this.search.setCustomValidity(absent);
    return this.search.reportValidity();
  }

  listen(chart) {
    const { canvas, frame } = chart, touches = new Map();
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture?.(event.pointerId);
      this.pressed = [event.clientX, event.clientY];
      const block = chart.find(event.offsetX, event.offsetY);
      if (this.takes(chart, block, event)) {
        const begin = chart.panel.orders[block.row].indexOf(nameOf(block)), x = event.offsetX;
        this.view.drag = { chart, block, begin, index: begin, from: x, x, middles: chart.middlesBeside(block) };
        frame.classList.add("dragging");
        return;
      }
      touches.set(event.pointerId, event.offsetX);
      frame.classList.add("dragging");
    });
    canvas.addEventListener("pointermove", (event) => {
      if (this.view.drag) return this.drag(event);
      const before = touches.get(event.pointerId);
      if (before === undefined) {
        const block = chart.find(event.offsetX, event.offsetY);
        canvas.style.cursor = block ? "pointer" : "";
        return this.choose(chart, block, event.clientX, event.clientY);
      }
      touches.set(event.pointerId, event.offsetX);
      if (touches.size === 1) {
        const shift = chart.time(before) - chart.time(event.offsetX);
        return this.look(this.view.from + shift, this.view.to + shift);
      }
      const other = [...touches].find(([id]) => id !== event.pointerId)[1];
      const wide = Math.max(8, Math.abs(event.offsetX - other));
      return this.zoom(Math.max(8, Math.abs(before - other)) / wide, chart.time((event.offsetX + other) / 2));
    });
    const release = (event) => {
      if (this.view.drag) this.drop(event.type === "pointerup");
      touches.delete(event.pointerId);
      const far = Math.hypot(event.clientX - this.pressed[0], event.clientY - this.pressed[1]);
      if (event.pointerType === "touch" && far < 6) // a tap selects
        this.choose(chart, chart.find(event.offsetX, event.offsetY), event.clientX, event.clientY);
      frame.classList.toggle("dragging", !!touches.size);
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", (event) => { if (!touches.size && event.pointerType !== "touch") this.choose(chart, null); });
    canvas.addEventListener("dblclick", () => this.look(0, this.view.data.end));
    canvas.addEventListener("wheel", (event) => {
      if (event.offsetX < this.view.left) return; // over the labels the page scrolls
      event.preventDefault();
      const pixels = event.deltaMode === 1 ? 30 : 1;
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))
        this.pan(((event.deltaX || event.deltaY) * pixels) / chart.width);
      else this.zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY * pixels)) * 0.004), chart.time(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.keys(chart, event));
    canvas.addEventListener("blur", () => this.choose(chart, null));
  }

  keys(chart, event) {
    const { view } = this, current = view.chosen?.chart === chart ? view.chosen.block : null;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.altKey && step && current && this.onMove && chart.panel.orders) {
      event.preventDefault();
      return this.shift(chart, current, step);
    }
    if (event.key === "Escape" && view.drag) return this.drop(false);
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    // what another row does at that time
    const time = current ? current.start + (current.end - current.start) * 0.500001 : view.from;
    const at = (row) => chart.rows[row][Math.min(chart.first(row, time), chart.rows[row].length - 1)];
    const row = chart.rows[current ? current.row : 0];
    const along = (step) => (current ? row[row.indexOf(current) + step] : at(0));
    const across = (step) => {
      for (let to = (current ? current.row : step > 0 ? -1 : chart.rows.length) + step; chart.rows[to]; to += step)
        if (chart.rows[to].length) return at(to);
      return null;
    };
    const moves = {
      ArrowLeft: () => along(-1), ArrowRight: () => along(1), ArrowUp: () => across(-1),
      ArrowDown: () => across(1), Home: () => row[0], End: () => row[row.length - 1],
    };
    const views = {
      "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1 / 0.7),
      0: () => this.look(0, view.data.end), a: () => this.pan(-0.2), d: () => this.pan(0.2),
      w: () => this.zoom(0.7), s: () => this.zoom(1 / 0.7), Escape: () => this.choose(chart, null),
    };
    if (event.shiftKey && (event.key === "ArrowLeft" || event.key === "ArrowRight"))
      this.pan(event.key === "ArrowLeft" ? -0.2 : 0.2);
    else if (moves[event.key]) { const block = moves[event.key](); if (block) this.select(chart, block); }
    else if (views[event.key]) views[event.key]();
    else return;
    event.preventDefault();
  }

  retint() {
    const style = getComputedStyle(this.root);
    for (const name of COLOURS) this.view.colours[name] = style.getPropertyValue(`--${name}`).trim();
    this.view.font = getComputedStyle(this.root).fontFamily;
    for (const chart of this.charts) chart.resize();
    if (this.view.data) this.redraw();
  }
}
