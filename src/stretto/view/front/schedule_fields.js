// The fields of the view of schedules: a schedule with its options, and the costs that programs are replayed against.
import { useEffect, useRef } from "preact/hooks";
import { Button, Check, Choice, NumberField, html } from "stretto/controls";
import { t } from "stretto/strings";

// "1" is a number, "1, 2, 1, 1" a list; undefined if the text is neither
const readNumbers = (text) => {
  const numbers = text.split(",").map((part) => (part.trim() === "" ? NaN : Number(part)));
  if (numbers.some((number) => !(number >= 0 && Number.isFinite(number)))) return undefined;
  return numbers.length === 1 ? numbers[0] : numbers;
};
const writeNumbers = (value) => (Array.isArray(value) ? value.join(", ") : value ?? "");

// One number for all, or a list; empty: the default.
const NumbersField = ({ label, value, placeholder, name, onChange }) => {
  const input = useRef(null);
  useEffect(() => { input.current.value = writeNumbers(value); }, [JSON.stringify(value)]);
  const read = ({ target }) => {
    const text = target.value.trim(), numbers = text === "" ? null : readNumbers(text);
    target.setCustomValidity(numbers === undefined ? t("a number of at least 0, or one for each, as in 1, 1, 2, 1") : "");
    if (target.reportValidity()) onChange(numbers);
  };
  return html`<div class="field"><label for=${name}>${t(label)}</label>
    <input ref=${input} id=${name} type="text" class="numbers" inputmode="decimal" placeholder=${placeholder} spellcheck=${false}
      onInput=${({ target }) => target.setCustomValidity("")} onChange=${read} /></div>`;
};

const OptionField = ({ option, value, onChange, prefix }) => {
  const { name, kind, choices } = option, shown = value ?? option.default, more = { name: `${prefix}-${name}`, label: name.replaceAll("_", " ") };
  if (kind === "boolean") return html`<${Check} ...${more} value=${!!shown} onChange=${onChange} />`;
  if (kind === "choice")
    return html`<${Choice} ...${more} value=${shown ?? ""} choices=${choices.map((choice) => [choice, choice || t("the best")])} onChange=${onChange} />`;
  return html`<${NumbersField} ...${more} value=${value} placeholder=${option.default ?? t("default")} onChange=${onChange} />`;
};

// A schedule with its options, or a program from a file; `onChange(program)`.
export const ProgramFields = ({ program, at, list, onChange, onRemove }) => {
  const schedule = list.find((each) => each.name === program.name), prefix = `program-${at}`;
  const change = (patch) => onChange({ ...program, orders: undefined, ...patch });
  const option = (name) => (value) => {
    const { [name]: before, ...rest } = program.options ?? {};
    change({ options: value === null || value === "" ? rest : { ...rest, [name]: value } });
  };
  return html`<fieldset class="program"><legend>${program.text ? t("Program from a file") : t("Schedule")} ${at + 1}</legend>
    <div class="fields">
      ${program.text ? html`<p><b>${program.name}</b></p>` : html`
        <${Choice} name=${`${prefix}-name`} label="Schedule" value=${program.name} choices=${list.map((each) => each.name)}
          onChange=${(name) => change({ name, options: {} })} />
        ${schedule?.options.map((each) => html`<${OptionField} key=${each.name} prefix=${prefix} option=${each}
          value=${program.options?.[each.name]} onChange=${option(each.name)} />`)}`}
      <${Check} name=${`${prefix}-recompute`} label="recompute activations" value=${!!program.recompute}
        onChange=${(recompute) => change({ recompute: recompute || undefined })} />
      ${onRemove && html`<${Button} label=${`${t("Remove")} ${program.name}`} onClick=${onRemove}>${t("Remove")}<//>`}
    </div>
    ${schedule && !program.text && html`<p class="quiet">${t(schedule.description)}</p>`}
  </fieldset>`;
};

// name in `Costs`, label, default; boolean defaults are check boxes
const NUMBERS = [
  ["F", "F, forward", 1], ["I", "I, input gradient", 1], ["W", "W, weight gradient", 1], ["hop", "message", 0],
  ["update", "optimiser step", 0], ["reduce", "reduction of gradients", 0], ["recompute", "recomputation", "F"],
  ["message_bytes", "bytes of a message", 0], ["bandwidth", "bandwidth, bytes per time", "no limit"],
  ["pair", "overlapped pair, share of F and B", "in turn"],
  ["activations", "memory of a stage for a microbatch", "1 a rank"], ["kept_for_w", "share of it kept for W", 1],
  ["inputs", "memory of an input to recompute from", 0],
];
const CHECKS = [
  ["contention", "messages on a link queue", false], ["blocking", "sends block their rank", false],
  ["reduce_overlaps", "reductions overlap with computation", true],
];

export const CostFields = ({ costs, onChange }) => {
  const change = (name, ordinary) => (value) => {
    const { [name]: before, ...rest } = costs;
    onChange(value === null || value === ordinary ? rest : { ...rest, [name]: value });
  };
  const numbers = ([name, label, ordinary]) => html`<${NumbersField} key=${name} name=${`cost-${name}`} label=${label} value=${costs[name]}
    placeholder=${t(ordinary)} onChange=${change(name, ordinary)} />`;
  return html`<details class="program" open=${Object.keys(costs).length > 0}><summary>${t("Costs: times, messages, memory")}</summary>
    <p class="quiet">${t("Times of a rank's share of a microbatch, in any unit; a list has a number for each stage, as in 1, 1, 2, 1.")}</p>
    <div class="fields">${NUMBERS.map(numbers)}</div>
    <div class="fields">${CHECKS.map(([name, label, ordinary]) => html`<${Check} key=${name} name=${`cost-${name}`} label=${label}
      value=${costs[name] ?? ordinary} onChange=${change(name, ordinary)} />`)}</div></details>`;
};

export const SizeFields = ({ ranks, microbatches, onChange }) => html`<div class="fields">
  <${NumberField} name="ranks" label="Pipeline ranks" unit="p" value=${ranks} least=${1} most=${256} slider=${[1, 32]}
    onChange=${(value) => onChange({ ranks: value })} />
  <${NumberField} name="microbatches" label="Microbatches" unit="m" value=${microbatches} least=${1} most=${4096} slider=${[1, 128]}
    onChange=${(value) => onChange({ microbatches: value })} />
</div>`;
