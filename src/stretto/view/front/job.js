// The fields of a job that views share, and the question that they make: words of `stretto predict`.
import { Check, Choice, NumberField, TextField, html, useTyped } from "stretto/controls";
import { t } from "stretto/strings";

export const AXES = ["tp", "cp", "ep", "dp", "pp"];
const AXIS_LABELS = { tp: "tensor parallel (tp)", cp: "context parallel (cp)", ep: "expert parallel (ep)", dp: "data parallel (dp)", pp: "pipeline parallel (pp)" };

export const jobDefaults = {
  model: "llama3-8b", cluster: "dgx-h100", tp: 2, cp: 1, ep: 1, dp: 2, pp: 4, expert_tp: 0,
  schedule: "1f1b", chunks: 0, micro: 1, microbatches: 16, seq: 0, sp: true, context: "ring", zero: "1",
  recompute: "none", blocks: 0, precision: "bf16",
};

// The words of a state that say something else than the defaults of `stretto predict`.
export const jobWords = (state) => Object.fromEntries(Object.entries({
  schedule: state.schedule, chunks: state.chunks > 1 ? state.chunks : "", micro_batch: state.micro, microbatches: state.microbatches,
  seq: state.seq || "", sp: state.tp > 1 ? Number(state.sp) : "", context: state.cp > 1 ? state.context : "",
  zero: state.cp * state.dp > 1 ? state.zero : "", recompute: state.recompute,
  recompute_layers: state.recompute === "full" && state.blocks ? state.blocks : "", precision: state.precision,
  node_size: state.node || "", offload: (state.offload ?? "none") === "none" ? "" : state.offload, attention: state.attention || "",
  optimizer: (state.optimiser ?? "adamw") === "adamw" ? "" : state.optimiser, order: state.order || "",
  optimizer_states: state.optimiser === "adamw" && state.states === "bfloat16" ? state.states : "",
}).filter(([, word]) => word !== "").map(([name, word]) => [name, String(word)]));

export const jobQuestion = (state) => ({
  model: state.model, cluster: state.cluster, ...Object.fromEntries([...AXES, "expert_tp"].map((axis) => [axis, state[axis]])),
  fields: jobWords(state),
  ...(state.order ? { order: state.order } : {}), ...(state.config ? { config: state.config, file: state.file } : {}),
});

// The same on the command line.
export const jobCommand = (state) => {
  const axes = AXES.filter((axis) => state[axis] > 1 || axis === "dp").map((axis) => `${axis}=${state[axis]}`);
  const experts = state.ep > 1 ? [`expert_tp=${state.expert_tp || state.tp}`] : [];
  const words = Object.entries(jobWords(state)).map(([name, word]) => `${name}=${word}`);
  return ["stretto predict", `--model ${state.config ? state.file || "config.json" : state.model}`, `--cluster ${state.cluster}`, ...axes, ...experts, ...words].join(" ");
};

// Text with suggestions: any spelling of a model's or a cluster's name is read.
const Named = ({ label, value, onChange, names, name }) => html`<div class="field"><label for=${name}>${t(label)}</label>
  <input id=${name} type="text" list=${`${name}-names`} spellcheck=${false} ...${useTyped(value, (event) => { onChange(event.target.value); })} />
  <datalist id=${`${name}-names`}>${names.map((each) => html`<option value=${each} />`)}</datalist></div>`;

export const ModelField = ({ state, set, names }) =>
  html`<${Named} name="model" label="Model" value=${state.model} names=${names?.models ?? []} onChange=${(model) => set({ model, config: "", file: "" })} />`;

export const ClusterField = ({ state, set, names }) => html`<${Named} name="cluster" label="Cluster" value=${state.cluster}
  names=${(names?.clusters ?? []).map((each) => each.name)} onChange=${(cluster) => set({ cluster })} />`;

export const DegreeFields = ({ state, set }) => html`
  ${AXES.map((axis) => html`<${NumberField} key=${axis} name=${axis} label=${AXIS_LABELS[axis]} value=${state[axis]} least=${1} most=${65536}
    onChange=${(value) => set({ [axis]: value })} />`)}
  ${state.ep > 1 && html`<${NumberField} name="expert_tp" label="expert_tp, 0: as tp" value=${state.expert_tp} least=${0} most=${1024}
    onChange=${(expert_tp) => set({ expert_tp })} />`}`;

const numbered = (set, name) => (value) => set({ [name]: value });

export const StepFields = ({ state, set, names, sliders = false }) => html`
  <${Choice} name="schedule" label="Schedule" value=${state.schedule} choices=${names?.schedules ?? [state.schedule]} onChange=${numbered(set, "schedule")} />
  <${NumberField} name="chunks" label="chunks, 0: the schedule's" value=${state.chunks} least=${0} most=${64} onChange=${numbered(set, "chunks")} />
  <${NumberField} name="micro" label="micro batch" value=${state.micro} least=${1} most=${4096} slider=${sliders && [1, 32]} onChange=${numbered(set, "micro")} />
  <${NumberField} name="microbatches" label="microbatches" value=${state.microbatches} least=${1} most=${65536} slider=${sliders && [1, 128]} onChange=${numbered(set, "microbatches")} />
  <${NumberField} name="seq" label="sequence, 0: the model's" value=${state.seq} least=${0} most=${1 << 24} slider=${sliders && [0, 32768]} step=${sliders ? 512 : 1}
    onChange=${numbered(set, "seq")} />
  <${Choice} name="zero" label="ZeRO stage" value=${state.zero} choices=${["0", "1", "2", "3"]} onChange=${numbered(set, "zero")} />
  <${Choice} name="recompute" label="recomputation" value=${state.recompute} choices=${["none", "selective", "full"]} onChange=${numbered(set, "recompute")} />
  ${state.recompute === "full" && html`<${NumberField} name="blocks" label="blocks of a stage, 0: all" value=${state.blocks} least=${0} most=${1024}
    slider=${sliders && [0, 32]} onChange=${numbered(set, "blocks")} />`}
  <${Choice} name="precision" label="precision" value=${state.precision} choices=${["bf16", "fp16", "fp32", "fp8"]} onChange=${numbered(set, "precision")} />
  ${state.tp > 1 && html`<${Check} name="sp" label="sequence parallelism" value=${state.sp} onChange=${numbered(set, "sp")} />`}
  ${state.cp > 1 && html`<${Choice} name="context" label="context parallelism" value=${state.context} choices=${["ring", "ulysses"]} onChange=${numbered(set, "context")} />`}`;

export const OrderField = ({ state, set }) =>
  html`<${TextField} name="order" label="order of the axes, fastest first" value=${state.order} onChange=${(order) => set({ order: order.trim() })} />`;

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
export const bytesText = (bytes) => {
  let unit = 0, value = Math.abs(bytes);
  while (value >= 1024 && unit < 4) { value /= 1024; unit++; }
  const digits = unit === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${bytes < 0 ? "-" : ""}${value.toFixed(digits)} ${UNITS[unit]}`;
};
