"use strict";
// A page of timelines: panels under one another that share one view of the time axis.
const data = JSON.parse(document.getElementById("data").textContent);
const [LEFT, RIGHT, ROW, CURVE, GAP, AXIS, PHASE] = [data.left, 12, 28, data.held ? 20 : 0, 7, 26, 20];
const FONT = getComputedStyle(document.body).fontFamily;
const view = { from: 0, to: data.end, path: false };
const CAUSES = {
  start: "begins it", order: "held up by the one before", message: "held up by its input",
  queue: "held up by a busy link", reduction: "held up by a reduction", barrier: "held up by the last rank",
  beside: "held up by a gather or a move",
};
const charts = [];
let chosen = null; // {chart, block}: what is hovered or selected by the keyboard
let colours = {};

const number = (value) => String(+value.toPrecision(6));
const nameOf = (b) => `${b.stage}${b.kind}${b.microbatch ?? ""}`;
const make = (tag, more = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), more);
  made.append(...children);
  return made;
};

class Chart {
  constructor(panel, at) {
    Object.assign(this, { panel, at });
    this.pitch = ROW + CURVE + GAP;
    this.height = panel.rows.length * this.pitch + (panel.window ? 2 * PHASE : 0) + AXIS;
    this.rows = panel.rows.map(() => []);
    this.blocks = panel.start.map((start, i) => ({
      i, start, end: panel.end[i], row: panel.row[i], kind: data.kinds[panel.kind[i]].kind,
      look: data.kinds[panel.kind[i]].shades[panel.shade[i]], stage: panel.stage[i],
      microbatch: panel.microbatch[i], lane: panel.lane ? panel.lane[i] : 0,
      lanes: panel.lanes ? panel.lanes[i] : 1, path: panel.path ? panel.path[i] : "",
      needs: [], feeds: [],
    }));
    for (const block of this.blocks) this.rows[block.row].push(block);
    // one size for all numbers of equally long blocks
    this.digits = String(this.blocks.reduce((most, b) => Math.max(most, b.microbatch ?? 0), 0)).length;
    // no block of a row that starts before blocks[k] ends later than ends[k]
    this.ends = this.rows.map((row) => { let far = 0; return row.map((b) => (far = Math.max(far, b.end))); });
    this.connect();
    this.build();
  }

  // what waits for what: the data that goes from action to action, and the order of the rank
  connect() {
    const found = new Map();
    const key = (b, kind, stage, track = b.row % this.panel.tracks) => `${track} ${stage}${kind}${b.microbatch}`;
    for (const b of this.blocks) found.set(key(b, b.kind, b.stage), b);
    // of two tracks, the same action in the other one
    this.beside = (b) => (this.panel.tracks === 2 ? found.get(key(b, b.kind, b.stage, 1 - (b.row % 2))) : null);
    const wants = (b) => {
      if (b.kind === "F") return [["F", b.stage - 1]];
      if (b.kind === "B" || b.kind === "I")
        return [["F", b.stage], ["RECOMPUTE", b.stage], ["B", b.stage + 1], ["I", b.stage + 1]];
      return b.kind === "W" ? [["I", b.stage]] : b.kind === "RECOMPUTE" ? [["F", b.stage]] : [];
    };
    for (const b of this.blocks) {
      for (const [kind, stage] of wants(b)) {
        const other = found.get(key(b, kind, stage));
        if (other) { b.needs.push(other); other.feeds.push(b); }
      }
    }
  }

  build() {
    const label = `${this.panel.title}: ${this.panel.line}`;
    this.canvas = make("canvas", { tabIndex: 0 });
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-roledescription", "timeline");
    this.canvas.setAttribute("aria-label", `${label}. Arrow keys go from action to action.`);
    this.over = make("canvas");
    this.over.setAttribute("aria-hidden", "true");
    this.frame = make("div", { className: "chart" }, this.canvas, this.over);
    const section = make("section", {}, make("h2", { textContent: this.panel.title }),
      make("p", { className: "quiet", textContent: this.panel.line }), this.frame);
    section.setAttribute("aria-label", this.panel.title);
    document.getElementById("panels").append(section);
    listen(this);
  }

