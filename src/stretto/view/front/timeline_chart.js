// One timeline on a canvas: rows of blocks, memory, the axis, and an overlay for what is selected or moved.
export const RIGHT = 12;
const ROW = 28, GAP = 7, AXIS = 26, PHASE = 20;
const NARROW = 6; // px: if a quarter of the actions are narrower than this, columns show the share of each kind
const COLUMN = 12; // px: least width of a column
const CAUSES = {
  start: "begins it", order: "held up by the one before", message: "held up by its input",
  queue: "held up by a busy link", reduction: "held up by a reduction", barrier: "held up by the last rank",
  beside: "held up by a gather or a move",
};

export const number = (value) => String(+value.toPrecision(6));
// blocks that are no actions of a program, such as calls of a measured step, have a name
export const nameOf = (b) => b.name ?? `${b.stage}${b.kind}${b.microbatch ?? ""}`;
export const make = (tag, more = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), more);
  element.append(...children);
  return element;
};

export class Chart {
  constructor(panel, view, t) {
    Object.assign(this, { panel, view, t });
    this.pitch = ROW + this.view.curve + GAP;
    this.height = panel.rows.length * this.pitch + (panel.window ? 2 * PHASE : 0) + AXIS;
    this.rows = panel.rows.map(() => []);
    this.blocks = panel.start.map((start, i) => ({
      i, start, end: panel.end[i], row: panel.row[i], kind: this.view.data.kinds[panel.kind[i]].kind,
      look: this.view.data.kinds[panel.kind[i]].shades[panel.shade[i]], stage: panel.stage[i],
      microbatch: panel.microbatch[i], lane: panel.lane ? panel.lane[i] : 0,
      lanes: panel.lanes ? panel.lanes[i] : 1, path: panel.path ? panel.path[i] : "",
      name: panel.name ? panel.name[i] : null, needs: [], feeds: [],
    }));
    this.named = new Map(this.blocks.map((block) => [nameOf(block), block]));
    for (const block of this.blocks) this.rows[block.row].push(block);
    this.markStalled();
    // one size for all numbers of equally long blocks
    this.digits = String(this.blocks.reduce((most, b) => Math.max(most, b.microbatch ?? 0), 0)).length;
    const lengths = this.blocks.map((b) => b.end - b.start).filter((length) => length > 0).sort((a, b) => a - b);
    this.shortLength = lengths[lengths.length >> 2];
    this.period = Math.max(0, ...this.rows.map((row) => {
      const parts = new Set(row.filter((b) => b.microbatch !== null).map((b) => `${b.stage} ${b.microbatch}`));
      return parts.size ? row.reduce((sum, b) => sum + (b.end - b.start) / b.lanes, 0) / parts.size : 0;
    })); // of a microbatch on a stage
    this.measureRows();
    this.connect();
    this.build();
  }

  // in an order that does not run, the actions that never start
  markStalled() {
    const { orders, legal, completed } = this.panel;
    for (const [row, order] of (orders ?? []).entries())
      for (const [at, name] of order.entries()) {
        const block = this.named.get(name);
        if (block) block.never = legal === false && at >= completed[row];
      }
  }

  // Other times of the same actions, in another order: the answer to an edit.
  retime({ orders, starts, ends, held, legal, completed, cycle = [] }) {
    const { panel } = this;
    Object.assign(panel, { orders, legal, completed, cycle, held, last: 0 });
    for (const [row, order] of orders.entries())
      for (const [at, name] of order.entries()) {
        const block = this.named.get(name);
        if (block) Object.assign(block, { start: starts[row][at], end: ends[row][at], path: "", lane: 0, lanes: 1 });
        panel.last = Math.max(panel.last, ends[row][at]);
      }
    for (const row of this.rows) row.sort((a, b) => a.start - b.start || a.end - b.end);
    this.measureRows();
    this.markStalled();
  }

  // no block of a row that starts before blocks[k] ends later than ends[k]
  measureRows() {
    this.ends = this.rows.map((row) => { let far = 0; return row.map((b) => (far = Math.max(far, b.end))); });
  }

  // Where a block goes that is dragged to x: the place in its rank's order before the first action whose middle is
  // later, by the times at which the drag began.
  placeAt({ block, middles }, x) {
    const time = this.time(x), others = this.panel.orders[block.row].filter((name) => name !== nameOf(block));
    const after = middles.find((each) => each.middle > time);
    return after ? others.indexOf(after.name) : others.length;
  }
  middlesBeside(block) {
    return this.rows[block.row].filter((each) => each !== block)
      .map((each) => ({ name: nameOf(each), middle: (each.start + each.end) / 2 }));
  }

