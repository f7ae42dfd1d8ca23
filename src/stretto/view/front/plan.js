// The view of plans: a search as it goes, its rows, and what would be faster.
import { useEffect, useState } from "preact/hooks";
import { Bars, MEMORY, STEP } from "stretto/bars";
import { Button, Check, Choice, Drop, NumberField, Problem, Table, TextField, Timeline, copy, html, save, useAnswer } from "stretto/controls";
import { Scatter } from "stretto/scatter";
import { t } from "stretto/strings";

const GIB = 2 ** 30;
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)}%`;
const signed = (share) => `${share >= 0 ? "+" : ""}${percent(share)}`;
const seconds = (value) => `${+value.toPrecision(4)} s`;
const gib = (value) => `${(value / GIB).toPrecision(3)} GiB`;
const count = (value) => Math.round(value).toLocaleString("en");

const interval = ({ memory }) => memory && `${memory.device.low_gib.toFixed(1)} – ${memory.device.high_gib.toFixed(1)}`;

// One layout beside the first: its time, its memory, why it is where it is.
const Card = ({ title, row, first, text }) => html`<section class="card"><h3>${t(title)}</h3>
  ${!row || (first && row.layout === first.layout) ? html`<p>${row ? t("it is the first") : text}</p>` : html`
    <p><code>${row.layout}</code></p>
    <p><b>${seconds(row.step_time_s)}</b> ${t("a step ({low} to {high})", { low: +row.low.toPrecision(3), high: +row.high.toPrecision(3) })}${first && `, ${signed(row.step_time_s / first.step_time_s - 1)}`}</p>
    <p>${t("{rate} tokens/s, MFU {mfu}, bubble {bubble}", { rate: count(row.tokens_per_s), mfu: row.mfu === null ? "-" : percent(row.mfu), bubble: percent(row.bubble) })}</p>
    ${row.memory && html`<p>${row.memory.device.gib.toFixed(1)}${row.memory.capacity_gib && ` / ${row.memory.capacity_gib.toFixed(1)}`} GiB (${interval(row)}): <b>${t(row.verdict)}</b></p>`}
    <p class="quiet">${row.why}</p>`}
