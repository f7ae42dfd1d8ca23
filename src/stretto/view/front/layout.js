// The view of layouts: the grid of ranks and its groups, what a rank sends in a step, how tensors are cut, and the
// arithmetic of ranks step by step.
import { useMemo } from "preact/hooks";
import { Button, NumberField, Problem, Table, html, useAnswer } from "stretto/controls";
import { ClusterField, DegreeFields, ModelField, OrderField, StepFields, bytesText, jobCommand, jobDefaults, jobQuestion } from "stretto/job";
import { Cuts } from "stretto/layout_cuts";
import { Grid } from "stretto/layout_grid";
import { countingSteps, listed, rankArithmetic, sameAxes } from "stretto/layout_ranks";
import { t } from "stretto/strings";

const named = (text) => (text ? ` (${text})` : "");
const focus = (selector) => requestAnimationFrame(() => document.querySelector(selector)?.focus());

// ---------------------------------------------------------------- the chosen rank

const where = (ranksOf, rank, others) => {
  const { nodeOf, data } = ranksOf;
  return [
    [others.filter((other) => nodeOf(other) === nodeOf(rank)), `${t("inside the node")}${named(data.links.inside)}`],
    [others.filter((other) => nodeOf(other) !== nodeOf(rank)), `${t("between nodes")}${named(data.links.between)}`],
  ].filter(([ranks]) => ranks.length).map(([ranks, link]) => t("to {ranks} {link}", { ranks: listed(ranks), link }));
};
const nothing = ({ data }, send, ranks) => {
  const [text, loop] = send.to === "next" ? ["it has the last stage", ranks[0]] : ["it has the first stage", ranks[ranks.length - 1]];
  return t(text) + (data.encoder ? "" : t("; where a rank has several chunks in a loop, to {loop}", { loop }));
};

const GroupCard = ({ ranksOf, rank, group, choose }) => {
  const ranks = ranksOf.members(rank, group.grid, group.mask), colour = ranksOf.data.outlines[ranksOf.data.groups.indexOf(group) % ranksOf.data.outlines.length];
  const lines = ranksOf.sent(rank, group).flatMap((send) => {
    const others = ranksOf.receivers(rank, ranks, send.to);
    const places = others.length ? where(ranksOf, rank, others) : [t("to none: {why}", { why: nothing(ranksOf, send, ranks) })];
    return places.map((place, at) => html`<li>${t(send.content)} ${place}${at === places.length - 1 && html`<span class="quiet">: ${t(send.collective)}</span>`}</li>`);
  });
  return html`<div class="group" data-axes=${group.axes}>
    <h3><i style=${{ background: colour }}></i><button type="button" onClick=${() => choose(group)}>${group.axes}</button>
      <span class="quiet">${t("g{number} of {count}", { number: ranksOf.numberOf(rank, ranksOf.fixed(group.grid, group.mask)), count: group.count })}</span></h3>
    <p class="members">${listed(ranks)}</p>
    ${(lines.length > 0 || group.note) && html`<ul>${lines}${group.note && html`<li class="quiet">${t(group.note)}</li>`}</ul>`}</div>`;
};

const RankPanel = ({ ranksOf, rank, choose }) => html`<section id="rank-panel" aria-label=${t("The chosen rank")}>
  <h2>${t("Rank {rank}", { rank })}</h2>
  <p>${t("node {node}, local rank {local}", { node: ranksOf.nodeOf(rank), local: (rank - ranksOf.first) % ranksOf.data.node })}</p>
  <p class="quiet">${ranksOf.seats(rank)}</p>
  ${ranksOf.data.groups.map((group) => html`<${GroupCard} key=${group.axes} ranksOf=${ranksOf} rank=${rank} group=${group} choose=${choose} />`)}</section>`;

// ---------------------------------------------------------------- counting, step by step