  // what waits for what: the data that goes from action to action, and the order of the rank
  connect() {
    const found = new Map();
    const key = (b, kind, stage, track = b.row % this.panel.tracks) => `${track} ${stage}${kind}${b.microbatch}`;
    for (const b of this.blocks) found.set(key(b, b.kind, b.stage), b);
    // of the first two tracks, the same action in the other one
    this.beside = (b) => {
      const { tracks } = this.panel, track = b.row % tracks;
      return tracks > 1 && track < 2 && b.name === null ? found.get(key(b, b.kind, b.stage, 1 - track)) : null;
    };
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
    this.canvas.setAttribute("aria-label", `${label}. ${this.t("Arrow keys go from action to action.")}`);
    this.over = make("canvas");
    this.over.setAttribute("aria-hidden", "true");
    this.frame = make("div", { className: "chart" }, this.canvas, this.over);
    this.section = make("section", {}, make("h2", { textContent: this.panel.title }),
      make("p", { className: "quiet", textContent: this.panel.line }), this.frame);
    this.section.setAttribute("aria-label", this.panel.title);
  }

  resize() {
    this.width = Math.max(this.view.left + RIGHT + 40, this.frame.clientWidth);
    const ratio = window.devicePixelRatio || 1;
    for (const canvas of [this.canvas, this.over]) {
      canvas.width = Math.round(this.width * ratio);
      canvas.height = Math.round(this.height * ratio);
      canvas.style.height = `${this.height}px`;
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    const hatch = make("canvas", { width: 8, height: 8 }).getContext("2d");
    hatch.fillStyle = this.view.colours.idle;
    hatch.fillRect(0, 0, 8, 8);
    hatch.strokeStyle = this.view.colours.hatch;
    for (const d of [-8, 0, 8]) { hatch.moveTo(d - 1, 9); hatch.lineTo(d + 9, -1); }
    hatch.stroke();
    this.hatch = this.canvas.getContext("2d").createPattern(hatch.canvas, "repeat");
  }

  x(time) { return this.view.left + ((time - this.view.from) / (this.view.to - this.view.from)) * (this.width - this.view.left - RIGHT); }
  time(x) { return this.view.from + ((x - this.view.left) / (this.width - this.view.left - RIGHT)) * (this.view.to - this.view.from); }
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
    if (x < this.view.left || row < 0 || row >= this.rows.length || inside > ROW) return null;
    const slack = this.time(this.view.left + 2) - this.time(this.view.left), at = this.time(x);
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
    this.columns = 0;
    for (let row = 0; row < this.rows.length; row++) {
      const top = row * this.pitch;
      pen.font = `12px ${this.view.font}`; pen.textAlign = "right"; pen.textBaseline = "middle"; pen.fillStyle = this.view.colours.text;
      pen.fillText(this.panel.rows[row], this.view.left - 10, top + ROW / 2);
      pen.save();
      pen.beginPath(); pen.rect(this.view.left, 0, this.width - this.view.left - RIGHT, this.height); pen.clip();
      pen.fillStyle = this.hatch;
      pen.fillRect(this.x(0), top, this.x(this.panel.last) - this.x(0), ROW);
      drawn += this.drawRow(pen, row);
      if (this.view.data.held) this.drawHeld(pen, row, top);
      pen.restore();
    }
    if (this.panel.window) this.drawWindow(pen);
    this.drawAxis(pen);
    this.frame.dataset.drawn = drawn;
    this.frame.dataset.columns = this.columns;
    this.frame.dataset.from = this.view.from;
    this.frame.dataset.to = this.view.to;
  }

  drawRow(pen, row) {
    const shares = new Map(), { colours } = this.view; // by column: the share of each kind
    const dense = this.shortLength * (this.x(1) - this.x(0)) < NARROW, span = this.columnTime();
    let drawn = 0, lastMark = -1e9;
    pen.textAlign = "center";
    for (let k = this.first(row, this.view.from); k < this.rows[row].length; k++) {
      const b = this.rows[row][k];
      if (b.start > this.view.to) break;
      const [x, y, width, height] = this.box(b);
      drawn++;
      if (b.end === b.start) {
        if (dense && x < lastMark + 3) continue;
        lastMark = x;
        pen.fillStyle = colours.text;
        pen.fillRect(x - 1, y - 2, 2, height + 4);
      } else if (dense) this.addShares(shares, b, span);
      else this.drawBlock(pen, b, x, y, width, height);
      if (this.view.path && b.path) {
        pen.fillStyle = colours.path;
        pen.fillRect(x, y + height - 1, width, 4);
      }
    }
    for (const [column, kinds] of shares) {
      const left = Math.round(this.x(column * span)), width = Math.round(this.x((column + 1) * span)) - left;
      let base = row * this.pitch + ROW;
      for (const { kind, shades } of this.view.data.kinds) {
        if (!kinds[kind]) continue;
        const high = ROW * Math.min(1, kinds[kind]);
        pen.fillStyle = shades[0].fill;
        pen.globalAlpha = kinds.never ? 0.2 : 1;
        pen.fillRect(left, base - high, width, high);
        base -= high;
      }
    }
    pen.globalAlpha = 1;
    this.columns += shares.size;
    return drawn;
  }

