// `stretto verify` as it goes: layouts of a config against one process, errors beside what they may be, causes.
import { useState } from "preact/hooks";
import { Button, Choice, Output, Problem, Table, TextField, html, useAnswer } from "stretto/controls";
import { t } from "stretto/strings";

const LAYOUTS = [["config", "the config's own"], ["all", "every layout and feature"], ["product", "every combination"]];

const Verdict = ({ answer }) => answer.equal !== undefined && html`
  <p class=${`outcome ${answer.equal ? "equal" : "differs"}`} role="status">
    ${answer.equal ? `✓ ${t("Equal to one process")}` : `✗ ${t("Differs from one process")}`}
    <span class="quiet"> ${t("{seconds} s; compared: {compared}", { seconds: answer.seconds.toFixed(1), compared: answer.compared.join(", ") })}</span></p>
  ${answer.diagnoses.map((text) => html`<div class="problem" key=${text}>${text}</div>`)}
  <${Table} rows=${answer.table} caption="Largest relative difference from one process, float64" />
  <${Table} rows=${answer.own_types} caption="In the types that the job trains in" />
  <p class="quiet">${t("Not seen by this proof: {unseen}", { unseen: answer.unseen.join(", ") })}</p>`;

const View = ({ state, set, ask }) => {
  const configs = useAnswer(ask, { ask: "configs" });
  const [job, setJob] = useState(null), [problem, setProblem] = useState(null);
  const { answer, error } = useAnswer(ask, { ask: "verify", job });
  const names = configs.answer?.configs ?? [], config = names.includes(state.config) ? state.config : names[0] ?? "";
  const running = answer?.job !== undefined && answer.code === null;
  const start = (event) => {
    event.preventDefault();
    setProblem(null);
    const overrides = event.target.elements.overrides.value;
    ask({ ask: "verify-start", config, layouts: state.layouts, overrides }).then((started) => setJob(started.job)).catch(setProblem);
  };
  return html`<h1>${t("Proofs")}</h1>
    <p class="quiet">${t("Layouts are trained beside one process, from the same values on the same samples, in float64.")}</p>
    <${Problem} error=${configs.error ?? error} /><${Problem} error=${problem} />
    <form class="fields" onSubmit=${start}>
      <${Choice} name="config" label="Config" value=${config} choices=${names} onChange=${(to) => set({ config: to })} />
      <${Choice} name="layouts" label="Layouts" value=${state.layouts} choices=${LAYOUTS} onChange=${(layouts) => set({ layouts })} />
      <${TextField} name="overrides" label="Fields to override" value=${state.overrides} placeholder="layout.tp=2"
        onChange=${(overrides) => set({ overrides })} />
      <button disabled=${!config || running}>${t("Prove")}</button>
      ${running && html`<${Button} onClick=${() => ask({ ask: "verify-stop", job: answer.job }).catch(setProblem)}>${t("Stop")}<//>`}
    </form>
    ${answer?.job !== undefined && html`<${Verdict} answer=${answer} /><${Output} job=${answer} />`}`;
};

export const proofs = {
  id: "proofs", title: "Proofs", asks: ["verify"], only: "studio", View,
  defaults: { config: "", layouts: "config", overrides: "" },
};
