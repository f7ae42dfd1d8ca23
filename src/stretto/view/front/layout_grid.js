// The grid of ranks on a canvas: a box for each node, a cell for each rank, outlines of groups, messages as arrows.
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { html } from "stretto/controls";
import { sameAxes } from "stretto/layout_ranks";
import { t } from "stretto/strings";

const TALLEST = 12000; // pixels of the canvas; what lies below is left out
const MOST_LINES = 32; // messages of a kind drawn at once

// Sizes and places of cells in a width of pixels.
const measure = (ranksOf, width) => {
  const { data, letters, first, last, nodeOf } = ranksOf;
  const wide = Math.max(6.4 * Math.max(letters(last).length, String(last).length + 2) + 10, 40);
  const look = data.world <= 512 ? { w: wide, h: 40, gap: 8, pad: 8, top: 18, text: 2 }
    : data.world <= 2048 ? { w: 34, h: 20, gap: 6, pad: 6, top: 16, text: 1 }
      : data.world <= 16384 ? { w: 9, h: 9, gap: 3, pad: 4, top: 0, text: 0 }
        : { w: 4, h: 4, gap: 1, pad: 2, top: 0, text: 0 };
  const { w, h, gap, pad, top, text } = look;
  let across = Math.min(data.node, data.world);
  const inner = (count) => 2 * pad + count * (w + gap) - gap;
  while (across > 1 && inner(across) > width) across = Math.ceil(across / 2);
  const lines = Math.ceil(Math.min(data.node, data.world) / across);
  const boxW = inner(across), boxH = 2 * pad + lines * (h + gap) - gap;
  const apart = text ? 14 : 8, down = boxH + top + (text ? 8 : 6);
  const nodes = Math.ceil(data.world / data.node);
  const columns = Math.max(1, Math.min(nodes, Math.floor((width + apart) / (boxW + apart))));
  const rows = Math.min(Math.ceil(nodes / columns), Math.max(1, Math.floor(TALLEST / down)));
  const drawn = Math.min(nodes, rows * columns);
  const corner = (node) => [2 + (node % columns) * (boxW + apart), 2 + Math.floor(node / columns) * down + top];
  return {
    ...look, across, boxW, boxH, drawn, width, height: rows * down + 4, corner,
    // left, top, width and height of a rank's cell; null where it is not drawn
    place: (rank) => {
      const node = nodeOf(rank);
      if (node >= drawn) return null;
      const inside = (rank - first) % data.node, [x, y] = corner(node);
      return [x + pad + (inside % across) * (w + gap), y + pad + Math.floor(inside / across) * (h + gap), w, h];
    },
    rankAt: (x, y) => {
      const column = Math.floor((x - 2) / (boxW + apart)), row = Math.floor((y - 2) / down), node = row * columns + column;
      if (column < 0 || column >= columns || row < 0 || node >= drawn) return null;
      const [left, up] = corner(node);
      const over = Math.floor((x - left - pad + gap / 2) / (w + gap)), below = Math.floor((y - up - pad + gap / 2) / (h + gap));
      const rank = first + node * data.node + below * across + over;
      return over >= 0 && over < across && below >= 0 && rank <= last && nodeOf(rank) === node ? rank : null;
    },
  };
};

