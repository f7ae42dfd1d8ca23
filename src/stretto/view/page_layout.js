// A layout: the grid of ranks, the groups and messages of the chosen rank, and the counting of ranks in steps.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const make = (tag, more = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), more);
  made.append(...children);
  return made;
};
const FONT = getComputedStyle(document.body).fontFamily;
const TALLEST = 12000; // pixels of the canvas; what lies below is left out
const MOST_LINES = 32; // messages of a kind drawn at once
const MOST_STEPS = 16; // members counted one by one
const colours = {};

// ---------------------------------------------------------------- ranks: strides, coordinates, groups

const grids = data.grids.map(({ name, axes }) => {
  let stride = 1;
  return { name, axes: axes.map(([axis, size]) => { const one = { axis, size, stride }; stride *= size; return one; }) };
});
const first = data.offset, last = data.offset + data.world - 1;
const coordinate = (rank, { stride, size }) => Math.floor((rank - first) / stride) % size;
const nodeOf = (rank) => Math.floor((rank - first) / data.node);
const varying = (grid, mask) => grids[grid].axes.filter(({ axis }) => mask.includes(axis));
const fixed = (grid, mask) => grids[grid].axes.filter(({ axis }) => !mask.includes(axis));

const members = (rank, grid, mask) => {
  const axes = varying(grid, mask);
  let ranks = [rank - axes.reduce((sum, one) => sum + coordinate(rank, one) * one.stride, 0)];
  for (const { size, stride } of axes) {
    const more = [];
    for (let i = 0; i < size; i++) for (const start of ranks) more.push(start + i * stride);
    ranks = more;
  }
  return ranks;
};
// the number of a rank's group: its fixed coordinates, the first axis counted fastest
const numberOf = (rank, others) => {
  let number = 0, scale = 1;
  for (const one of others) { number += coordinate(rank, one) * scale; scale *= one.size; }
  return number;
};
const pipeline = grids[0].axes.find(({ axis }) => axis === "pp");
// the messages of a group that this rank sends: some are of the ranks of an encoder or a decoder alone
const sent = (rank, group) => group.sends.filter(({ stages }) => {
  const stage = coordinate(rank, pipeline);
  return !stages || (stages[0] <= stage && stage < stages[1]);
});
const receivers = (rank, ranks, to) => {
  const at = ranks.indexOf(rank), many = ranks.length;
  if (to === "others") return ranks.filter((other) => other !== rank);
  if (to === "before") return many > 1 ? [ranks[(at - 1 + many) % many]] : [];
  const other = ranks[at + (to === "next" ? 1 : -1)];
  return other === undefined ? [] : [other];
};

// ---------------------------------------------------------------- state

const state = { rank: first, grid: 0, mask: null, step: 0 }; // mask null: all groups of the rank
const buttons = [];
const same = (mask, other) => mask.length === other.length && mask.every((axis) => other.includes(axis));
const chosen = () => state.mask && data.groups.find((g) => g.grid === state.grid && same(g.mask, state.mask));
const counted = () => state.mask ?? (data.groups[0]?.grid === state.grid ? data.groups[0].mask : []);

const choose = (change) => {
  const all = state.step === steps().length - 1;
  Object.assign(state, change);
  state.step = all ? steps().length - 1 : Math.min(state.step, steps().length - 1);
  show();
};
const go = (rank, scroll = true) => {
  choose({ rank: Math.min(Math.max(first, rank), last) });
  byId("said").textContent = aloud();
  if (!scroll) return;
  const box = place(state.rank), view = byId("grid").closest(".scroll");
  if (!box) return;
  if (box[1] < view.scrollTop) view.scrollTop = box[1] - 20;
  else if (box[1] + box[3] > view.scrollTop + view.clientHeight) view.scrollTop = box[1] + box[3] - view.clientHeight + 20;
};

// ---------------------------------------------------------------- the grid

const canvas = byId("grid"), pen = canvas.getContext("2d"), frame = canvas.parentElement;
let cells = {};

