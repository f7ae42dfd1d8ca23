// The view of memory: every pipeline rank by kind against the device's limit, where each GiB goes, and the papers'
// formulas beside the count.
import { Button, Choice, Drop, NumberField, Problem, Table, html, save, useAnswer } from "stretto/controls";
import { ClusterField, DegreeFields, ModelField, StepFields, bytesText, jobCommand, jobDefaults, jobQuestion } from "stretto/job";
import { t } from "stretto/strings";

const MOST_RANKS = 64; // bars
const sum = (rank, names) => names.reduce((total, name) => total + rank[name], 0);

// Kinds of the bars, from the inside out: the fields of a rank's record that each sums, and their names.
const KINDS = [
  ["weights", "weights", ["weights"]],
  ["gradients", "gradients", ["gradients"]],
  ["states", "optimiser states", ["masters", "optimizer"]],
  ["activations", "activations of blocks", ["activations"]],
  ["ends", "embedding, logits and loss", ["ends"]],
  ["buffers", "buffers", ["messages", "transient", "gathered", "open", "versions", "batch", "saving"]],
  ["fragmentation", "fragmentation of the allocator", ["fragmentation"]],
  ["context", "context and libraries", ["context"]],
];
const FIELDS = {
  weights: "weights", gradients: "gradients", masters: "float32 masters of the weights", optimizer: "optimiser states", activations: "activations of blocks",
  ends: "embedding, logits and loss", messages: "messages between stages", transient: "temporaries of the action {at}", gathered: "gathered weights",
  open: "whole gradients before their reduction", versions: "older versions of the weights", batch: "tokens, positions and tables", saving: "copy for a checkpoint",
  fragmentation: "fragmentation of the allocator", context: "context and libraries",
};
const total = (rank) => sum(rank, KINDS.flatMap(([, , fields]) => fields));

// Stripes, dots and lines tell kinds apart without colour.
const PATTERNS = ["", "M0 0L6 6", "M0 6L6 0", "M3 0V6", "M0 3H6", "M2 3H4M3 2V4", "M0 0L6 6M0 6L6 0", "M0 0H6M0 0V6"];
const Patterns = () => html`<defs>${PATTERNS.map((path, at) => html`<pattern id=${`kind-${at}`} width="6" height="6" patternUnits="userSpaceOnUse">
  <rect width="6" height="6" class=${`kind-${at}`} /><path d=${path} class="kind-line" /></pattern>`)}</defs>`;