const draw = (pen, cells, ranksOf, { rank, grid, mask, marked }) => {
  const { data, first, last, nodeOf, members, fixed, numberOf, stageOf, sent, receivers, letters } = ranksOf;
  const style = getComputedStyle(document.documentElement), font = getComputedStyle(document.body).fontFamily;
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const { place, text } = cells, thick = text ? 2.5 : 1.25;
  const everyRank = function* () { for (let each = first; each <= last && nodeOf(each) < cells.drawn; each++) yield each; };
  const group = data.groups.find((each) => mask && each.grid === grid && sameAxes(each.mask, mask));
  const colourOf = (each) => data.outlines[data.groups.indexOf(each) % data.outlines.length];

  const ring = (each, stroke, wide) => {
    const box = place(each), out = Math.min(3, cells.gap / 2);
    if (!box) return;
    pen.strokeStyle = stroke; pen.lineWidth = wide;
    pen.strokeRect(box[0] - out, box[1] - out, box[2] + 2 * out, box[3] + 2 * out);
  };
  // boxes round runs of neighbours of one group
  const outline = (ranks, strokeOf, groupOf, wide) => {
    let run = null;
    const close = () => {
      if (!run) return;
      const [x, y] = place(run.start), [end] = place(run.end), out = Math.min(3, cells.gap / 2), stroke = strokeOf(run.start);
      pen.beginPath();
      pen.roundRect(x - out, y - out, end + cells.w - x + 2 * out, cells.h + 2 * out, text ? 6 : 2);
      pen.globalAlpha = text ? 0.16 : 0.6; pen.fillStyle = stroke; pen.fill();
      pen.globalAlpha = 1; pen.strokeStyle = stroke; pen.lineWidth = wide; pen.stroke();
      run = null;
    };
    for (const each of ranks) {
      if (!place(each)) continue;
      const next = run && each === run.end + 1 && place(each)[1] === place(run.end)[1]
        && nodeOf(each) === nodeOf(run.end) && groupOf(each) === groupOf(run.start);
      if (next) run.end = each;
      else { close(); run = { start: each, end: each }; }
    }
    close();
  };
  const arrow = (from, to, stroke) => {
    const a = place(from), b = place(to);
    if (!a || !b) return;
    const [x0, y0] = [a[0] + a[2] / 2, a[1] + a[3] / 2], [x1, y1] = [b[0] + b[2] / 2, b[1] + b[3] / 2];
    const bend = y0 === y1 ? -(cells.h / 2 + 10) : 0, side = y0 === y1 ? 0 : 14;
    const [mx, my] = [(x0 + x1) / 2 + side, (y0 + y1) / 2 + bend];
    // it ends at the edge of the cell
    const far = Math.hypot(x1 - mx, y1 - my) || 1, reach = Math.min(far * 0.6, cells.h / 2);
    const [ex, ey] = [x1 - ((x1 - mx) / far) * reach, y1 - ((y1 - my) / far) * reach];
    pen.strokeStyle = stroke; pen.fillStyle = stroke; pen.lineWidth = text ? 2 : 1.25;
    pen.setLineDash(nodeOf(from) === nodeOf(to) ? [] : [6, 4]);
    pen.beginPath(); pen.moveTo(x0, y0 - (bend ? cells.h / 2 - 2 : 0)); pen.quadraticCurveTo(mx, my, ex, ey); pen.stroke();
    pen.setLineDash([]);
    const turn = Math.atan2(ey - my, ex - mx), size = text ? 8 : 5;
    pen.beginPath(); pen.moveTo(ex, ey);
    for (const spread of [-0.45, 0.45]) pen.lineTo(ex - size * Math.cos(turn + spread), ey - size * Math.sin(turn + spread));
    pen.fill();
  };
  const drawCells = () => {
    pen.textAlign = "left"; pen.textBaseline = "middle"; pen.font = `11px ${font}`;
    for (let node = 0; node < cells.drawn; node++) {
      const [x, y] = cells.corner(node);
      pen.strokeStyle = colour("line"); pen.lineWidth = 1;
      pen.beginPath(); pen.roundRect(x, y, cells.boxW, cells.boxH, 4); pen.stroke();
      if (text) { pen.fillStyle = colour("quiet"); pen.fillText(`${t("node")} ${node}`, x + 1, y - 8); }
    }
    for (const each of everyRank()) {
      const [x, y, w, h] = place(each);
      pen.fillStyle = data.stages[stageOf(each)];
      if (text === 0 && !mask) pen.fillRect(x, y, w, h);
      else if (text && data.stages.length > 1) pen.fillRect(x, y + h - 4, w, 4);
    }
  };
  // on top of the arrows, with a rim that parts it from them
  const drawText = () => {
    const rest = mask && fixed(grid, mask);
    const write = (what, x, y, size) => { pen.font = `${size} ${font}`; pen.strokeText(what, x, y); pen.fillText(what, x, y); };
    pen.textAlign = "center"; pen.textBaseline = "middle"; pen.lineJoin = "round";
    pen.strokeStyle = colour("ground"); pen.fillStyle = colour("text"); pen.lineWidth = 3;
    for (const each of everyRank()) {
      const [x, y, w] = place(each);
      write(each, x + w / 2, y + (text === 2 ? 11 : 8), text === 2 ? "bold 13px" : "11px");
      if (text === 2) write(rest ? `g${numberOf(each, rest)}` : letters(each), x + w / 2, y + 26, "10.5px");
    }
  };

  pen.clearRect(0, 0, cells.width, cells.height);
  if (!text) drawCells();
  if (mask) {
    const rest = fixed(grid, mask), number = (each) => numberOf(each, rest);
    outline(everyRank(), (each) => data.outlines[number(each) % data.outlines.length], number, text ? 2 : 1);
  } else {
    // the largest first, so that a group inside another one stays visible
    for (const each of [...data.groups].sort((a, b) => b.size - a.size)) {
      const ranks = members(rank, each.grid, each.mask).filter((other) => other !== rank).sort((a, b) => a - b);
      outline(ranks, () => colourOf(each), () => 0, thick);
    }
  }
  if (text) drawCells();
  if (mask) for (const each of members(rank, grid, mask)) ring(each, colour("text"), thick);
  for (const each of mask ? [group].filter(Boolean) : data.groups) {
    const ranks = members(rank, each.grid, each.mask), stroke = mask ? colour("text") : colourOf(each);
    for (const { to } of sent(rank, each)) for (const other of receivers(rank, ranks, to).slice(0, MOST_LINES)) arrow(rank, other, stroke);
  }
  if (text) drawText();
  for (const each of marked) ring(each, colour("feeds"), thick + 0.5);
  ring(rank, colour("needs"), thick + 0.5);
};