const letters = (rank) => data.letters.map(([axis, letter]) => {
  const grid = axis === "ep" ? grids[1] : grids[0];
  return letter + coordinate(rank, grid.axes.find((one) => one.axis === axis));
}).join(" ");

const measure = () => {
  const wide = Math.max(6.4 * Math.max(letters(last).length, String(last).length + 2) + 10, 40);
  const look = data.world <= 512 ? { w: wide, h: 40, gap: 8, pad: 8, top: 18, text: 2 }
    : data.world <= 2048 ? { w: 34, h: 20, gap: 6, pad: 6, top: 16, text: 1 }
      : data.world <= 16384 ? { w: 9, h: 9, gap: 3, pad: 4, top: 0, text: 0 }
        : { w: 4, h: 4, gap: 1, pad: 2, top: 0, text: 0 };
  const width = Math.max(120, frame.parentElement.clientWidth - 4);
  let across = Math.min(data.node, data.world);
  const inner = (count) => 2 * look.pad + count * (look.w + look.gap) - look.gap;
  while (across > 1 && inner(across) > width) across = Math.ceil(across / 2);
  const lines = Math.ceil(Math.min(data.node, data.world) / across);
  const boxW = inner(across), boxH = 2 * look.pad + lines * (look.h + look.gap) - look.gap;
  const apart = look.text ? 14 : 8, down = boxH + look.top + (look.text ? 8 : 6);
  const nodes = Math.ceil(data.world / data.node);
  const columns = Math.max(1, Math.min(nodes, Math.floor((width + apart) / (boxW + apart))));
  const rows = Math.min(Math.ceil(nodes / columns), Math.max(1, Math.floor(TALLEST / down)));
  const drawn = Math.min(nodes, rows * columns);
  cells = { ...look, across, boxW, boxH, apart, down, columns, drawn, nodes, width, height: rows * down + 4 };
};
const corner = (node) => [
  2 + (node % cells.columns) * (cells.boxW + cells.apart), 2 + Math.floor(node / cells.columns) * cells.down + cells.top,
];
// left, top, width and height of a rank's cell; null where it is not drawn
const place = (rank) => {
  const node = nodeOf(rank);
  if (node >= cells.drawn) return null;
  const inside = (rank - first) % data.node, [x, y] = corner(node);
  return [
    x + cells.pad + (inside % cells.across) * (cells.w + cells.gap),
    y + cells.pad + Math.floor(inside / cells.across) * (cells.h + cells.gap), cells.w, cells.h,
  ];
};
const rankAt = (x, y) => {
  const column = Math.floor((x - 2) / (cells.boxW + cells.apart)), row = Math.floor((y - 2) / cells.down);
  const node = row * cells.columns + column;
  if (column < 0 || column >= cells.columns || row < 0 || node >= cells.drawn) return null;
  const [left, top] = corner(node);
  const across = Math.floor((x - left - cells.pad + cells.gap / 2) / (cells.w + cells.gap));
  const down = Math.floor((y - top - cells.pad + cells.gap / 2) / (cells.h + cells.gap));
  const rank = first + node * data.node + down * cells.across + across;
  const good = across >= 0 && across < cells.across && down >= 0 && rank <= last && nodeOf(rank) === node;
  return good ? rank : null;
};

// boxes round runs of neighbours of one group
const outline = (ranks, colourOf, groupOf, wide) => {
  let run = null;
  const close = () => {
    if (!run) return;
    const [x, y] = place(run.start), [end] = place(run.end), out = Math.min(3, cells.gap / 2);
    const colour = colourOf(run.start);
    pen.beginPath();
    pen.roundRect(x - out, y - out, end + cells.w - x + 2 * out, cells.h + 2 * out, cells.text ? 6 : 2);
    pen.globalAlpha = cells.text ? 0.16 : 0.6; pen.fillStyle = colour; pen.fill();
    pen.globalAlpha = 1; pen.strokeStyle = colour; pen.lineWidth = wide; pen.stroke();
    run = null;
  };
  for (const rank of ranks) {
    if (!place(rank)) continue;
    const next = run && rank === run.end + 1 && place(rank)[1] === place(run.end)[1]
      && nodeOf(rank) === nodeOf(run.end) && groupOf(rank) === groupOf(run.start);
    if (next) run.end = rank;
    else { close(); run = { start: rank, end: rank }; }
  }
  close();
};