const Swatch = ({ at }) => html`<svg width="16" height="14" aria-hidden="true"><rect width="16" height="14" fill=${`url(#kind-${at})`} /></svg>`;

const Bars = ({ answer, chosen, choose }) => {
  const shown = answer.ranks.length <= MOST_RANKS ? answer.ranks : [...answer.ranks.slice(0, MOST_RANKS - 1), answer.ranks[answer.ranks.length - 1]];
  const limit = Number.isFinite(answer.device.memory) ? answer.device.memory : 0, most = Math.max(limit, ...shown.map((rank) => Math.max(total(rank), rank.device.high))) * 1.04;
  const x = (bytes) => `${(bytes / most) * 100}%`;
  return html`<div id="bars" class="memory-bars">
    <svg width="0" height="0" class="unseen"><${Patterns} /></svg>
    ${shown.map((rank) => {
      let left = 0;
      return html`<button type="button" class="memory-row" aria-pressed=${rank.rank === chosen} data-rank=${rank.rank} onClick=${() => choose(rank.rank)}>
        <span class="memory-name"><span class="unseen">rank </span>${rank.rank}</span>
        <svg height="20" width="100%" role="presentation">
          ${KINDS.map(([kind, name, fields], at) => {
            const bytes = sum(rank, fields), start = left;
            left += bytes;
            return bytes > 0 && html`<rect x=${x(start)} width=${x(bytes)} height="20" fill=${`url(#kind-${at})`} class="memory-part" data-kind=${kind}><title>${t(name)}: ${bytesText(bytes)}</title></rect>`;
          })}
          <line x1=${x(rank.device.low)} x2=${x(rank.device.high)} y1="10" y2="10" class="interval" />
          ${limit > 0 && html`<line x1=${x(limit)} x2=${x(limit)} y1="0" y2="20" class="limit" />`}
        </svg><span class="memory-total">${bytesText(total(rank))} · ${t(rank.verdict)}</span></button>`;
    })}
    <ul class="legend" aria-label=${t("Legend")}>${KINDS.map(([, name], at) => html`<li><${Swatch} at=${at} /> ${t(name)}</li>`)}
      ${limit > 0 && html`<li><i class="step"></i> ${t("limit of the device: {bytes}", { bytes: bytesText(limit) })}</li>`}
      <li><i class="interval-key"></i> ${t("interval of the prediction, 9 of 10")}</li></ul>
    ${shown.length < answer.ranks.length && html`<p class="quiet">${t("of {n} pipeline ranks the first and the last", { n: answer.ranks.length })}</p>`}</div>`;
};

const parts = (rank) => {
  const all = total(rank);
  return [["kind", "bytes", "share"], ...Object.entries(FIELDS).map(([field, name]) => [t(name, { at: rank.at }), rank[field]]).filter(([, bytes]) => bytes > 0)
    .sort((a, b) => b[1] - a[1]).map(([name, bytes]) => [name, bytesText(bytes), `${((bytes / all) * 100).toFixed(1)}%`])];
};

const RankPart = ({ rank }) => html`<section aria-labelledby="rank-head" id="rank-memory">
  <h2 id="rank-head">${t("Where each GiB of pipeline rank {rank} goes", { rank: rank.rank })}</h2>
  <p>${t("At its fullest moment, during {at}; microbatches in flight: {flights}. Ranks that differ on other axes hold the same.", {
    at: rank.at, flights: Object.entries(rank.flights).map(([stage, count]) => t("stage {stage}: {count} x {bytes}", { stage, count, bytes: bytesText(rank.stages[stage]) })).join(", ") })}
    ${rank.host + rank.disk > 0 && ` ${t("Beside the device: {host} in host memory, {disk} in files.", { host: bytesText(rank.host), disk: bytesText(rank.disk) })}`}</p>
  <div class="sides"><${Table} rows=${parts(rank)} caption="By kind, largest first" />
    <${Table} rows=${[["parameters of", "elements"], ...Object.entries(rank.parameters).map(([group, count]) => [t(group), count.toLocaleString("en")])]} caption="Parameters of the rank" /></div></section>`;

const PARTS = { norms: "norms", attention: "attention without scores", scores: "scores of attention", mlp: "MLP or experts", input: "the block's input" };
const compared = (paper, counted) => [bytesText(paper), bytesText(counted), paper ? `${(((counted - paper) / paper) * 100).toFixed(1).replace(/^-0\.0$/, "0.0")}%` : ""];

const Formulas = ({ answer }) => {
  const { activations, states } = answer, counted = activations.tensors.reduce((all, tensor) => all + tensor.bytes, 0);
  const paper = states.kinds.reduce((all, each) => all + each.paper, 0), kept = states.kinds.reduce((all, each) => all + each.counted, 0);
  return html`<section id="formulas" aria-labelledby="formula-head">
    <h2 id="formula-head">${t("Beside the papers' formulas")}</h2>
    <h3>${t("Activations of a block and microbatch")}</h3>
    <p>${t("Korthikanti et al. 2022, table 2, for this tensor and sequence parallelism and recomputation ({mode}):", { mode: t(activations.recompute) })} <code>${activations.paper.formula}</code>.</p>
    <${Table} caption="Activations: formula and count" rows=${[["part", "paper", "counted", "difference"],
      ...activations.parts.map((each) => [t(PARTS[each.part]), ...compared(each.paper, each.counted)]), [t("sum"), ...compared(activations.paper.bytes, counted)]]} />
    ${activations.reasons.length ? html`<p>${t("The formula was made for GPT with attention written out. This block has:")}</p><ul id="activation-reasons">${activations.reasons.map((reason) => html`<li>${t(...reason)}</li>`)}</ul>`
      : html`<p id="activation-reasons">${t("The formula was made for such a block; what remains are statistics of norms, 8 bytes a token.")}</p>`}
    <details><summary>${t("Every tensor that a block keeps")}</summary>
      <${Table} caption="Tensors of a block" rows=${[["tensor", "bytes", "formula"], ...activations.tensors.map((each) => [each.name, bytesText(each.bytes), each.formula])]} /></details>
    <h3>${t("Weights, gradients and optimiser states")}</h3>
    <p>${t("ZeRO (Rajbhandari et al. 2020) counts 2 + 2 + 12 bytes a parameter, of which {mode} shards over {copies} ranks; the fullest rank has {n} parameters.",
      { mode: states.mode, copies: states.copies, n: states.parameters.toLocaleString("en") })}</p>
    <${Table} caption="States: formula and count" rows=${[["kind", "paper", "counted", "difference"],
      ...states.kinds.map((each) => [t(each.kind === "states" ? "optimiser states" : each.kind), ...compared(each.paper, each.counted)]), [t("sum"), ...compared(paper, kept)]]} />
    <ul id="state-reasons">${states.reasons.map((reason) => html`<li>${t(...reason)}</li>`)}</ul></section>`;
};

const Verdict = ({ answer }) => html`<p id="verdict" role="status" data-verdict=${answer.verdict}><b>${t(answer.verdict)}</b>: ${
  t("the fullest pipeline rank, {rank}, needs {bytes} of {limit} on a {device}, {low} to {high} with nine in ten; {layout}, {gpus} devices, {microbatches} microbatches of {sequence} tokens a sample.", {
    rank: answer.fullest, bytes: `${answer.memory.device.gib.toFixed(1)} GiB`, limit: answer.memory.capacity_gib === null ? "∞" : `${answer.memory.capacity_gib.toFixed(1)} GiB`,
    low: answer.memory.device.low_gib.toFixed(1), high: `${answer.memory.device.high_gib.toFixed(1)} GiB`, device: answer.device.name, layout: answer.layout,
    gpus: answer.gpus.toLocaleString("en"), microbatches: answer.microbatches, sequence: answer.sequence })}</p>`;

const Loaded = ({ state, set, model }) => html`<p id="loaded">${t("model of {file}", { file: state.file })}${model?.kind && ` (${model.kind})`}
  ${" "}<${Button} onClick=${() => set({ config: "", file: "" })}>${t("back to the presets")}<//></p>
  ${model?.notes.map((note) => html`<p class="quiet">${note}</p>`)}
  ${model?.unknown.length > 0 && html`<p class="quiet">${t("keys that are not read: {keys}", { keys: model.unknown.join(", ") })}</p>`}`;

const View = ({ state, set, ask, backend }) => {
  const live = backend !== "recorded";
  const names = useAnswer(ask, live ? { ask: "names" } : null);
  const { answer, error, busy } = useAnswer(ask, { ask: "memory", ...jobQuestion(state) });
  const rank = answer?.ranks[state.rank < 0 ? answer.fullest : Math.min(state.rank, answer.ranks.length - 1)];
  const pick = (name) => (value) => set({ [name]: value });
  return html`<h1>${t("Memory")}</h1>
    ${live && html`<form class="fields" onSubmit=${(event) => event.preventDefault()}>
        <${ModelField} state=${state} set=${set} names=${names.answer} /><${ClusterField} state=${state} set=${set} names=${names.answer} />
        <${DegreeFields} state=${state} set=${set} /></form>
      <${Drop} label="a config.json of Hugging Face, in place of a preset" accept=".json,application/json" onFile=${(file, config) => set({ config, file })} />
      ${state.config && html`<${Loaded} state=${state} set=${set} model=${answer?.model} />`}
      <form class="fields" onSubmit=${(event) => event.preventDefault()}><${StepFields} state=${state} set=${set} names=${names.answer} sliders=${true} />
        <${Choice} name="attention" label="attention" value=${state.attention} choices=${[["", "fused kernel"], ["unfused", "written out, scores kept"]]} onChange=${pick("attention")} />
        <${Choice} name="offload" label="offload" value=${state.offload} choices=${["none", ["optimizer", "optimiser states to the host"], ["nvme", "optimiser states to files"],
          ["parameters", "parameters to the host"], ["both", "both to the host"]]} onChange=${pick("offload")} />
        <${Choice} name="optimiser" label="optimiser" value=${state.optimiser} choices=${names.answer?.optimisers ?? [state.optimiser]} onChange=${pick("optimiser")} />
        ${state.optimiser === "adamw" && html`<${Choice} name="states" label="means of AdamW" value=${state.states} choices=${["float32", "bfloat16"]} onChange=${pick("states")} />`}</form>`}
    <${Problem} error=${error} />
    ${answer && html`<div aria-busy=${busy}><${Verdict} answer=${answer} />
      <h2>${t("Memory of every pipeline rank")}</h2>
      <${Bars} answer=${answer} chosen=${rank.rank} choose=${pick("rank")} />
      <${NumberField} name="rank" label="pipeline rank" value=${rank.rank} least=${0} most=${answer.ranks.length - 1} onChange=${pick("rank")} />
      <${RankPart} rank=${rank} /><${Formulas} answer=${answer} />
      <div class="choices"><${Button} onClick=${() => save("memory.json", JSON.stringify(answer, null, 1), "application/json")}>${t("Save as JSON")}<//></div>
      <p class="quiet"><code>${jobCommand(state)}</code></p>
      <p class="quiet">${t("defaults:")} ${Object.entries(answer.defaults).map(([name, value]) => `${name}=${value}`).join("; ")}</p></div>`}`;
};

export const memory = {
  id: "memory", title: "Memory", asks: ["memory"], View,
  // `rank`: -1 for the fullest
  defaults: { ...jobDefaults, config: "", file: "", attention: "", offload: "none", optimiser: "adamw", states: "float32", rank: -1 },
};