  resize() {
    this.width = Math.max(LEFT + RIGHT + 40, this.frame.clientWidth);
    const ratio = window.devicePixelRatio || 1;
    for (const canvas of [this.canvas, this.over]) {
      canvas.width = Math.round(this.width * ratio);
      canvas.height = Math.round(this.height * ratio);
      canvas.style.height = `${this.height}px`;
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    const hatch = make("canvas", { width: 8, height: 8 }).getContext("2d");
    hatch.fillStyle = colours.idle;
    hatch.fillRect(0, 0, 8, 8);
    hatch.strokeStyle = colours.hatch;
    for (const d of [-8, 0, 8]) { hatch.moveTo(d - 1, 9); hatch.lineTo(d + 9, -1); }
    hatch.stroke();
    this.hatch = this.canvas.getContext("2d").createPattern(hatch.canvas, "repeat");
  }

  x(time) { return LEFT + ((time - view.from) / (view.to - view.from)) * (this.width - LEFT - RIGHT); }
  time(x) { return view.from + ((x - LEFT) / (this.width - LEFT - RIGHT)) * (view.to - view.from); }
  box(b) {
    const high = ROW / b.lanes, x = this.x(b.start);
    return [x, b.row * this.pitch + b.lane * high, Math.max(this.x(b.end) - x, b.end > b.start ? 0.6 : 2), high];
  }
  // the first block of a row that may reach beyond the time
  first(row, time) {
    let [low, high] = [0, this.rows[row].length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[row][middle] < time) low = middle + 1; else high = middle;
    }
    return low;
  }
  find(x, y) {
    const row = Math.floor(y / this.pitch), inside = y - row * this.pitch;
    if (x < LEFT || row < 0 || row >= this.rows.length || inside > ROW) return null;
    const slack = this.time(LEFT + 2) - this.time(LEFT), at = this.time(x);
    let best = null;
    for (let k = this.first(row, at - slack); k < this.rows[row].length; k++) {
      const b = this.rows[row][k];
      if (b.start > at + slack) break;
      const lane = b.lanes === 1 || Math.floor((inside / ROW) * b.lanes) === b.lane;
      const far = Math.max(b.start - at, at - b.end, 0);
      if (lane && far <= slack && (!best || far < best.far || (b.end === b.start && far === best.far)))
        best = { b, far };
    }
    return best && best.b;
  }

  draw() {
    const pen = this.canvas.getContext("2d");
    pen.clearRect(0, 0, this.width, this.height);
    let drawn = 0;
    for (let row = 0; row < this.rows.length; row++) {
      const top = row * this.pitch;
      pen.font = `12px ${FONT}`; pen.textAlign = "right"; pen.textBaseline = "middle"; pen.fillStyle = colours.text;
      pen.fillText(this.panel.rows[row], LEFT - 10, top + ROW / 2);
      pen.save();
      pen.beginPath(); pen.rect(LEFT, 0, this.width - LEFT - RIGHT, this.height); pen.clip();
      pen.fillStyle = this.hatch;
      pen.fillRect(this.x(0), top, this.x(this.panel.last) - this.x(0), ROW);
      drawn += this.drawRow(pen, row);
      if (data.held) this.drawHeld(pen, row, top);
      pen.restore();
    }
    if (this.panel.window) this.drawWindow(pen);
    this.drawAxis(pen);
    this.frame.dataset.drawn = drawn;
    this.frame.dataset.from = view.from;
    this.frame.dataset.to = view.to;
  }