const arrow = (from, to, colour) => {
  const a = place(from), b = place(to);
  if (!a || !b) return;
  const [x0, y0] = [a[0] + a[2] / 2, a[1] + a[3] / 2], [x1, y1] = [b[0] + b[2] / 2, b[1] + b[3] / 2];
  const bend = y0 === y1 ? -(cells.h / 2 + 10) : 0, side = y0 === y1 ? 0 : 14;
  const [mx, my] = [(x0 + x1) / 2 + side, (y0 + y1) / 2 + bend];
  // it ends at the edge of the cell
  const far = Math.hypot(x1 - mx, y1 - my) || 1, reach = Math.min(far * 0.6, cells.h / 2);
  const [ex, ey] = [x1 - ((x1 - mx) / far) * reach, y1 - ((y1 - my) / far) * reach];
  pen.strokeStyle = colour; pen.fillStyle = colour; pen.lineWidth = cells.text ? 2 : 1.25;
  pen.setLineDash(nodeOf(from) === nodeOf(to) ? [] : [6, 4]);
  pen.beginPath(); pen.moveTo(x0, y0 - (bend ? cells.h / 2 - 2 : 0)); pen.quadraticCurveTo(mx, my, ex, ey); pen.stroke();
  pen.setLineDash([]);
  const turn = Math.atan2(ey - my, ex - mx), size = cells.text ? 8 : 5;
  pen.beginPath(); pen.moveTo(ex, ey);
  for (const spread of [-0.45, 0.45]) pen.lineTo(ex - size * Math.cos(turn + spread), ey - size * Math.sin(turn + spread));
  pen.fill();
};

const colourOfGroup = (group) => data.outlines[data.groups.indexOf(group) % data.outlines.length];
const everyRank = function* () {
  for (let rank = first; rank <= last && nodeOf(rank) < cells.drawn; rank++) yield rank;
};

const drawCells = () => {
  pen.textAlign = "left"; pen.textBaseline = "middle"; pen.font = `11px ${FONT}`;
  for (let node = 0; node < cells.drawn; node++) {
    const [x, y] = corner(node);
    pen.strokeStyle = colours.line; pen.lineWidth = 1;
    pen.beginPath(); pen.roundRect(x + 0.5, y + 0.5, cells.boxW - 1, cells.boxH - 1, cells.text ? 6 : 3); pen.stroke();
    if (!cells.text) continue;
    pen.fillStyle = colours.quiet;
    pen.fillText(`node ${node}`, x + 2, y - 8);
  }
  for (const rank of everyRank()) {
    const [x, y, w, h] = place(rank);
    pen.fillStyle = data.stages[coordinate(rank, pipeline)];
    if (cells.text === 0 && !state.mask) { pen.fillRect(x, y, w, h); continue; }
    if (cells.text && data.stages.length > 1) pen.fillRect(x, y + h - 4, w, 4);
  }
};
// on top of the arrows, with a rim that parts it from them
const drawText = () => {
  const rest = state.mask && fixed(state.grid, state.mask);
  const write = (text, x, y, font) => {
    pen.font = `${font} ${FONT}`;
    pen.strokeText(text, x, y); pen.fillText(text, x, y);
  };
  pen.textAlign = "center"; pen.textBaseline = "middle"; pen.lineJoin = "round";
  pen.strokeStyle = colours.ground; pen.fillStyle = colours.text; pen.lineWidth = 3;
  for (const rank of everyRank()) {
    const [x, y, w] = place(rank);
    write(rank, x + w / 2, y + (cells.text === 2 ? 11 : 8), cells.text === 2 ? "bold 13px" : "11px");
    if (cells.text < 2) continue;
    write(rest ? `g${numberOf(rank, rest)}` : letters(rank), x + w / 2, y + 26, "10.5px");
  }
};

