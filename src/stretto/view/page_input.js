// What a reader does: pointer, wheel, keys, buttons.
let waiting = false;
const redraw = () => {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; drawAll(); });
};
const drawAll = () => { for (const chart of charts) { chart.draw(); chart.mark(); } };

const look = (from, to) => {
  const least = data.end / 1e6, span = Math.min(Math.max(to - from, least), data.end);
  view.from = Math.min(Math.max(0, from), data.end - span);
  view.to = view.from + span;
  redraw();
};
const zoom = (factor, at = (view.from + view.to) / 2) =>
  look(at - (at - view.from) * factor, at + (view.to - at) * factor);
const pan = (share) => look(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));

const tip = document.getElementById("tip"), said = document.getElementById("said");
const wordsOf = (kind) => data.kinds.find((each) => each.kind === kind).name;

const choose = (chart, block, x, y, aloud = false) => {
  if (chosen?.block === block && !aloud) return place(x, y);
  chosen = block && { chart, block };
  for (const each of charts) each.mark();
  tip.hidden = !block;
  if (!block) return undefined;
  const facts = chart.facts(block), list = make("dl");
  for (const [term, text] of facts)
    list.append(make("dt", { textContent: term }), make("dd", { textContent: text }));
  tip.replaceChildren(make("b", { textContent: `${nameOf(block)} ${wordsOf(block.kind)}` }), list);
  if (aloud) said.textContent = `${nameOf(block)}, ${wordsOf(block.kind)}, `
    + facts.map(([term, text]) => `${term} ${text}`).join(", ");
  return place(x, y);
};
const place = (x, y) => {
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16)}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 16, innerHeight - box.height - 4))}px`;
};

// select by keyboard or search: bring into view, show, and say aloud
const select = (chart, block) => {
  const span = view.to - view.from;
  if (block.start < view.from || block.end > view.to) {
    const middle = (block.start + block.end) / 2;
    look(middle - span / 2, middle + span / 2);
  }
  const box = chart.canvas.getBoundingClientRect(), [x, y, width, height] = chart.box(block);
  choose(chart, block, box.left + x + width, box.top + y + height, true);
};

const listen = (chart) => {
  const { canvas, frame } = chart;
  const touches = new Map();
  canvas.addEventListener("pointerdown", (event) => {
    touches.set(event.pointerId, event.offsetX);
    canvas.setPointerCapture?.(event.pointerId);
    frame.classList.add("dragging");
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = touches.get(event.pointerId);
    if (before === undefined) {
      const block = chart.find(event.offsetX, event.offsetY);
      canvas.style.cursor = block ? "pointer" : "";
      return choose(chart, block, event.clientX, event.clientY);
    }
    touches.set(event.pointerId, event.offsetX);
    if (touches.size === 1) {
      const shift = chart.time(before) - chart.time(event.offsetX);
      return look(view.from + shift, view.to + shift);
    }
    const other = [...touches].find(([id]) => id !== event.pointerId)[1];
    const wide = Math.max(8, Math.abs(event.offsetX - other));
    return zoom(Math.max(8, Math.abs(before - other)) / wide, chart.time((event.offsetX + other) / 2));
  });
  const release = (event) => { touches.delete(event.pointerId); frame.classList.toggle("dragging", !!touches.size); };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => { if (!touches.size) choose(chart, null); });
  canvas.addEventListener("dblclick", () => look(0, data.end));
  canvas.addEventListener("wheel", (event) => {
    if (event.offsetX < LEFT) return; // over the labels the page scrolls
    event.preventDefault();
    const pixels = event.deltaMode === 1 ? 30 : 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))
      pan(((event.deltaX || event.deltaY) * pixels) / chart.width);
    else zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY * pixels)) * 0.004), chart.time(event.offsetX));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => keys(chart, event));
  canvas.addEventListener("blur", () => choose(chart, null));
};

const keys = (chart, event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const now = chosen?.chart === chart ? chosen.block : null;
  // what another row does at that time
  const time = now ? now.start + (now.end - now.start) * 0.500001 : view.from;
  const shown = (row) => chart.rows[row][Math.min(chart.first(row, time), chart.rows[row].length - 1)];
  const along = (step) => {
    const row = chart.rows[now ? now.row : 0];
    return now ? row[row.indexOf(now) + step] : shown(0);
  };
  const across = (step) => {
    for (let row = (now ? now.row : step > 0 ? -1 : chart.rows.length) + step; chart.rows[row]; row += step)
      if (chart.rows[row].length) return shown(row);
    return null;
  };
  const row = chart.rows[now ? now.row : 0];
  const moves = {
    ArrowLeft: () => along(-1), ArrowRight: () => along(1), ArrowUp: () => across(-1),
    ArrowDown: () => across(1), Home: () => row[0], End: () => row[row.length - 1],
  };
  const views = {
    "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), 0: () => look(0, data.end),
    a: () => pan(-0.2), d: () => pan(0.2), w: () => zoom(0.7), s: () => zoom(1 / 0.7),
    Escape: () => choose(chart, null),
  };
  if (event.shiftKey && (event.key === "ArrowLeft" || event.key === "ArrowRight"))
    pan(event.key === "ArrowLeft" ? -0.2 : 0.2);
  else if (moves[event.key]) { const block = moves[event.key](); if (block) select(chart, block); }
  else if (views[event.key]) views[event.key]();
  else return;
  event.preventDefault();
};

const retint = () => {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["text", "quiet", "idle", "hatch", "rim", "held", "line", "needs", "feeds", "path"])
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  for (const chart of charts) chart.resize();
  drawAll();
};

const on = (id, event, act) => document.getElementById(id).addEventListener(event, act);
on("in", "click", () => zoom(0.7));
on("out", "click", () => zoom(1 / 0.7));
on("fit", "click", () => look(0, data.end));
on("theme", "click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  retint();
});
on("find", "change", (event) => {
  const wanted = event.target.value.trim().toUpperCase();
  for (const chart of charts) {
    const block = chart.blocks.find((b) => nameOf(b) === wanted);
    if (block) return select(chart, block);
  }
  said.textContent = wanted ? `there is no action ${wanted}` : "";
  event.target.setCustomValidity(wanted ? `there is no action ${wanted}` : "");
  return event.target.reportValidity();
});
document.getElementById("path")?.addEventListener("change", (event) => {
  view.path = event.target.checked;
  drawAll();
});
on("find", "input", (event) => event.target.setCustomValidity(""));

data.panels.forEach((panel, at) => charts.push(new Chart(panel, at)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", retint);
addEventListener("resize", retint);
retint();
document.documentElement.dataset.ready = charts.length;