// `mask`: the axes that vary inside the groups that are shown, null for all groups of the rank; `marked`: ranks.
export const Grid = ({ ranksOf, rank, grid, mask, marked, about, onRank }) => {
  const scroll = useRef(null), canvas = useRef(null), [width, setWidth] = useState(0), [look, setLook] = useState(0);
  const [tip, setTip] = useState(null), cells = width ? measure(ranksOf, width) : null;
  const { first, last, data, nodeOf, letters } = ranksOf;
  useLayoutEffect(() => {
    const sizes = new ResizeObserver(() => setWidth(Math.max(120, scroll.current.clientWidth - 4)));
    sizes.observe(scroll.current);
    const colours = new MutationObserver(() => setLook((before) => before + 1)), dark = matchMedia("(prefers-color-scheme: dark)");
    colours.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    const changed = () => setLook((before) => before + 1);
    dark.addEventListener("change", changed);
    return () => { sizes.disconnect(); colours.disconnect(); dark.removeEventListener("change", changed); };
  }, []);
  useLayoutEffect(() => {
    if (!cells) return;
    const ratio = Math.min(window.devicePixelRatio || 1, 16000 / cells.height), element = canvas.current;
    element.width = Math.round(cells.width * ratio);
    element.height = Math.round(cells.height * ratio);
    const pen = element.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw(pen, cells, ranksOf, { rank, grid, mask, marked });
  }, [ranksOf, rank, grid, mask?.join(), marked.join(), width, look]);

  const go = (to, into) => {
    const next = Math.min(Math.max(first, to), last), box = cells.place(next), view = scroll.current;
    onRank(next);
    if (!into || !box) return;
    if (box[1] < view.scrollTop) view.scrollTop = box[1] - 20;
    else if (box[1] + box[3] > view.scrollTop + view.clientHeight) view.scrollTop = box[1] + box[3] - view.clientHeight + 20;
  };
  const key = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const to = {
      ArrowLeft: rank - 1, ArrowRight: rank + 1, ArrowUp: rank - cells.across, ArrowDown: rank + cells.across, Home: first, End: last,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    go(to, true);
  };
  const over = (event) => {
    const at = event.pointerType === "touch" ? null : cells.rankAt(event.offsetX, event.offsetY);
    setTip(at === null ? null : { at, x: event.clientX + 16, y: event.clientY + 16 });
  };
  const left = cells ? data.world - Math.min(data.world, cells.drawn * data.node) : 0;
  return html`<div class="scroll" ref=${scroll} data-rank=${rank} data-drawn=${cells?.drawn}>
      <canvas ref=${canvas} tabindex="0" role="application" aria-roledescription=${t("grid of ranks")}
        aria-label=${`${about} ${t("Arrow keys go from rank to rank.")}`}
        style=${cells ? { width: `${cells.width}px`, height: `${cells.height}px` } : {}}
        onClick=${(event) => { const at = cells.rankAt(event.offsetX, event.offsetY); if (at !== null) go(at, false); }}
        onPointerMove=${over} onPointerLeave=${() => setTip(null)} onKeyDown=${key}></canvas></div>
    ${(left > 0 || cells?.text === 0) && html`<p class="quiet" id="left">${left > 0 && `${t("The first {n} ranks are drawn; the other {left} can be chosen by their number.",
      { n: (data.world - left).toLocaleString("en"), left: left.toLocaleString("en") })} `}${t("Of a rank's messages of a kind, the first {n} are drawn.", { n: MOST_LINES })}</p>`}
    ${tip && html`<div class="tip" role="tooltip" style=${{ left: `${Math.min(tip.x, innerWidth - 180)}px`, top: `${tip.y}px` }}>
      <b>${t("rank {rank}", { rank: tip.at })}</b><div>${t("node")} ${nodeOf(tip.at)}, ${letters(tip.at)}</div></div>`}
    <div class="unseen" role="status" aria-live="polite">${t("rank {rank}", { rank })}, ${t("node")} ${nodeOf(rank)}, ${letters(rank)}</div>`;
};