const draw = () => {
  pen.clearRect(0, 0, cells.width, cells.height);
  const { rank, grid, mask } = state;
  const thick = cells.text ? 2.5 : 1.25;
  if (!cells.text) drawCells();
  if (mask) {
    const rest = fixed(grid, mask), number = (each) => numberOf(each, rest);
    outline(everyRank(), (each) => data.outlines[number(each) % data.outlines.length], number, cells.text ? 2 : 1);
  } else {
    // the largest first, so that a group inside another one stays visible
    for (const group of [...data.groups].sort((a, b) => b.size - a.size)) {
      const ranks = members(rank, group.grid, group.mask).filter((other) => other !== rank).sort((a, b) => a - b);
      outline(ranks, () => colourOfGroup(group), () => 0, thick);
    }
  }
  if (cells.text) drawCells();
  if (mask) {
    for (const each of members(rank, grid, mask)) ring(each, colours.text, thick);
  }
  for (const group of mask ? [chosen()].filter(Boolean) : data.groups) {
    const ranks = members(rank, group.grid, group.mask);
    const colour = mask ? colours.text : colourOfGroup(group);
    for (const { to } of sent(rank, group)) for (const other of receivers(rank, ranks, to).slice(0, MOST_LINES)) arrow(rank, other, colour);
  }
  if (cells.text) drawText();
  for (const each of mask ? steps()[state.step].ranks ?? [] : []) ring(each, colours.feeds, thick + 0.5);
  ring(rank, colours.needs, thick + 0.5);
};
const ring = (rank, colour, wide) => {
  const box = place(rank), out = Math.min(3, cells.gap / 2);
  if (!box) return;
  pen.strokeStyle = colour; pen.lineWidth = wide;
  pen.strokeRect(box[0] - out, box[1] - out, box[2] + 2 * out, box[3] + 2 * out);
};

const resize = () => {
  measure();
  const ratio = Math.min(window.devicePixelRatio || 1, 16000 / cells.height);
  canvas.width = Math.round(cells.width * ratio);
  canvas.height = Math.round(cells.height * ratio);
  canvas.style.width = `${cells.width}px`;
  canvas.style.height = `${cells.height}px`;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ground", "text", "quiet", "line", "needs", "feeds"]) colours[name] = style.getPropertyValue(`--${name}`).trim();
  const rest = data.world - Math.min(data.world, cells.drawn * data.node), note = byId("left");
  note.hidden = !rest && cells.text > 0;
  note.textContent = rest
    ? `The first ${(data.world - rest).toLocaleString("en")} ranks are drawn; the other `
      + `${rest.toLocaleString("en")} can be chosen by their number. `
    : "";
  note.textContent += `Of a rank's messages of a kind, the first ${MOST_LINES} are drawn.`;
  draw();
};

// ---------------------------------------------------------------- the chosen rank

const some = (ranks, most = 16) => (ranks.length <= most ? ranks.join(", ")
  : `${ranks.slice(0, 8).join(", ")}, ... ${ranks[ranks.length - 1]} (${ranks.length.toLocaleString("en")} ranks)`);
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

const where = (rank, others) => {
  const inside = others.filter((other) => nodeOf(other) === nodeOf(rank));
  const outside = others.filter((other) => nodeOf(other) !== nodeOf(rank));
  const named = (text) => (text ? ` (${text})` : "");
  return [
    [inside, `inside the node${named(data.links.inside)}`],
    [outside, `between nodes${named(data.links.between)}`],
  ].filter(([ranks]) => ranks.length).map(([ranks, link]) => `to ${some(ranks)} ${link}`);
};
const nothing = (send, ranks) => {
  const [stage, loop] = send.to === "next" ? ["last", ranks[0]] : ["first", ranks[ranks.length - 1]];
  const chunks = data.encoder ? "" : `; where a rank has several chunks in a loop, to ${loop}`;
  return `it has the ${stage} stage${chunks}`;
};

