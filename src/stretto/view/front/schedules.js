// The view of schedules: programs replayed under one time axis, edited, and taken along as files.
import { useRef } from "preact/hooks";
import { Button, Problem, Table, Timeline, html, useAnswer } from "stretto/controls";
import { CostFields, ProgramFields, SizeFields } from "stretto/schedule_fields";
import { EditBar, useHistory, useMoves } from "stretto/schedule_edit";
import { Files } from "stretto/schedule_files";
import { Memory } from "stretto/schedule_memory";
import { t } from "stretto/strings";

// What the page shows of an answer, which a recorded page has as well.
const Figures = ({ answer }) => html`
  <${Table} rows=${answer?.table} caption="Figures" />
  <${Table} rows=${answer?.bubbles?.map(([name, ...cells]) => [t(name.trim()), ...cells])} caption="The bubble, by definition" left />
  <${Table} rows=${answer?.versions} caption="Versions of the weights that a rank holds at most" />`;

const Recorded = ({ ask }) => {
  const { answer, error } = useAnswer(ask, { ask: "timeline" });
  return html`<h1 class="unseen">${t("Schedules")}</h1><${Problem} error=${error} />
    <${Timeline} data=${answer?.timelines} /><${Figures} answer=${answer} />`;
};

const Live = ({ state, set, ask }) => {
  const list = useAnswer(ask, { ask: "schedules" }).answer?.schedules ?? [], timelines = useRef(null);
  const history = useHistory(state, set), { programs, costs } = state, { change } = history;
  const describe = (program) => (program.text ? program : { ...program, ranks: state.ranks, microbatches: state.microbatches });
  const { answer, error, busy } = useAnswer(ask, { ask: "timeline", programs: programs.map(describe), costs });
  const panels = answer?.timelines.panels;
  const { move, live } = useMoves({ ask, describe, costs, timelines, data: answer?.timelines, programs, change });
  const put = (at) => (program) => change({ programs: programs.map((each, n) => (n === at ? program : each)) });
  const unedited = () => programs.map(({ orders, ...program }) => program);
  return html`
    <h1>${t("Schedules")}</h1>
    <form onSubmit=${(event) => event.preventDefault()}>
      <${SizeFields} ranks=${state.ranks} microbatches=${state.microbatches} onChange=${(sizes) =>
        change(programs.some((program) => program.orders && !program.text) ? { ...sizes, programs: unedited() } : sizes)} />
      ${programs.map((program, at) => html`<${ProgramFields} key=${at} at=${at} program=${program} list=${list} onChange=${put(at)}
        onRemove=${programs.length > 1 && (() => change({ programs: programs.filter((_, n) => n !== at) }))} />`)}
      <div class="fields"><${Button} onClick=${() => change({ programs: [...programs, { name: "zb-v" }] })}>${t("Add a schedule")}<//></div>
      <${CostFields} costs=${costs} onChange=${(to) => change({ costs: to })} />
    </form>
    <${Problem} error=${error} />
    <${EditBar} history=${history} panels=${panels} live=${live} programs=${programs} reset=${() => change({ programs: unedited() })} />
    <div aria-busy=${busy}><${Timeline} data=${answer?.timelines} onMove=${move} drawn=${(made) => { timelines.current = made; }} /></div>
    <${Figures} answer=${answer} />
    <${Memory} ask=${ask} programs=${programs} describe=${describe} costs=${costs} panels=${panels} />
    <${Files} ask=${ask} programs=${programs} describe=${describe} costs=${costs} panels=${panels} layers=${state.layers}
      onLayers=${(layers) => set({ layers })} onProgram=${(program) => change({ programs: [...programs, program] })} />`;
};

export const schedules = {
  id: "schedules", title: "Schedules", asks: ["timeline"],
  View: (props) => (props.backend === "recorded" ? html`<${Recorded} ...${props} />` : html`<${Live} ...${props} />`),
  defaults: { programs: [{ name: "1f1b" }], ranks: 4, microbatches: 8, costs: {}, layers: 32 },
};