const Arithmetic = ({ ranksOf, rank, grid, mask, step, steps, set, choose }) => {
  const now = steps[step], lit = (axis, part) => (now.cells.some(([a, p]) => a === axis && p === part) ? "now" : "");
  const tick = (axis, checked) => {
    const others = mask.filter((each) => each !== axis);
    choose(grid, checked ? [...others, axis] : others);
    focus(`#axes input[data-axis="${axis}"]`);
  };
  const stepTo = (to) => { set({ axes: mask.join("-"), alone: !mask.length, step: to >= steps.length - 1 ? -1 : Math.max(0, to) }); };
  return html`<section id="arithmetic" aria-labelledby="counted">
    <h2 id="counted">${t("How the ranks of a group are counted")}</h2>
    <p class="quiet">${t("As in Megatron-LM's RankGenerator: every axis has a stride, a mask selects the axes that vary inside a group, and the ranks of a group follow from its mask and strides. The fastest axis is the first. Tick axes to choose another mask.")}</p>
    ${ranksOf.grids.length > 1 && html`<div id="kinds" class="choices">${["ranks of dense layers", "ranks of expert layers"].map((name, at) => html`
      <button type="button" aria-pressed=${at === grid} onClick=${() => choose(at, ranksOf.data.groups.find((group) => group.grid === at)?.mask ?? [])}>${t(name)}</button>`)}</div>`}
    <div class="wide" id="axes"><table><thead><tr>${["axis", "size", "stride"].map((name) => html`<th>${t(name)}</th>`)}
      <th>${t("of rank {rank}", { rank })}</th><th class="text">${t("mask")}</th></tr></thead><tbody>
      ${ranksOf.shownAxes(grid).map((each) => html`<tr><th scope="row">${each.axis}</th><td class=${lit(each.axis, "size")}>${each.size}</td>
        <td class=${lit(each.axis, "stride")}>${each.stride}</td><td class=${lit(each.axis, "coordinate")}>${ranksOf.coordinate(rank, each)}</td>
        <td class=${`text ${lit(each.axis, "mask")}`}><label><input type="checkbox" data-axis=${each.axis} checked=${mask.includes(each.axis)}
          onChange=${(event) => tick(each.axis, event.target.checked)} />${mask.includes(each.axis) ? "True" : "False"}</label></td></tr>`)}</tbody></table></div>
    <div class="choices"><${Button} disabled=${step === 0} onClick=${() => stepTo(0)}>${t("Begin")}<//>
      <${Button} disabled=${step === 0} onClick=${() => stepTo(step - 1)}>${t("Back")}<//>
      <${Button} disabled=${step === steps.length - 1} onClick=${() => stepTo(step + 1)}>${t("Next")}<//>
      <${Button} disabled=${step === steps.length - 1} onClick=${() => stepTo(Infinity)}>${t("All")}<//>
      <span id="step" class="quiet" role="status">${t("step {step} of {steps}", { step: step + 1, steps: steps.length })}</span></div>
    <ol id="lines">${steps.slice(0, step + 1).map(({ text }) => html`<li>${text}</li>`)}</ol></section>`;
};

// ---------------------------------------------------------------- bytes of a step

const CONTENTS = {
  tp: { forward: "activations", recompute: "activations, once more", backward: "gradients of activations", gradients: "gradients of weights that all tp ranks have" },
  cp: { forward: "keys and values", recompute: "keys and values, once more", backward: "keys, values and their gradients" },
  ep: { forward: "tokens for experts and back", recompute: "tokens for experts, once more", backward: "gradients of experts' tokens" },
  expert_tp: { forward: "tokens of split experts", recompute: "tokens of split experts, once more", backward: "gradients of split experts' tokens" },
  pp: { forward: "activations to the next stage", backward: "gradients to the stage before", gradients: "gradients of weights that stages share" },
};
const contents = ({ axes, purpose }) => CONTENTS[axes]?.[purpose]
  ?? { gradients: "gradients", weights: "updated or gathered weights", norm: "norm of all gradients" }[purpose] ?? "counts and choices of routers";