const groupFacts = (group) => {
  const ranks = members(state.rank, group.grid, group.mask);
  const number = numberOf(state.rank, fixed(group.grid, group.mask));
  const button = make("button", { type: "button", textContent: group.axes });
  button.addEventListener("click", () => {
    choose({ grid: group.grid, mask: group.mask });
    document.querySelector(`#facts [data-axes="${group.axes}"] button`).focus();
  });
  const swatch = make("i");
  swatch.style.background = colourOfGroup(group);
  const head = make("h3", {}, swatch, button, make("span", { className: "quiet", textContent: `g${number} of ${group.count}` }));
  const parts = [head, make("p", { className: "members", textContent: some(ranks) })];
  const list = make("ul");
  for (const send of sent(state.rank, group)) {
    const others = receivers(state.rank, ranks, send.to);
    const lines = others.length ? where(state.rank, others) : [`to none: ${nothing(send, ranks)}`];
    for (const line of lines) list.append(make("li", {}, `${send.content} ${line}`));
    list.lastChild?.append(make("span", { className: "quiet", textContent: `: ${send.collective}` }));
  }
  if (group.note) list.append(make("li", { className: "quiet", textContent: group.note }));
  const card = make("div", { className: "group" }, ...parts, ...(list.childElementCount ? [list] : []));
  card.dataset.axes = group.axes;
  return card;
};
const showFacts = () => {
  const { rank } = state, inside = (rank - first) % data.node;
  const seats = data.letters.map(([axis, , word]) => {
    const one = (axis === "ep" ? grids[1] : grids[0]).axes.find((each) => each.axis === axis);
    const stack = axis !== "pp" || !data.encoder ? "" : coordinate(rank, one) < data.encoder ? ", encoder" : ", decoder";
    return `${word} ${coordinate(rank, one)} of ${one.size} (${axis}${stack})`;
  });
  byId("facts").replaceChildren(
    make("h2", { textContent: `Rank ${rank}` }),
    make("p", { textContent: `node ${nodeOf(rank)}, local rank ${inside}` }),
    make("p", { className: "quiet", textContent: seats.join(", ") }),
    ...data.groups.map(groupFacts),
  );
};
const aloud = () => `rank ${state.rank}, node ${nodeOf(state.rank)}, ${letters(state.rank)}`;

// ---------------------------------------------------------------- counting, step by step

const at = (rank) => (first ? `(${rank} - ${first})` : `${rank}`);
const shownAxes = () => {
  const axes = grids[state.grid].axes.filter(({ size }) => size > 1);
  return axes.length ? axes : grids[state.grid].axes.slice(0, 1);
};
const names = (axes) => axes.map(({ axis }) => axis).join(", ");

