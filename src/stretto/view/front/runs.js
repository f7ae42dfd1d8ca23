// The runs of the studio's folder: their curves as they train, configs, measured timelines; start, stop and resume.
import { useState } from "preact/hooks";
import { Button, Choice, Curves, Output, Problem, Table, TextField, Timeline, html, useAnswer } from "stretto/controls";
import { t } from "stretto/strings";

const STATES = { trains: "trains", finished: "finished", stopped: "stopped" };
const count = (value) => (value === null || value === undefined ? "" : value.toLocaleString("en", { maximumFractionDigits: 0 }));
const stepOf = (run) => (run.steps ? `${run.step}/${run.steps}` : String(run.step));

// Stop asks first: the run finishes its step and saves, but whoever watches it elsewhere may not want that.
const Actions = ({ run, act }) => {
  const [asked, setAsked] = useState(false);
  if (run.state !== "trains") return run.saved.length && run.state !== "finished"
    ? html`<${Button} label=${t("Resume {run}", { run: run.name })} onClick=${() => act({ ask: "run-resume", name: run.name })}>${t("Resume")}<//>` : null;
  if (!run.local) return t("trains on another machine");
  if (!asked) return html`<${Button} label=${t("Stop {run}", { run: run.name })} onClick=${() => setAsked(true)}>${t("Stop")}…<//>`;
  return html`<span class="asked" role="group" aria-label=${t("Stop {run}", { run: run.name })}>
    ${t("Finish the step, save, and end?")}
    <${Button} onClick=${() => { setAsked(false); act({ ask: "run-stop", name: run.name }); }}>${t("Stop it")}<//>
    <${Button} onClick=${() => setAsked(false)}>${t("Go on training")}<//></span>`;
};

const List = ({ runs, selected, onSelect, act }) => html`
  <div class="wide" tabindex="0" role="region" aria-label=${t("Runs of the folder")}><table class="runs">
    <caption>${t("Runs of the folder")}</caption>
    <thead><tr>${["run", "state", "step", "loss", "speed", "ranks", "newest checkpoint", "stop or resume"].map((name, at) =>
      html`<th scope="col" class=${at < 2 || at === 7 ? "text" : ""}>${t(name)}</th>`)}</tr></thead>
    <tbody>${runs.map((run) => html`<tr key=${run.name} class=${selected.includes(run.name) ? "marked" : ""}>
      <th scope="row"><label class="pick"><input type="checkbox" checked=${selected.includes(run.name)}
        onChange=${(event) => onSelect(run.name, event.target.checked)} /> ${run.name}</label></th>
      <td class="text"><span class=${`state ${run.state}`}>${t(STATES[run.state])}</span>${run.hang && ` ${t("(records of a hang)")}`}</td>
      <td>${stepOf(run)}</td><td>${run.loss === null ? "" : run.loss.toFixed(4)}</td>
      <td>${run.speed === null ? "" : `${count(run.speed)} ${t(run.unit)}`}</td><td>${run.ranks ?? ""}</td>
      <td>${run.saved.at(-1) ?? ""}</td><td class="text"><${Actions} run=${run} act=${act} /></td></tr>`)}
    </tbody></table></div>`;

const Start = ({ state, set, ask, act }) => {
  const { answer, error } = useAnswer(ask, { ask: "configs" });
  const configs = answer?.configs ?? [];
  const config = configs.includes(state.config) ? state.config : configs[0] ?? "";
  return html`<section><h2>${t("Train a config of the folder")}</h2><${Problem} error=${error} />
    ${answer && !configs.length ? html`<p class="quiet">${t("The folder has no config: `stretto init` writes one.")}</p>`
      : html`<form class="fields" onSubmit=${(event) => {
        event.preventDefault();
        act({ ask: "run-start", config, overrides: event.target.elements.overrides.value });
      }}>
      <${Choice} name="config" label="Config" value=${config} choices=${configs} onChange=${(to) => set({ config: to })} />
      <${TextField} name="overrides" label="Fields to override" value=${state.overrides} placeholder="optim.lr=3e-4"
        onChange=${(overrides) => set({ overrides })} />
      <button disabled=${!config}>${t("Train")}</button></form>`}</section>`;
};

const Configs = ({ names, ask }) => {
  const { answer, error } = useAnswer(ask, { ask: "run-config", names });
  return html`<${Problem} error=${error} />
    ${names.length > 1 && (answer?.differences.length
      ? html`<div class="differences"><${Table} rows=${answer.differences} caption="Fields in which the configs differ" /></div>`
      : answer && html`<p class="quiet">${t("The configs do not differ, but for the run's name.")}</p>`)}
    ${names.length === 1 && answer && html`<details><summary>${t("Config")}</summary><pre class="output" tabindex="0">${answer.text}</pre></details>`}`;
};