const trafficRows = (answer) => [["bytes sent a step", "calls a step", "contents", "collective", "over", "to", "link"], ...answer.traffic.map((row) => {
  const links = ["inside", "between"].filter((link) => row[link].count);
  return [
    bytesText(row.sent), row.calls.toLocaleString("en"), t(contents(row)), t(row.kind), row.axes,
    links.map((link) => listed(row[link].ranks, row[link].count)).join("; "),
    links.map((link) => `${t(link === "inside" ? "inside the node" : "between nodes")}${named(answer.links[link])}`).join("; "),
  ];
})];

const TrafficPart = ({ reply, state }) => html`<section id="traffic" aria-labelledby="traffic-head" aria-busy=${reply.busy}>
  <h2 id="traffic-head">${t("What rank {rank} sends in a step", { rank: reply.answer?.rank ?? state.rank })}</h2>
  <${Problem} error=${reply.error} />
  ${reply.answer && html`<p>${t("{bytes} leave the rank in a step of {n} microbatches, if collectives are bandwidth-optimal.",
    { bytes: bytesText(reply.answer.sent), n: reply.answer.microbatches })}</p>
    <${Table} caption="Messages, most bytes first" rows=${trafficRows(reply.answer)} />`}
  <p class="quiet"><code>${jobCommand(state)}</code></p></section>`;

// ---------------------------------------------------------------- the view

const Legend = ({ data }) => {
  const { stages } = data, ranges = data.encoder
    ? [["encoder", 0, data.encoder], ["decoder", data.encoder, stages.length]] : [["", 0, stages.length]];
  const text = (start, stop) => (stop - start > 1 ? t("stages {first} to {last}", { first: start, last: stop - 1 }) : stages.length > 1 ? t("stage {first}", { first: start }) : t("one stage"));
  return html`<ul class="legend" aria-label=${t("Legend")}>
    ${ranges.map(([stack, start, stop]) => html`<li><i style=${{ background: stages[start] }}></i>${!stack && stop - start > 1 && html`<i style=${{ background: stages[stop - 1] }}></i>`}
      ${stack && `${t(stack)}: `}${text(start, stop)}</li>`)}
    <li><i class="inside"></i> ${t("message inside a node")}${data.links.inside && `: ${data.links.inside}`}</li>
    <li><i class="between"></i> ${t("between nodes")}${data.links.between && `: ${data.links.between}`}</li></ul>`;
};