// each step: what is said, the cells of the table that it is about, the ranks it leads to
const steps = () => {
  const { rank, grid } = state, mask = counted(), axes = shownAxes(), list = [];
  axes.forEach((one, i) => {
    const before = axes[i - 1];
    const text = before
      ? `The stride of ${one.axis} is that of ${before.axis} times its size: ${before.stride} × ${before.size} = ${one.stride}.`
      : `${one.axis} varies fastest, so neighbours along it are 1 rank apart: stride 1.`;
    list.push({ text, cells: [[one.axis, "stride"]] });
  });
  for (const one of axes)
    list.push({
      text: `${one.axis} of rank ${rank} = ${at(rank)} // ${one.stride} % ${one.size} = ${coordinate(rank, one)}.`,
      cells: [[one.axis, "coordinate"]],
    });
  const inner = varying(grid, mask).filter(({ size }) => size > 1);
  const outer = axes.filter(({ axis }) => !inner.some((one) => one.axis === axis));
  const product = (some_) => some_.reduce((all, { size }) => all * size, 1);
  const sizes = (some_) => (some_.length > 1 ? `${some_.map(({ size }) => size).join(" × ")} = ${product(some_)}` : `${product(some_)}`);
  list.push({
    text: `Mask [${axes.map((one) => (inner.includes(one) ? "True" : "False")).join(", ")}] over [${names(axes)}]: `
      + (inner.length ? `${names(inner)} ${inner.length > 1 ? "vary" : "varies"} inside a group, which has ${sizes(inner)} ranks; ` : "nothing varies, each rank is alone; ")
      + (outer.length ? `${names(outer)} ${outer.length > 1 ? "stay" : "stays"}, so there are ${sizes(outer)} groups.` : "nothing stays, so there is one group."),
    cells: axes.map(({ axis }) => [axis, "mask"]),
  });
  let scale = 1;
  const digits = outer.map((one) => { const term = `${coordinate(rank, one)} × ${scale}`; scale *= one.size; return term; });
  const number = numberOf(rank, outer), start = members(rank, grid, mask)[0];
  const where_ = (some_) => some_.map((one) => `${one.axis} ${coordinate(rank, one)}`).join(", ");
  if (outer.length) {
    list.push({
      text: `Rank ${rank} is in the group with ${where_(outer)}: number ${digits.join(" + ")} = ${number}.`,
      cells: outer.map(({ axis }) => [axis, "coordinate"]),
    });
    const sum = outer.map((one) => `${coordinate(rank, one)} × ${one.stride}`).join(" + ");
    list.push({
      text: `That group begins at ${first ? `${first} + ` : ""}${sum} = ${start}: coordinates times strides, over the axes that stay.`,
      cells: outer.flatMap(({ axis }) => [[axis, "stride"], [axis, "coordinate"]]), ranks: [start],
    });
  } else list.push({ text: `The one group begins at rank ${start}.`, cells: [], ranks: [start] });
  const ranks = members(rank, grid, mask);
  const member = (i) => {
    let left = i;
    const parts = inner.map((one) => { const c = left % one.size; left = Math.floor(left / one.size); return { one, c }; });
    const seat = parts.map(({ one, c }) => `${one.axis} ${c}`).join(", ");
    const sum = parts.map(({ one, c }) => `${c} × ${one.stride}`).join(" + ");
    return `Member ${i}: ${i} counted out over ${names(inner)} is ${seat}; rank ${start} + ${sum} = ${ranks[i]}.`;
  };
  const cells_ = inner.map(({ axis }) => [axis, "stride"]);
  const single = ranks.length <= MOST_STEPS ? ranks.length : MOST_STEPS - 1;
  if (inner.length)
    for (let i = 0; i < single; i++) list.push({ text: member(i), cells: cells_, ranks: ranks.slice(0, i + 1) });
  if (single < ranks.length)
    list.push({ text: `And so on, up to the last. ${member(ranks.length - 1)}`, cells: cells_, ranks });
  list.push({ text: `The group of rank ${rank} is [${some(ranks)}].`, cells: [], ranks });
  return list;
};