  drawRow(pen, row) {
    let drawn = 0, lastX = -1e9;
    pen.textAlign = "center";
    for (let k = this.first(row, view.from); k < this.rows[row].length; k++) {
      const b = this.rows[row][k];
      if (b.start > view.to) break;
      const [x, y, width, height] = this.box(b);
      // many blocks in one pixel: one is enough
      if (x + width < lastX + 0.5) continue;
      lastX = b.lanes === 1 ? x + width : lastX;
      drawn++;
      if (b.end === b.start) {
        pen.fillStyle = colours.text;
        pen.fillRect(x - 1, y - 2, 2, height + 4);
        continue;
      }
      const inner = width > 5 ? width - 1 : width;
      pen.fillStyle = b.look.fill;
      if (inner > 6) {
        pen.beginPath(); pen.roundRect(x, y, inner, height - (b.lanes > 1), 2.5); pen.fill();
        pen.strokeStyle = colours.rim; pen.lineWidth = 0.75; pen.stroke(); // parts light blocks from the ground
      } else pen.fillRect(x, y, inner, height - (b.lanes > 1));
      if (view.path && b.path) {
        pen.fillStyle = colours.path;
        pen.fillRect(x, y + height - 1, width, 4);
      }
      const text = b.microbatch === null ? "" : String(b.microbatch);
      const size = Math.min(13, height * 0.8, inner / (0.62 * this.digits));
      if (text && size >= 7) {
        pen.font = `${size}px ${FONT}`; pen.fillStyle = b.look.ink;
        pen.fillText(text, x + inner / 2, y + height / 2 + 0.5);
      }
    }
    return drawn;
  }

  drawHeld(pen, row, top) {
    const curve = this.panel.held[row], base = top + ROW + CURVE;
    pen.fillStyle = colours.held;
    pen.beginPath(); pen.moveTo(this.x(0), base);
    let y = base;
    for (const [time, value] of curve) {
      const x = this.x(time);
      pen.lineTo(x, y);
      y = base - (value / data.held) * (CURVE - 4);
      pen.lineTo(x, y);
      if (time > view.to) break;
    }
    pen.lineTo(this.x(curve.length ? curve[curve.length - 1][0] : 0), base);
    pen.fill();
    pen.fillRect(LEFT, base - 0.5, this.width, 0.5);
  }

  // where each rank is done with a step; below the rows, steps and phases
  drawWindow(pen) {
    const low = this.panel.rows.length * this.pitch, { ends, steps, phases } = this.panel.window;
    pen.save();
    pen.beginPath(); pen.rect(LEFT - 1, 0, this.width - LEFT - RIGHT + 2, this.height); pen.clip();
    pen.strokeStyle = colours.needs; pen.lineWidth = 1.6; pen.setLineDash([5, 3]);
    for (const times of ends) {
      pen.beginPath();
      let x = this.x(times[0]);
      pen.moveTo(x, 0);
      times.forEach((time, row) => {
        if (row) pen.lineTo(x, row * this.pitch - 3);
        x = this.x(time);
        pen.lineTo(x, Math.max(0, row * this.pitch - 3));
      });
      pen.lineTo(x, low);
      pen.stroke();
    }
    pen.setLineDash([]); pen.lineWidth = 1; pen.strokeStyle = colours.line; pen.fillStyle = colours.text;
    pen.font = `11px ${FONT}`; pen.textAlign = "center";
    [steps, phases].forEach((line, at) => {
      const y = low + at * PHASE + 8;
      for (const { name, start, end } of line) {
        const [x, right] = [this.x(start) + 1, this.x(end) - 1];
        // the name stays in sight where only a part of its phase is
        const middle = (Math.max(x, LEFT) + Math.min(right, this.width - RIGHT)) / 2;
        const half = pen.measureText(name).width / 2 + 5, shown = right - x > 2 * half + 8;
        pen.beginPath();
        pen.moveTo(x, y - 5); pen.lineTo(x, y + 5); pen.moveTo(x, y);
        if (shown) { pen.lineTo(middle - half, y); pen.moveTo(middle + half, y); }
        pen.lineTo(right, y); pen.moveTo(right, y - 5); pen.lineTo(right, y + 5);
        pen.stroke();
        if (shown) pen.fillText(name, middle, y);
      }
    });
    pen.restore();
  }