  // Time of a column: that of several microbatches, so that the order of a microbatch's actions makes no pattern.
  columnTime() {
    const least = this.time(COLUMN) - this.time(0);
    return this.period ? this.period * Math.ceil(least / this.period) : least;
  }

  addShares(shares, b, span) {
    for (let column = Math.floor(b.start / span); column * span < b.end; column++) {
      const kinds = shares.get(column) ?? {}, covered = Math.min(b.end, (column + 1) * span) - Math.max(b.start, column * span);
      kinds.never ||= b.never;
      kinds[b.kind] = (kinds[b.kind] ?? 0) + covered / span / b.lanes;
      shares.set(column, kinds);
    }
  }

  drawBlock(pen, b, x, y, width, height) {
    const inner = width > 5 ? width - 1 : width, high = height - (b.lanes > 1);
    pen.fillStyle = b.look.fill;
    pen.globalAlpha = b.never ? 0.2 : 1; // it never starts
    if (inner > 6) {
      pen.beginPath(); pen.roundRect(x, y, inner, high, 2.5); pen.fill();
      pen.globalAlpha = 1;
      pen.setLineDash(b.never ? [3, 2] : []);
      pen.strokeStyle = b.never ? this.view.colours.quiet : this.view.colours.rim; // parts light blocks from the ground
      pen.lineWidth = 0.75; pen.stroke();
      pen.setLineDash([]);
    } else pen.fillRect(x, y, inner, high);
    pen.globalAlpha = 1;
    const text = b.microbatch === null ? "" : String(b.microbatch);
    const size = Math.min(13, height * 0.8, inner / (0.62 * this.digits));
    if (!text || size < 7) return;
    pen.font = `${size}px ${this.view.font}`; pen.fillStyle = b.never ? this.view.colours.text : b.look.ink;
    pen.fillText(text, x + inner / 2, y + height / 2 + 0.5);
  }

  drawHeld(pen, row, top) {
    const curve = this.panel.held?.[row] ?? [], base = top + ROW + this.view.curve;
    pen.fillStyle = this.view.colours.held;
    pen.beginPath(); pen.moveTo(this.x(0), base);
    let y = base;
    for (const [time, value] of curve) {
      const x = this.x(time);
      pen.lineTo(x, y);
      y = base - (value / this.view.data.held) * (this.view.curve - 4);
      pen.lineTo(x, y);
      if (time > this.view.to) break;
    }
    pen.lineTo(this.x(curve.length ? curve[curve.length - 1][0] : 0), base);
    pen.fill();
    pen.fillRect(this.view.left, base - 0.5, this.width, 0.5);
  }