const showArithmetic = () => {
  const mask = counted(), list = steps(), now = list[state.step];
  const lit = (axis, part) => (now.cells.some(([a, p]) => a === axis && p === part) ? "now" : "");
  const cell = (axis, part, text) => make("td", { className: lit(axis, part), textContent: text });
  const rows = shownAxes().map((one) => {
    const box = make("input", { type: "checkbox", checked: mask.includes(one.axis) });
    box.addEventListener("change", () => {
      const others = counted().filter((axis) => axis !== one.axis);
      choose({ mask: box.checked ? [...others, one.axis] : others });
      document.querySelector(`#axes input[data-axis="${one.axis}"]`).focus();
    });
    box.dataset.axis = one.axis;
    const label = make("label", {}, box, mask.includes(one.axis) ? "True" : "False");
    return make("tr", {}, make("th", { textContent: one.axis }), cell(one.axis, "size", one.size),
      cell(one.axis, "stride", one.stride), cell(one.axis, "coordinate", coordinate(state.rank, one)),
      make("td", { className: `text ${lit(one.axis, "mask")}` }, label));
  });
  const head = ["axis", "size", "stride", `of rank ${state.rank}`, "mask"];
  byId("axes").replaceChildren(make("table", {},
    make("thead", {}, make("tr", {}, ...head.map((text, i) => make("th", { textContent: text, className: i === 4 ? "text" : "" })))),
    make("tbody", {}, ...rows)));
  byId("lines").replaceChildren(...list.slice(0, state.step + 1).map(({ text }) => make("li", { textContent: text })));
  byId("step").textContent = `step ${state.step + 1} of ${list.length}`;
  byId("back").disabled = byId("begin").disabled = state.step === 0;
  byId("next").disabled = byId("end").disabled = state.step === list.length - 1;
};
const stepTo = (step) => {
  // what is counted is also drawn
  if (!state.mask) state.mask = counted();
  state.step = Math.min(Math.max(0, step), steps().length - 1);
  show();
};

// ---------------------------------------------------------------- what a reader does

const show = () => {
  for (const { button, is } of buttons) button.setAttribute("aria-pressed", is());
  byId("rank").value = state.rank;
  Object.assign(frame.dataset, { rank: state.rank, axes: state.mask ? state.mask.join("-") : "all", drawn: cells.drawn });
  draw();
  showFacts();
  showArithmetic();
};
const offer = (into, text, change, is, title = "") => {
  const button = make("button", { type: "button", textContent: text, title });
  button.addEventListener("click", () => choose(change));
  byId(into).append(button);
  buttons.push({ button, is });
};
offer("choices", "of the rank", { mask: null, grid: 0 }, () => state.mask === null, "all groups of the chosen rank");
for (const group of data.groups)
  offer("choices", group.axes, { grid: group.grid, mask: group.mask }, () => chosen() === group,
    `${plural(group.count, "group")} of ${group.size}, ${group.links}`);
if (grids.length > 1)
  grids.forEach(({ name }, grid) => offer("kinds", `ranks of ${name}`, {
    grid, mask: data.groups.find((group) => group.grid === grid)?.mask ?? [],
  }, () => state.grid === grid));

const tip = byId("tip");
canvas.addEventListener("click", (event) => { const rank = rankAt(event.offsetX, event.offsetY); if (rank !== null) go(rank, false); });
canvas.addEventListener("pointermove", (event) => {
  const rank = rankAt(event.offsetX, event.offsetY);
  tip.hidden = rank === null || event.pointerType === "touch";
  if (tip.hidden) return;
  tip.replaceChildren(make("b", { textContent: `rank ${rank}` }), make("div", { textContent: `node ${nodeOf(rank)}, ${letters(rank)}` }));
  const box = tip.getBoundingClientRect(), x = event.clientX + 16;
  tip.style.left = `${Math.max(4, x + box.width > innerWidth ? event.clientX - 16 - box.width : x)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 16, innerHeight - box.height - 4))}px`;
});
canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
canvas.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const to = {
    ArrowLeft: state.rank - 1, ArrowRight: state.rank + 1, ArrowUp: state.rank - cells.across,
    ArrowDown: state.rank + cells.across, Home: first, End: last,
  }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  go(to);
});
byId("rank").addEventListener("change", (event) => { const rank = Math.round(event.target.valueAsNumber); if (!Number.isNaN(rank)) go(rank); });
const press = (id, act) => byId(id).addEventListener("click", act);
press("begin", () => stepTo(0));
press("back", () => stepTo(state.step - 1));
press("next", () => stepTo(state.step + 1));
press("end", () => stepTo(Infinity));
press("theme", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  resize();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", resize);
addEventListener("resize", resize);
resize();
show();
document.documentElement.dataset.ready = data.world;
