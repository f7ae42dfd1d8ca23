// How tensors are cut: a parameter over tensor- and expert-parallel ranks, its gradient and states in every ZeRO
// stage, an activation. Pictures are to scale unless one side would vanish; the rank's part is hatched.
import { Choice, Problem, html } from "stretto/controls";
import { t } from "stretto/strings";

const count = (number) => number.toLocaleString("en");
const shapeText = (sizes) => `[${sizes.join(", ")}]`;
const range = (start, size) => (size === 1 ? `${start}` : `${start}–${start + size - 1}`);

// Rows and columns of boxes in words, of many the first.
const boxesText = (boxes, rows, columns) => {
  if (!boxes.length) return t("none of it");
  const parts = boxes.slice(0, 4).map(([row, column, high, wide]) => {
    const down = high === rows ? t("all rows") : t("rows {range}", { range: range(row, high) });
    return wide === columns ? down : `${down} × ${t("columns {range}", { range: range(column, wide) })}`;
  });
  return parts.join("; ") + (boxes.length > 4 ? `; ${t("and {n} more boxes", { n: boxes.length - 4 })}` : "");
};

// `parts` are the boxes of each rank of a group, whose borders are drawn; `boxes` is the rank's own part.
const Matrix = ({ rows, columns, parts = [], boxes, segments = [], most = 220, label, units = ["rows", "columns"] }) => {
  const scale = most / Math.max(rows, columns), high = Math.max(rows * scale, most / 6), wide = Math.max(columns * scale, most / 6);
  const y = (row) => (row / rows) * high, x = (column) => (column / columns) * wide, side = segments.length ? 34 : 0;
  const border = ([row, column, tall, broad]) => html`<rect x=${x(column)} y=${y(row)} width=${x(broad)} height=${y(tall)} class="part" />`;
  let at = 0;
  return html`<svg class="matrix" role="img" aria-label=${label} width=${wide + side + 4} height=${high + 18} viewBox=${`-2 -2 ${wide + side + 4} ${high + 18}`}>
    <rect width=${wide} height=${high} class="whole" />
    ${parts.flat().length <= 200 && parts.map((each) => each.map(border))}
    ${boxes.slice(0, 600).map(([row, column, tall, broad]) => html`<rect x=${x(column)} y=${y(row)} width=${Math.max(x(broad), 1.5)} height=${Math.max(y(tall), 1.5)} class="mine" />`)}
    ${segments.map(([name, size]) => {
      const middle = y(at + size / 2), line = y(at);
      at += size;
      return html`<line x1="0" x2=${wide} y1=${line} y2=${line} class="segment" /><text x=${wide + 4} y=${middle + 4}>${name}</text>`;
    })}
    <text x="0" y=${high + 13}>${t(units[0])} ${count(rows)} × ${t(units[1])} ${count(columns)}</text></svg>`;
};

// The flat tensor that ZeRO cuts, with the parameter's place in it and the rank's shard of the states.
const Unit = ({ mode, weight }) => {
  const { unit, states: { span } } = mode, x = (element) => (element / unit.elements) * 300;
  const text = t("flat unit of {n} parameters, {elements} elements; the rank's states: {range}",
    { n: unit.count, elements: count(unit.elements), range: range(span[0], span[1] - span[0]) });
  return html`<svg class="matrix" role="img" aria-label=${text} width="304" height="18" viewBox="-2 -2 304 18">
      <rect width="300" height="10" class="whole" /><rect x=${x(unit.before)} width=${Math.max(x(weight.elements), 1.5)} height="10" class="place" />
      <rect x=${x(span[0])} width=${Math.max(x(span[1] - span[0]), 1.5)} y="6" height="8" class="mine" /></svg>
    <p class="quiet">${text}. ${t("Grey: this weight.")}</p>`;
};

const STATES = { weight: "weight", gradient: "gradient", states: "optimiser states" };