const Drawn = ({ data, state, set, traffic, cuts }) => {
  const ranksOf = useMemo(() => rankArithmetic(data), [data]);
  const rank = Math.min(Math.max(ranksOf.first, state.rank), ranksOf.last), grid = Math.min(state.grid, ranksOf.grids.length - 1);
  const axes = ranksOf.grids[grid].map(({ axis }) => axis);
  const mask = state.alone ? [] : state.axes ? axes.filter((axis) => state.axes.split("-").includes(axis)) : null; // null: all groups of the rank
  const counted = mask ?? (data.groups[0]?.grid === grid ? data.groups[0].mask : []);
  const steps = countingSteps(ranksOf, rank, grid, counted), step = state.step < 0 ? steps.length - 1 : Math.min(state.step, steps.length - 1);
  const choose = (to, next) => set({ grid: to, axes: next.join("-"), alone: !next.length });
  const nodes = Math.ceil(data.world / data.node);
  const about = t(nodes > 1 ? "{ranks} ranks on {nodes} nodes of {node}{machine}, order {order} (fastest first)" : "{ranks} ranks on 1 node{machine}, order {order} (fastest first)", {
    ranks: data.world.toLocaleString("en"), nodes: nodes.toLocaleString("en"), node: data.node, machine: named(data.cluster), order: data.order,
  });
  return html`
    <p id="about"><b>${data.title}</b>: ${about}</p>
    <div class="bar" role="toolbar" aria-label=${t("Groups")}><span class="quiet">${t("Groups")}</span><span id="choices" class="choices">
      <button type="button" aria-pressed=${mask === null} onClick=${() => set({ axes: "", alone: false, grid: 0 })}>${t("of the rank")}</button>
      ${data.groups.map((group) => html`<button key=${group.axes} type="button" title=${t("{count} groups of {size}, {links}", { count: group.count, size: group.size, links: t(group.links) })}
        aria-pressed=${mask !== null && group.grid === grid && sameAxes(group.mask, mask)} onClick=${() => choose(group.grid, group.mask)}>${group.axes}</button>`)}</span>
      <${NumberField} name="rank" label="rank" value=${rank} least=${ranksOf.first} most=${ranksOf.last} onChange=${(to) => set({ rank: Math.round(to) })} /></div>
    <div class="ranks-and-panel"><section aria-label=${t("Ranks")}>
        <${Grid} ranksOf=${ranksOf} rank=${rank} grid=${grid} mask=${mask} marked=${mask ? steps[step].ranks ?? [] : []} about=${about} onRank=${(to) => set({ rank: to })} />
        <${Legend} data=${data} /></section>
      <${RankPanel} ranksOf=${ranksOf} rank=${rank} choose=${(group) => { choose(group.grid, group.mask); focus(`#rank-panel [data-axes="${group.axes}"] button`); }} /></div>
    ${traffic}${cuts}
    <${Arithmetic} ranksOf=${ranksOf} rank=${rank} grid=${grid} mask=${counted} step=${step} steps=${steps} set=${set} choose=${choose} />`;
};

const View = ({ state, set, ask, backend, asks }) => {
  const live = backend !== "recorded", degrees = jobQuestion(state);
  const names = useAnswer(ask, live && asks.includes("names") ? { ask: "names" } : null);
  const layout = useAnswer(ask, live
    ? { ask: "layout", tp: state.tp, cp: state.cp, ep: state.ep, dp: state.dp, pp: state.pp, expert_tp: state.expert_tp, order: state.order, node: state.node, cluster: state.cluster }
    : { ask: "layout" });
  const data = layout.answer, world = data?.world ?? 0, rank = Math.min(state.rank, Math.max(0, world - 1));
  const priced = live && !layout.error && asks.includes("traffic");
  const traffic = useAnswer(ask, priced ? { ask: "traffic", ...degrees, rank } : null);
  const cuts = useAnswer(ask, priced ? { ask: "cuts", ...degrees, rank, tensor: state.tensor, activation: state.activation } : null);
  return html`<h1>${t("Layout")}</h1>
    ${live && html`<form class="fields" onSubmit=${(event) => event.preventDefault()}>
      <${DegreeFields} state=${state} set=${set} /><${OrderField} state=${state} set=${set} />
      <${ClusterField} state=${state} set=${set} names=${names.answer} />
      <${NumberField} name="node" label="ranks of a node, 0: the cluster's" value=${state.node} least=${0} most=${4096} onChange=${(node) => set({ node })} />
      <${ModelField} state=${state} set=${set} names=${names.answer} /></form>
      <details><summary>${t("The step: schedule, batch, ZeRO, recomputation")}</summary>
        <form class="fields" onSubmit=${(event) => event.preventDefault()}><${StepFields} state=${state} set=${set} names=${names.answer} /></form></details>`}
    <${Problem} error=${layout.error} />
    ${data && html`<${Drawn} data=${data} state=${state} set=${set}
      traffic=${priced && html`<${TrafficPart} reply=${traffic} state=${state} />`} cuts=${priced && html`<${Cuts} reply=${cuts} state=${state} set=${set} />`} />`}`;
};

export const layout = {
  id: "layout", title: "Layout", asks: ["layout"], View,
  // `axes`: the mask of the groups that are shown; `alone`: no axis varies; `step`: -1 for all
  defaults: { ...jobDefaults, order: "tp-cp-ep-dp-pp", node: 0, rank: 0, grid: 0, axes: "", alone: false, step: 0, tensor: "attn.qkv.weight", activation: "residual" },
};
