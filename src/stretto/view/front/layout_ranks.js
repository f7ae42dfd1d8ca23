// Ranks of a layout: strides, coordinates, groups, receivers, and their counting in steps as in Megatron-LM's
// RankGenerator: every axis has a stride, a mask selects the axes that vary inside a group.
import { t } from "stretto/strings";

const MOST_STEPS = 16; // members counted one by one
const LETTERS = { pp: "p", tp: "t", cp: "c", ep: "e", dp: "d" };
const AXIS_NAMES = { pp: "stage", tp: "shard", cp: "context part", ep: "expert part", dp: "replica" };

// The first ranks and the last, with their number if they are many.
export const listed = (ranks, count = ranks.length, most = 16) => {
  if (count <= most && ranks.length === count) return ranks.join(", ");
  const last = ranks.length === count ? ` ${ranks[count - 1]}` : "";
  return `${ranks.slice(0, 8).join(", ")}, ...${last} (${t("{n} ranks", { n: count.toLocaleString("en") })})`;
};

export const sameAxes = (mask, other) => mask.length === other.length && mask.every((axis) => other.includes(axis));

export const rankArithmetic = (data) => {
  const first = data.offset, last = data.offset + data.world - 1;
  const grids = data.grids.map((axes) => {
    let stride = 1;
    return axes.map(([axis, size]) => { const step = { axis, size, stride }; stride *= size; return step; });
  });
  const shown = Object.keys(LETTERS).filter((axis) => grids.some((axes) => axes.some((each) => each.axis === axis && each.size > 1)));
  const axisOf = (axis) => (axis === "ep" ? grids[1] : grids[0]).find((each) => each.axis === axis);
  const coordinate = (rank, { stride, size }) => Math.floor((rank - first) / stride) % size;
  const nodeOf = (rank) => Math.floor((rank - first) / data.node);
  const varying = (grid, mask) => grids[grid].filter(({ axis }) => mask.includes(axis));
  const fixed = (grid, mask) => grids[grid].filter(({ axis }) => !mask.includes(axis));
  const members = (rank, grid, mask) => {
    const axes = varying(grid, mask);
    let ranks = [rank - axes.reduce((sum, axis) => sum + coordinate(rank, axis) * axis.stride, 0)];
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
    for (const axis of others) { number += coordinate(rank, axis) * scale; scale *= axis.size; }
    return number;
  };
  const pipeline = axisOf("pp");
  return {
    data, grids, first, last, coordinate, nodeOf, varying, fixed, members, numberOf,
    letters: (rank) => shown.map((axis) => LETTERS[axis] + coordinate(rank, axisOf(axis))).join(" "),
    seats: (rank) => shown.map((axis) => {
      const at = coordinate(rank, axisOf(axis));
      const stack = axis !== "pp" || !data.encoder ? "" : `, ${t(at < data.encoder ? "encoder" : "decoder")}`;
      return t("{name} {at} of {size} ({axis}{stack})", { name: t(AXIS_NAMES[axis]), at, size: axisOf(axis).size, axis, stack });
    }).join(", "),
    stageOf: (rank) => coordinate(rank, pipeline),
    // the messages of a group that this rank sends: some are of the ranks of an encoder or a decoder alone
    sent: (rank, group) => group.sends.filter(({ stages }) => {
      const stage = coordinate(rank, pipeline);
      return !stages || (stages[0] <= stage && stage < stages[1]);
    }),
    receivers: (rank, ranks, to) => {
      const at = ranks.indexOf(rank), many = ranks.length;
      if (to === "others") return ranks.filter((other) => other !== rank);
      if (to === "before") return many > 1 ? [ranks[(at - 1 + many) % many]] : [];
      const other = ranks[at + (to === "next" ? 1 : -1)];
      return other === undefined ? [] : [other];
    },
    shownAxes: (grid) => {
      const axes = grids[grid].filter(({ size }) => size > 1);
      return axes.length ? axes : grids[grid].slice(0, 1);
    },
  };
};

const names = (axes) => axes.map(({ axis }) => axis).join(", ");
const product = (axes) => axes.reduce((all, { size }) => all * size, 1);
const sizes = (axes) => (axes.length > 1 ? `${axes.map(({ size }) => size).join(" × ")} = ${product(axes)}` : `${product(axes)}`);