const Mode = ({ mode, weight, current }) => html`<figure class="mode" data-mode=${mode.mode}>
  <figcaption><b>${t(mode.mode === "ddp" ? "ZeRO 0: all on every rank" : { zero1: "ZeRO 1: states sharded", zero2: "ZeRO 2: gradients too", zero3: "ZeRO 3: weights too" }[mode.mode])}</b>
    ${current && html` <span class="quiet">(${t("this job")})</span>`}</figcaption>
  ${mode.refused ? html`<p class="quiet">${t("not with this job:")} ${mode.refused}</p>` : html`
    <div class="trio">${Object.entries(STATES).map(([kind, name]) => {
      const part = mode[kind], text = `${count(part.elements)} / ${count(weight.elements)}`;
      return html`<div data-kind=${kind}><div>${t(name)}</div>
        <${Matrix} rows=${weight.rows} columns=${weight.columns} boxes=${part.boxes} most=${96} units=${["", ""]}
          label=${`${t(name)}: ${boxesText(part.boxes, weight.rows, weight.columns)}`} />
        <div class="quiet">${text}<br />${t(part.ranks === 1 ? "on every copy" : "over {n} ranks", { n: part.ranks })}</div></div>`;
    })}</div>
    <${Unit} mode=${mode} weight=${weight} />`}
</figure>`;

const ACTIVATIONS = {
  residual: "residual stream, norms, dropout", heads: "queries and output of attention", mlp: "inside of the MLP", logits: "logits",
};

export const Cuts = ({ reply, state, set }) => {
  const { answer, error, busy } = reply, weight = answer?.weight, activation = answer?.activation;
  return html`<section id="cuts" aria-labelledby="cut-head" aria-busy=${busy}>
    <h2 id="cut-head">${t("How tensors are cut")}</h2>
    <${Problem} error=${error} />
    ${answer && html`
      <form class="fields" onSubmit=${(event) => event.preventDefault()}>
        <${Choice} name="tensor" label="weight" value=${answer.tensor} choices=${answer.choices} onChange=${(tensor) => set({ tensor })} />
        <${Choice} name="activation" label="activation" value=${activation.kind} choices=${answer.activations.map((kind) => [kind, ACTIVATIONS[kind]])}
          onChange=${(kind) => set({ activation: kind })} />
      </form>
      ${!weight ? html`<p id="absent">${t("The stages of rank {rank} have no {tensor}: choose a rank of another stage.", { rank: answer.rank, tensor: answer.tensor })}</p>` : html`
        <h3><code>${weight.name}</code></h3>
        <p id="weight-text">${t("{plain} in the plain model, {local} on rank {rank}", { plain: shapeText(weight.sizes), local: shapeText(weight.local), rank: answer.rank })}:
          ${" "}${boxesText(weight.parts[weight.ranks.indexOf(answer.rank)], weight.rows, weight.columns)}${weight.padding > 0 && `, ${t("and {n} rows of padding", { n: weight.padding })}`}.</p>
        <${Matrix} rows=${weight.rows} columns=${weight.columns} parts=${weight.parts} boxes=${weight.parts[weight.ranks.indexOf(answer.rank)]}
          segments=${weight.segments} label=${t("parts of {name} on the ranks {ranks}", { name: weight.name, ranks: weight.ranks.join(", ") })} />
        <h3>${t("What the rank keeps between steps, in every ZeRO stage")}</h3>
        <p class="quiet">${t("Ranks {ranks} have the same part of the weight and other tokens; ZeRO shards over them. AdamW's states are the float32 master and two means, cut alike.",
          { ranks: `${weight.modes.find((mode) => mode.copies)?.copies.slice(0, 8).join(", ")}${(weight.modes.find((mode) => mode.copies)?.copies.length ?? 0) > 8 ? ", ..." : ""}` })}</p>
        <div class="modes">${weight.modes.map((mode) => html`<${Mode} mode=${mode} weight=${weight} current=${mode.mode === (state.zero === "0" ? "ddp" : `zero${state.zero}`)} />`)}</div>`}
      <h3>${t(ACTIVATIONS[activation.kind])}</h3>
      <p id="activation-text">${t("[s, b, features] = {plain} in all, {local} on rank {rank}", {
        plain: shapeText([activation.rows, activation.batch, activation.columns]), local: shapeText(activation.local), rank: answer.rank })}:
        ${" "}${boxesText(activation.boxes, activation.rows, activation.columns)}.</p>
      <${Matrix} rows=${activation.rows} columns=${activation.columns} boxes=${activation.boxes} units=${["positions", "features"]}
        label=${`${t(ACTIVATIONS[activation.kind])}: ${boxesText(activation.boxes, activation.rows, activation.columns)}`} />`}
  </section>`;
};