  drawAxis(pen) {
    const top = this.height - AXIS, span = view.to - view.from;
    const most = Math.max(2, Math.floor((this.width - LEFT - RIGHT) / 80));
    const base = 10 ** Math.floor(Math.log10(span / most));
    const step = base * ([1, 2, 5, 10].find((factor) => span / (base * factor) <= most) ?? 10);
    pen.fillStyle = colours.quiet; pen.strokeStyle = colours.line; pen.font = `11px ${FONT}`;
    pen.textAlign = "right";
    pen.fillText(this.panel.unit ? `time, ${this.panel.unit}` : "time", LEFT - 10, top + 14);
    pen.textAlign = "center";
    pen.beginPath(); pen.moveTo(LEFT, top + 0.5); pen.lineTo(this.width - RIGHT, top + 0.5);
    for (let at = Math.ceil(view.from / step - 1e-9); at * step <= view.to * (1 + 1e-12); at++) {
      const x = this.x(at * step);
      pen.moveTo(x, top); pen.lineTo(x, top + 5);
      pen.fillText(number(+(at * step).toPrecision(12)), x, top + 14);
    }
    pen.stroke();
  }

  // the chosen block, what it waits for and what waits for it
  mark() {
    const pen = this.over.getContext("2d");
    pen.clearRect(0, 0, this.width, this.height);
    if (!chosen || chosen.chart !== this) return;
    pen.save();
    pen.beginPath(); pen.rect(LEFT - 2, 0, this.width - LEFT - RIGHT + 4, this.height); pen.clip();
    const around = (b, colour, dash, wide = 2.5) => {
      const [x, y, width, height] = this.box(b);
      pen.strokeStyle = colour; pen.lineWidth = wide; pen.setLineDash(dash);
      pen.strokeRect(x - 0.5, y + 0.5, Math.max(2, width), height - 1);
    };
    const tie = (a, b, colour, dash) => {
      const [ax, ay, aw, ah] = this.box(a), [bx, by, , bh] = this.box(b);
      const [x0, y0, x1, y1] = [ax + aw, ay + ah / 2, bx, by + bh / 2];
      pen.strokeStyle = colour; pen.lineWidth = 1.5; pen.setLineDash(dash);
      pen.beginPath(); pen.moveTo(x0, y0);
      const bend = Math.max(12, Math.abs(x1 - x0) / 2);
      pen.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1); pen.stroke();
    };
    const block = chosen.block;
    for (const b of block.feeds) { tie(block, b, colours.feeds, [4, 3]); around(b, colours.feeds, [4, 3]); }
    for (const b of block.needs) { tie(b, block, colours.needs, []); around(b, colours.needs, []); }
    const beside = this.beside(block);
    if (beside) around(beside, colours.text, [2, 2], 2);
    around(block, colours.text, [], 3);
    pen.restore();
  }

  facts(b) {
    const row = this.rows[b.row], at = row.indexOf(b), before = row[at - 1], held = data.held ? this.panel.held[b.row] : null;
    const many = this.panel.chunks;
    const names = (list) => list.map(nameOf).join(", ") || "nothing";
    const facts = [
      ["on", this.panel.rows[b.row]],
      ["stage", b.stage + (many > 1 ? `, number ${this.panel.shade[b.i] + 1} of the ${many} on its rank` : "")],
      ["microbatch", b.microbatch ?? "all"],
      ["start", number(b.start)], ["end", number(b.end)], ["takes", number(b.end - b.start)],
      ["waits for", names(b.needs)], ["waited for by", names(b.feeds)],
      ["after", before ? `${nameOf(before)}, idle ${number(Math.max(0, b.start - before.end))}` : "nothing"],
    ];
    const beside = this.beside(b);
    if (beside) {
      const times = `${number(beside.start)} to ${number(beside.end)}, takes ${number(beside.end - beside.start)}`;
      facts.push([this.panel.rows[beside.row].split(" ").pop(), times]);
    }
    if (b.path) facts.push(["critical path", CAUSES[b.path] ?? b.path]);
    if (held) facts.push(["held then", number((held.filter(([time]) => time <= b.start).pop() ?? [0, 0])[1])]);
    return facts;
  }
}