// Each step: its text, the cells of the table that it is about, the ranks that it leads to.
export const countingSteps = (ranksOf, rank, grid, mask) => {
  const { first, coordinate, varying, members, numberOf } = ranksOf, axes = ranksOf.shownAxes(grid), steps = [];
  const at = first ? `(${rank} - ${first})` : `${rank}`;
  axes.forEach((each, i) => {
    const before = axes[i - 1];
    steps.push({
      text: before
        ? t("The stride of {axis} is that of {before} times its size: {stride} × {size} = {result}.",
          { axis: each.axis, before: before.axis, stride: before.stride, size: before.size, result: each.stride })
        : t("{axis} varies fastest, so neighbours along it are 1 rank apart: stride 1.", { axis: each.axis }),
      cells: [[each.axis, "stride"]],
    });
  });
  for (const each of axes)
    steps.push({
      text: t("{axis} of rank {rank} = {at} // {stride} % {size} = {result}.",
        { axis: each.axis, rank, at, stride: each.stride, size: each.size, result: coordinate(rank, each) }),
      cells: [[each.axis, "coordinate"]],
    });
  const inner = varying(grid, mask).filter(({ size }) => size > 1);
  const outer = axes.filter(({ axis }) => !inner.some((each) => each.axis === axis));
  steps.push({
    text: [
      t("Mask [{mask}] over [{axes}]:", { mask: axes.map((each) => (inner.includes(each) ? "True" : "False")).join(", "), axes: names(axes) }),
      inner.length ? t(inner.length > 1 ? "{axes} vary inside a group, which has {sizes} ranks;" : "{axes} varies inside a group, which has {sizes} ranks;", { axes: names(inner), sizes: sizes(inner) })
        : t("nothing varies, each rank is alone;"),
      outer.length ? t(outer.length > 1 ? "{axes} stay, so there are {sizes} groups." : "{axes} stays, so there are {sizes} groups.", { axes: names(outer), sizes: sizes(outer) })
        : t("nothing stays, so there is one group."),
    ].join(" "),
    cells: axes.map(({ axis }) => [axis, "mask"]),
  });
  const start = members(rank, grid, mask)[0];
  if (outer.length) {
    let scale = 1;
    const digits = outer.map((each) => { const term = `${coordinate(rank, each)} × ${scale}`; scale *= each.size; return term; });
    const where = outer.map((each) => `${each.axis} ${coordinate(rank, each)}`).join(", ");
    steps.push({
      text: t("Rank {rank} is in the group with {where}: number {sum} = {number}.", { rank, where, sum: digits.join(" + "), number: numberOf(rank, outer) }),
      cells: outer.map(({ axis }) => [axis, "coordinate"]),
    });
    const sum = outer.map((each) => `${coordinate(rank, each)} × ${each.stride}`).join(" + ");
    steps.push({
      text: t("That group begins at {sum} = {start}: coordinates times strides, over the axes that stay.", { sum: `${first ? `${first} + ` : ""}${sum}`, start }),
      cells: outer.flatMap(({ axis }) => [[axis, "stride"], [axis, "coordinate"]]), ranks: [start],
    });
  } else steps.push({ text: t("The one group begins at rank {start}.", { start }), cells: [], ranks: [start] });
  const ranks = members(rank, grid, mask);
  const member = (i) => {
    let left = i;
    const parts = inner.map((each) => { const c = left % each.size; left = Math.floor(left / each.size); return { each, c }; });
    return t("Member {i}: {i} counted out over {axes} is {seat}; rank {start} + {sum} = {result}.", {
      i, axes: names(inner), seat: parts.map(({ each, c }) => `${each.axis} ${c}`).join(", "),
      start, sum: parts.map(({ each, c }) => `${c} × ${each.stride}`).join(" + "), result: ranks[i],
    });
  };
  const cells = inner.map(({ axis }) => [axis, "stride"]);
  const single = ranks.length <= MOST_STEPS ? ranks.length : MOST_STEPS - 1;
  if (inner.length)
    for (let i = 0; i < single; i++) steps.push({ text: member(i), cells, ranks: ranks.slice(0, i + 1) });
  if (single < ranks.length)
    steps.push({ text: `${t("And so on, up to the last.")} ${member(ranks.length - 1)}`, cells, ranks });
  steps.push({ text: t("The group of rank {rank} is [{ranks}].", { rank, ranks: listed(ranks) }), cells: [], ranks });
  return steps;
};
