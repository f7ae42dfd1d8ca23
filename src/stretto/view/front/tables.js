// The view of embedding tables: which ranks have which parts, and how busy and how full each rank is.
import { Bars } from "stretto/bars";
import { Choice, NumberField, Problem, Table, html, useAnswer } from "stretto/controls";
import { bytesText } from "stretto/job";
import { t } from "stretto/strings";

const NAMES = { table: "whole", column: "columns", row: "rows", data: "copies" }; // of splits
const LOOKS = { whole: ["#1e5a98", ""], columns: ["#eba32c", "upright"], rows: ["#8cdec8", "across"], copies: ["#926ac5", "dots"] };
const named = (parts) => Object.fromEntries(Object.entries(parts).map(([split, value]) => [NAMES[split], value]));
const SPLITS = {
  hybrid: "hybrid: the best for each table", table: "table: each whole on a rank", column: "column", row: "row: over all ranks",
  "table-row": "table-row: over the ranks of a node", data: "data: copies",
};
const time = (seconds) => `${(1e3 * seconds).toPrecision(3)} ms`;
const sum = (parts) => Object.values(parts).reduce((total, value) => total + value, 0);

const Placement = ({ answer }) => {
  const { ranks, tables, room } = answer, busy = ranks.map(({ seconds }) => sum(seconds)), most = Math.max(...busy), mean = sum(busy) / busy.length;
  const bars = (kind, text) => ranks.map((rank, at) => ({ name: String(at), label: "", parts: named(rank[kind]), end: text(sum(rank[kind])) }));
  return html`<p id="placed">${t("A step takes {time}: {rate} samples/s. Rank {rank} is the busiest, with {ratio} times the mean.", {
      time: time(answer.seconds), rate: Math.round(answer.samples_per_s).toLocaleString("en"), rank: busy.indexOf(most), ratio: (most / mean).toFixed(2) })}</p>
    ${answer.over.map((text) => html`<p class="problem" role="alert">${text}</p>`)}
    <h2>${t("Time of each rank")}</h2>
    <${Bars} bars=${bars("seconds", time)} looks=${LOOKS} label="Lookups, updates and messages of each rank, by split" unit=${time} />
    <h2>${t("Memory of each rank")}</h2>
    <${Bars} bars=${bars("bytes", bytesText)} looks=${LOOKS} label="Device memory of each rank for tables, by split" unit=${bytesText}
      limit=${{ value: room, text: bytesText(room) }} />
    <${Table} caption="Tables; bytes and time of the largest part" rows=${[["name", "rows", "columns", "cut", "on ranks", "where", "bytes", "time"],
      ...tables.map((each) => [each.name, each.rows.toLocaleString("en"), String(each.dim), t(NAMES[each.split]), each.ranks.length === ranks.length || !each.ranks.length ? t("all")
        : each.ranks.join(" "), t(each.place), bytesText(each.bytes), time(each.seconds)])]} />`;
};

const View = ({ state, set, ask }) => {
  const names = useAnswer(ask, { ask: "table_names" }), { answer, error, busy } = useAnswer(ask, { ask: "tables", ...state });
  const pick = (name) => (value) => set({ [name]: value });
  return html`<h1>${t("Embedding tables")}</h1>
    <form class="fields" onSubmit=${(event) => event.preventDefault()}>
      <${Choice} name="model" label="Model" value=${state.model} choices=${names.answer?.models ?? [state.model]} onChange=${pick("model")} />
      <${Choice} name="cluster" label="Cluster" value=${state.cluster} choices=${names.answer?.clusters ?? [state.cluster]} onChange=${pick("cluster")} />
      <${NumberField} name="ranks" label="Devices" value=${state.ranks} least=${1} most=${64} slider=${[1, 64]} onChange=${pick("ranks")} />
      <${NumberField} name="batch" label="Samples per step" value=${state.batch} least=${1} most=${1 << 24} onChange=${pick("batch")} />
      <${Choice} name="split" label="Placement" value=${state.split} choices=${(names.answer?.splits ?? [state.split]).map((each) => [each, SPLITS[each]])}
        onChange=${pick("split")} /></form>
    <${Problem} error=${error} />
    <div aria-busy=${busy}>${answer && html`<${Placement} answer=${answer} />`}</div>`;
};

export const tables = {
  id: "tables", title: "Tables", asks: ["tables"], View,
  defaults: { model: "dlrm-dcnv2", cluster: "dgx-a100-80gb", ranks: 8, batch: 65536, split: "hybrid" },
};