  // where each rank is done with a step; below the rows, steps and phases
  drawWindow(pen) {
    const low = this.panel.rows.length * this.pitch, { ends, steps, phases } = this.panel.window;
    pen.save();
    pen.beginPath(); pen.rect(this.view.left - 1, 0, this.width - this.view.left - RIGHT + 2, this.height); pen.clip();
    pen.strokeStyle = this.view.colours.needs; pen.lineWidth = 1.6; pen.setLineDash([5, 3]);
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
    pen.setLineDash([]); pen.lineWidth = 1; pen.strokeStyle = this.view.colours.line; pen.fillStyle = this.view.colours.text;
    pen.font = `11px ${this.view.font}`; pen.textAlign = "center";
    [steps, phases].forEach((line, at) => {
      const y = low + at * PHASE + 8;
      for (const { name, start, end } of line) {
        const [x, right] = [this.x(start) + 1, this.x(end) - 1];
        // the name stays in sight where only a part of its phase is
        const middle = (Math.max(x, this.view.left) + Math.min(right, this.width - RIGHT)) / 2;
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
    const top = this.height - AXIS, span = this.view.to - this.view.from;
    const most = Math.max(2, Math.floor((this.width - this.view.left - RIGHT) / 80));
    const base = 10 ** Math.floor(Math.log10(span / most));
    const step = base * ([1, 2, 5, 10].find((factor) => span / (base * factor) <= most) ?? 10);
    pen.fillStyle = this.view.colours.quiet; pen.strokeStyle = this.view.colours.line; pen.font = `11px ${this.view.font}`;
    pen.textAlign = "right";
    const { t } = this;
    pen.fillText(this.panel.unit ? `${t("time")}, ${this.panel.unit}` : t("time"), this.view.left - 10, top + 14);
    pen.textAlign = "center";
    pen.beginPath(); pen.moveTo(this.view.left, top + 0.5); pen.lineTo(this.width - RIGHT, top + 0.5);
    for (let at = Math.ceil(this.view.from / step - 1e-9); at * step <= this.view.to * (1 + 1e-12); at++) {
      const x = this.x(at * step);
      pen.moveTo(x, top); pen.lineTo(x, top + 5);
      pen.fillText(number(+(at * step).toPrecision(12)), x, top + 14);
    }
    pen.stroke();
  }

  // Over the timeline: a deadlock's cycle, the selected block with what it waits for and what waits for it, and the
  // block that is dragged.
  mark() {
    const pen = this.over.getContext("2d"), { chosen, drag, colours } = this.view;
    pen.clearRect(0, 0, this.width, this.height);
    pen.save();
    pen.beginPath(); pen.rect(this.view.left - 2, 0, this.width - this.view.left - RIGHT + 4, this.height); pen.clip();
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
    for (const [waiting, awaited] of (this.panel.cycle ?? []).map((pair) => pair.map((name) => this.named.get(name)))) {
      if (!waiting || !awaited) continue;
      tie(awaited, waiting, colours.needs, []);
      around(waiting, colours.needs, [], 3);
      around(awaited, colours.needs, [4, 3]);
    }
    const block = chosen?.chart === this ? chosen.block : null;
    if (block) {
      for (const b of block.feeds) { tie(block, b, colours.feeds, [4, 3]); around(b, colours.feeds, [4, 3]); }
      for (const b of block.needs) { tie(b, block, colours.needs, []); around(b, colours.needs, []); }
      const beside = this.beside(block);
      if (beside) around(beside, colours.text, [2, 2], 2);
      around(block, colours.text, [], 3);
    }
    if (drag?.chart === this && drag.index !== drag.begin) {
      const [, y, width, height] = this.box(drag.block);
      pen.globalAlpha = 0.7;
      pen.fillStyle = drag.block.look.fill;
      pen.fillRect(drag.x - width / 2, y - 5, width, height);
      pen.globalAlpha = 1;
      around(drag.block, colours.text, [], 3);
    }
    pen.restore();
  }

  // what is known of an action, as pairs of a term and its value
  describe(b) {
    const { t } = this, row = this.rows[b.row], before = row[row.indexOf(b) - 1];
    const curve = this.view.data.held ? this.panel.held?.[b.row] : null, chunks = this.panel.chunks;
    const names = (list) => list.map(nameOf).join(", ") || t("nothing");
    const chunk = chunks > 1 ? t(", chunk {chunk} of {chunks} on its rank", { chunk: this.panel.shade[b.i] + 1, chunks }) : "";
    const times = [[t("start"), number(b.start)], [t("end"), number(b.end)], [t("takes"), number(b.end - b.start)]];
    if (b.name !== null) return [[t("on"), this.panel.rows[b.row]], ...times];
    const terms = [
      [t("on"), this.panel.rows[b.row]], [t("stage"), b.stage + chunk],
      [t("microbatch"), b.microbatch ?? t("all")],
      ...times,
      [t("waits for"), names(b.needs)], [t("waited for by"), names(b.feeds)],
      [t("after"), before
        ? t("{action}, idle {time}", { action: nameOf(before), time: number(Math.max(0, b.start - before.end)) })
        : t("nothing")],
    ];
    const beside = this.beside(b);
    if (beside) {
      const span = t("{start} to {end}, takes {time}", {
        start: number(beside.start), end: number(beside.end), time: number(beside.end - beside.start),
      });
      terms.push([t(this.panel.rows[beside.row].split(" ").pop()), span]);
    }
    if (b.never) terms.push([t("never starts"), t("this order does not run")]);
    if (b.path) terms.push([t("critical path"), t(CAUSES[b.path] ?? b.path)]);
    if (curve) terms.push([t("activations"), number((curve.filter(([time]) => time <= b.start).pop() ?? [0, 0])[1])]);
    return terms;
  }
}