</section>`;

const rowsOf = (plan) => {
  const priced = plan.ranking.some((row) => row.tokens_per_dollar !== null);
  const head = ["", "layout", "step s", "interval", "tokens/s", "TFLOP/s", "MFU", "bubble", "memory GiB", "its interval", "verdict", ...(priced ? ["tokens/$"] : []), "why"];
  return [head, ...plan.ranking.map((row, at) => [
    String(at + 1), row.layout, String(+row.step_time_s.toPrecision(4)), `${+row.low.toPrecision(3)} – ${+row.high.toPrecision(3)}`,
    count(row.tokens_per_s), row.tflops_per_gpu.toFixed(1), row.mfu === null ? "-" : percent(row.mfu), percent(row.bubble),
    row.memory ? row.memory.device.gib.toFixed(1) : "", interval(row) ?? "", t(row.verdict ?? ""),
    ...(priced ? [row.tokens_per_dollar === null ? "" : count(row.tokens_per_dollar)] : []), row.why,
  ])];
};

const WhatIf = ({ whatIf }) => {
  const binds = Object.entries(whatIf.binds);
  const rows = [["what if", "step s", "tokens/s", "change", "layout"], ...whatIf.changes.map((change) => change.error
    ? [change.change, "", "", "", change.error]
    : [change.change, String(+change.step_time_s.toPrecision(4)), count(change.tokens_per_s), change.gain === null ? "" : signed(change.gain), change.layout])];
  return html`<h2>${t("What would be faster")}</h2>
    ${binds.length > 0 && html`<p>${t("{name} binds: {share} of the step would go without it or if it were twice as fast", { name: t(binds[0][0]), share: percent(binds[0][1]) })}${binds.slice(1).map(([name, share]) => `; ${t(name)} ${percent(share)}`)}</p>`}
    <${Table} rows=${rows} caption="The same search with one thing changed" />`;
};

// What a plan says, whoever searched; `actions` are buttons for the marked row.
export const PlanResult = ({ plan, marked, mark, actions }) => {
  const first = plan.ranking[0] ?? null, best = first ?? plan.nearest, rows = plan.ranking.length ? plan.ranking : [plan.nearest];
  const select = (layout) => { const at = plan.ranking.findIndex((row) => row.layout === layout); if (at >= 0) mark(at); };
  const bars = rows.map((row, at) => ({
    name: String(at + 1), label: row.layout, parts: row.parts, low: row.low, high: row.high,
    end: `${seconds(row.step_time_s)}, MFU ${row.mfu === null ? "-" : percent(row.mfu)}`,
  }));
  const known = Object.fromEntries(Object.keys(STEP).map((name) => [name, true]));
  for (const bar of bars) { // parts without a look are one
    const rest = Object.entries(bar.parts).filter(([name]) => !known[name]).reduce((sum, [, value]) => sum + value, 0);
    bar.parts = { ...bar.parts, other: (bar.parts.other ?? 0) + rest };
  }
  const capacity = best.memory?.capacity_gib ?? null, limit = capacity && { value: capacity * GIB, text: t("the device's {gib} GiB", { gib: +capacity.toPrecision(4) }) };
  const memory = rows.map((row, at) => ({
    name: String(at + 1), label: row.layout, parts: plan.fullest[at], low: row.memory && row.memory.device.low_gib * GIB,
    high: row.memory && row.memory.device.high_gib * GIB, end: row.memory ? `${row.memory.device.gib.toFixed(1)} GiB ${t(row.verdict)}` : "",
  }));
  const ranks = plan.ranks.map((rank) => ({
    name: String(rank.rank), label: t("pipeline rank {rank}, fullest during {at}", rank), parts: rank.sizes,
    end: gib(Object.values(rank.sizes).reduce((sum, value) => sum + value, 0)),
  }));
  const rejected = Object.entries(plan.rejected), terms = Object.entries(plan.setting);
  return html`
    <dl class="terms">${terms.map(([name, text]) => html`<dt>${t(name)}</dt><dd>${text}</dd>`)}
      ${plan.known_errors.map((error) => html`<dt>${t("known error")}</dt><dd>${error}</dd>`)}</dl>
    <div class="cards">
      <${Card} title=${first ? "First" : plan.complete ? "Nothing fits; the nearest" : "Cut short: nothing found that fits so far; the nearest"} row=${best} />
      ${first && html`<${Card} title="Safe: the best that certainly fits" row=${plan.safe} first=${first} text=${t("none was found")} />`}
      ${first && Object.keys(plan.plain).map((name) => html`
        <${Card} title=${`Plain: ${name}`} row=${plan.plain[name]} first=${first} text=${plan.missing[name]} />
        ${plan.plain[name] && plan.plain_safe[name] && plan.plain_safe[name].layout !== plan.plain[name].layout && html`
          <${Card} title=${`Plain: ${name} that certainly fits`} row=${plan.plain_safe[name]} first=${first} />`}`)}
    </div>
    ${first && html`<h2>${t("Ranking")}</h2>
      <${Table} rows=${rowsOf(plan)} caption="The best first; click a row to mark it, a name to sort" marked=${marked} onRow=${mark} />
      ${actions}
      ${plan.ranking[marked]?.variants.length > 0 && html`<p class="quiet">${t("as fast:")} ${plan.ranking[marked].variants.join("; ")}</p>`}`}
    ${plan.what_if && html`<${WhatIf} whatIf=${plan.what_if} />`}
    <h2>${t("Time against memory")}</h2>
    <${Scatter} points=${plan.points} capacity=${capacity} ranking=${plan.ranking.map((row) => row.layout)} marked=${marked} onPoint=${select} />
    <h2>${t("Where the step goes")}</h2>
    <${Bars} bars=${bars} looks=${STEP} label="Seconds of a step by part, with the interval of the whole" unit=${seconds} marked=${marked} onBar=${mark} />
    ${plan.differences.length > 0 && html`<h2>${t("How the others differ")}</h2>
      <p class="quiet">${t("Seconds that each needs more than the first; two measurements of one layout differ by {noise}.", { noise: percent(plan.noise) })}</p>
      <${Table} rows=${plan.differences} caption="Seconds more than the first, by part" />`}
    ${best.memory && html`<h2>${t("Memory of the fullest rank, by layout")}</h2>
      <${Bars} bars=${memory} looks=${MEMORY} label="Memory of the fullest rank of each layout by kind" unit=${gib} limit=${limit} marked=${marked} onBar=${mark} />
      <h2>${t(plan.every_rank ? "Memory of every pipeline rank, of the first" : "Memory of the pipeline ranks that can be the fullest, of the first")}</h2>
      <${Bars} bars=${ranks} looks=${MEMORY} label="Memory of each pipeline rank by kind" unit=${gib} limit=${limit} />`}
    ${rejected.length > 0 && html`<h2>${t("Rejected")}</h2>
      <${Table} rows=${[["reason", "candidates", "for example"], ...rejected.map(([reason, { count: number, example }]) => [reason, count(number), example])]} caption="Not in the ranking" />`}
    ${Object.keys(plan.commands).length > 0 && html`<h2>${t("Go on")}</h2>
      <dl class="terms">${Object.entries(plan.commands).map(([purpose, line]) => html`<dt>${t(purpose)}</dt><dd><code>${line}</code></dd>`)}</dl>`}
    <h2>${t("The step of the first, replayed")}</h2>
    <${Timeline} data=${plan.timelines} />`;
};

const questionOf = (state) => ({
  ask: "plan", model: state.model, config: state.config, config_name: state.config_name, cluster: `${state.cluster}:${state.devices}`,
  batch: state.batch, sequence: state.sequence, precision: state.precision, software: state.software, framework: state.framework,
  fix: state.fix.split(/\s+/).filter(Boolean), seconds: state.seconds, wide: state.wide, what_if: state.what_if,
});

const View = ({ state, set, ask, backend }) => {
  const recorded = backend === "recorded";
  const choices = useAnswer(ask, recorded ? null : { ask: "plan_choices" }).answer;
  const [wanted, setWanted] = useState(null); // the question of the search that was started
  const { answer, error, busy } = useAnswer(ask, recorded ? { ask: "plan" } : wanted);
  const [marked, setMarked] = useState(0), [said, setSaid] = useState(""), [problem, setProblem] = useState(null);
  // an address of a plan that was searched searches it again
  useEffect(() => { if (state.searched && !recorded) setWanted(questionOf(state)); }, []);
  const search = ({ devices, batch, sequence, fix }) => { // fields whose last change may not have arrived yet
    const typed = { devices: +devices.value, batch: +batch.value, sequence: +sequence.value, fix: fix.value };
    setMarked(0);
    setProblem(null);
    set({ ...typed, searched: true });
    setWanted(questionOf({ ...state, ...typed }));
  };
  const stop = () => setWanted(null);
  const config = async (use) => {
    try {
      const { text, name } = await ask({ ...wanted, ask: "plan_config", row: marked + 1 });
      setProblem(null);
      use(text, name);
    } catch (failure) { setProblem(failure); }
  };
  const running = wanted && busy, stale = wanted && JSON.stringify(wanted) !== JSON.stringify(questionOf(state));
  const actions = !recorded && html`<div class="fields">
    <${Button} onClick=${() => copy(answer.ranking[marked].layout, setSaid)}>${t("Copy the layout of row {row}", { row: marked + 1 })}<//>
    <${Button} disabled=${running} onClick=${() => config((text, name) => save(name, text))}>${t(wanted?.framework ? "Write it for {framework}" : "Write the config of row {row}", { row: marked + 1, framework: wanted?.framework })}<//>
    <span role="status" class="quiet">${said}</span></div>`;
  return html`
    <h1>${recorded && answer ? answer.title : t("Plan")}</h1>
    ${!recorded && html`<p class="quiet">${t("All legal layouts of a model on a cluster, their time and memory predicted, the best first.")}</p>
    <form class="fields" onSubmit=${(event) => { event.preventDefault(); search(event.target.elements); }}>
      ${state.config
        ? html`<div class="field"><span class="quiet">${t("Model")}</span><div class="inputs"><code>${state.config_name}</code><${Button} onClick=${() => set({ config: "", config_name: "" })}>${t("a preset instead")}<//></div></div>`
        : html`<${Choice} name="model" label="Model" value=${state.model} choices=${choices?.models ?? [state.model]} onChange=${(model) => set({ model })} />`}
      <${Choice} name="cluster" label="Cluster" value=${state.cluster} choices=${choices?.clusters ?? [state.cluster]} onChange=${(cluster) => set({ cluster })} />
      <${NumberField} name="devices" label="Devices" value=${state.devices} least=${1} most=${100000} onChange=${(devices) => set({ devices })} />
      <${NumberField} name="batch" label="Samples per step" value=${state.batch} least=${1} onChange=${(batch) => set({ batch })} />
      <${NumberField} name="sequence" label="Tokens per sample (0: the model's)" value=${state.sequence} least=${0} onChange=${(sequence) => set({ sequence })} />
      <${Choice} name="precision" label="Precision" value=${state.precision} choices=${[["", "as the device has it"], "bf16", "fp16", "fp32"]} onChange=${(precision) => set({ precision })} />
      <${Choice} name="software" label="Software" value=${state.software} choices=${[["", "today"], ...(choices?.software ?? []).filter((name) => name !== "today")]} onChange=${(software) => set({ software })} />
      ${choices?.frameworks.length > 0 && html`<${Choice} name="framework" label="For" value=${state.framework} choices=${[["", "Stretto"], ...choices.frameworks]} onChange=${(framework) => set({ framework })} />`}
      <${TextField} name="fix" label="Fixed choices" value=${state.fix} placeholder="tp=8 schedule=1f1b,zb-v" onChange=${(fix) => set({ fix })} />
      <${Choice} name="seconds" label="Work" value=${String(state.seconds)} choices=${[0.5, 1, 2, 4, 8, 16, 32].map((work) => [String(work), t("{work} s of a core", { work })])} onChange=${(work) => set({ seconds: +work })} />
      <${Check} name="wide" label="Offload, ZeRO 2 and 3 in pipelines" value=${state.wide} onChange=${(wide) => set({ wide })} />
      <${Check} name="what_if" label="What would be faster" value=${state.what_if} onChange=${(what_if) => set({ what_if })} />
      <button type="submit" id="search">${t("Search")}</button>
      ${running && html`<${Button} onClick=${stop}>${t("Stop")}<//>`}
    </form>
    <${Drop} label="or drop a model's config.json:" accept=".json" onFile=${(name, text) => set({ config: text, config_name: name })} />
    <p role="status" class="quiet">${running ? t("searching: {seconds} s of work at most, longer in a page than on a command line", { seconds: wanted.seconds }) : stale ? t("the fields were changed since this search") : ""}</p>`}
    <${Problem} error=${error ?? problem} />
    ${answer && html`<div aria-busy=${running}><${PlanResult} plan=${answer} marked=${marked} mark=${setMarked} actions=${actions} /></div>`}`;
};

export const plan = {
  id: "plan", title: "Plan", asks: ["plan"], View,
  defaults: {
    model: "llama3-70b", config: "", config_name: "", cluster: "dgx-h100", devices: 64, batch: 512, sequence: 8192, precision: "", software: "",
    framework: "", fix: "", seconds: 2, wide: false, what_if: false, searched: false,
  },
};