const Trace = ({ run, state, set, ask }) => {
  const step = run.traces.includes(state.step) ? state.step : run.traces.at(-1);
  const { answer, error, busy } = useAnswer(ask, { ask: "run-trace", name: run.name, step });
  return html`<section><h2>${t("Measured timeline of {run}", { run: run.name })}</h2>
    <div class="fields"><${Choice} name="step" label="Step" value=${String(step)} choices=${run.traces.map(String)} onChange=${(to) => set({ step: +to })} /></div>
    <${Problem} error=${error} />
    <div aria-busy=${busy}><${Timeline} data=${answer?.timelines} /></div>
    <${Table} rows=${answer?.gaps.map(([rank, cause, ...times]) => [rank, t(cause), ...times])} caption="Gaps between computations, by cause" />
    <${Table} rows=${answer?.actions} caption="Actions, predicted and measured" />
    ${answer && html`<p class="quiet">${t("A gap is time in which a rank computes nothing; its cause is the call that was timed then. Time in which none was is Python and the operating system.")}</p>`}</section>`;
};

const Hang = ({ run, ask }) => {
  const [text, setText] = useState(null), [error, setError] = useState(null), [busy, setBusy] = useState(false);
  const read = () => {
    setBusy(true);
    ask({ ask: "run-hang", name: run.name }).then((answer) => setText(answer.text)).catch(setError).finally(() => setBusy(false));
  };
  return html`<section><h2>${t("Records of a hang of {run}", { run: run.name })}</h2><${Problem} error=${error} />
    ${text === null ? html`<${Button} disabled=${busy} onClick=${read}>${t("Which rank do the others wait for?")}<//>`
      : html`<pre class="output" tabindex="0">${text}</pre>`}</section>`;
};

const View = ({ state, set, ask }) => {
  const { answer, error } = useAnswer(ask, { ask: "runs", selected: state.selected });
  const [problem, setProblem] = useState(null);
  const act = (question) => { setProblem(null); ask(question).catch(setProblem); };
  const select = (name, on) => set((before) => ({ selected: on ? [...before.selected, name] : before.selected.filter((each) => each !== name) }));
  const runs = answer?.runs ?? [], shown = runs.filter((run) => state.selected.includes(run.name));
  const traced = shown.find((run) => run.traces.length), names = shown.map((run) => run.name);
  return html`<h1>${t("Runs")}</h1>
    <${Problem} error=${error} /><${Problem} error=${problem} />
    ${answer && (runs.length ? html`<${List} runs=${runs} selected=${state.selected} onSelect=${select} act=${act} />`
      : html`<p class="quiet">${t("The folder has no runs yet: train a config.")}</p>`)}
    ${answer?.most_folders && html`<p class="quiet">${t("Only the first {count} folders were searched for runs: start the studio in a folder with fewer.", { count: count(answer.most_folders) })}</p>`}
    ${runs.length > 0 && !shown.length && html`<p class="quiet">${t("Choose one or several runs to see their curves.")}</p>`}
    <div class="plots">${shown.length > 0 && answer.plots.map((plot) => html`<figure key=${plot.title}><figcaption>${t(plot.title)}</figcaption>
      <${Curves} lines=${plot.lines} label=${plot.title} xLabel="step" unit=${plot.unit} /></figure>`)}</div>
    ${shown.length > 0 && answer.steps_of_a_point > 1 && html`<p class="quiet">${t("Points of the longest curves are means of {count} steps.", { count: answer.steps_of_a_point })}</p>`}
    ${shown.length > 0 && html`<${Configs} names=${names} ask=${ask} />`}
    ${traced && html`<${Trace} key=${traced.name} run=${traced} state=${state} set=${set} ask=${ask} />`}
    ${shown.filter((run) => run.hang).map((run) => html`<${Hang} key=${run.name} run=${run} ask=${ask} />`)}
    <${Start} state=${state} set=${set} ask=${ask} act=${act} />
    ${answer?.jobs.length > 0 && html`<section><h2>${t("Output")}</h2>
      ${answer.jobs.toReversed().map((job) => html`<${Output} key=${job.job} job=${job} />`)}</section>`}`;
};

export const runs = {
  id: "runs", title: "Runs", asks: ["runs"], only: "studio", View,
  defaults: { selected: [], config: "", overrides: "", step: 0 },
};
