// Edits of programs: an action that is dragged, the checker's answer at once, undo and redo.
import { useEffect, useRef, useState } from "preact/hooks";
import { Button, html } from "stretto/controls";
import { t } from "stretto/strings";

const SOON = 500; // ms: changes of one field, such as those of a slider, are undone together

// The state with `change(patch)`, which can be undone.
export const useHistory = (state, set) => {
  const kept = useRef({ past: [], future: [], fields: "", at: 0 }), latest = useRef(state);
  latest.current = state;
  const change = (patch) => {
    const { current } = kept, fields = Object.keys(patch).join(), now = performance.now();
    if (fields !== current.fields || now - current.at > SOON || "programs" in patch) current.past.push(latest.current);
    Object.assign(current, { future: [], fields, at: now });
    set(patch);
  };
  const step = (from, to) => {
    const { current } = kept;
    if (!current[from].length) return;
    current[to].push(latest.current);
    current.fields = "";
    set(current[from].pop());
  };
  const undo = () => step("past", "future"), redo = () => step("future", "past");
  useEffect(() => {
    const keys = (event) => {
      if (!(event.ctrlKey || event.metaKey) || event.key.toLowerCase() !== "z") return;
      if (event.target.matches?.("input:not([type=checkbox], [type=range]), textarea")) return; // its own undo
      event.preventDefault();
      if (event.shiftKey) redo(); else undo();
    };
    addEventListener("keydown", keys);
    return () => removeEventListener("keydown", keys);
  }, []);
  return { change, undo, redo, canUndo: kept.current.past.length > 0, canRedo: kept.current.future.length > 0 };
};

// Moves actions: `move` for the timelines, and `live`, the answer to what is being dragged, with its panel.
export const useMoves = ({ ask, describe, costs, timelines, data, programs, change }) => {
  const [live, setLive] = useState(null), latest = useRef({}), wanted = useRef(null), busy = useRef(false);
  latest.current = { ask, describe, costs, data, programs, change };
  useEffect(() => { setLive(null); }, [data]);
  const preview = async (next) => {
    wanted.current = next;
    if (busy.current) return;
    busy.current = true;
    while (wanted.current) {
      const { panel, orders, rows } = wanted.current;
      wanted.current = null;
      const now = latest.current;
      try {
        const answer = await now.ask({ ask: "edit", program: { ...now.describe(now.programs[panel]), orders }, costs: now.costs });
        if (now.data !== latest.current.data) break; // what was edited is no longer there
        timelines.current?.retime(panel, { ...answer, orders: rows });
        setLive({ panel, ...answer });
      } catch (error) { setLive({ panel, legal: false, message: error.message, hint: error.hint, cycle: [] }); }
    }
    busy.current = false;
  };
  // the rows as they were before the drag, with the action at another place of its row; rows that are as the
  // schedule has them stay empty in the program, and its address short
  const before = useRef(null);
  const move = ({ panel, row, name, index, done }) => {
    const now = latest.current;
    before.current ??= now.data.panels[panel].orders.map((order) => [...order]);
    const rows = [...before.current], order = [...rows[row]];
    if (index !== null) {
      order.splice(order.indexOf(name), 1);
      order.splice(index, 0, name);
    }
    rows[row] = order;
    const orders = rows.map((_, at) => (at === row ? order.join() : now.programs[panel].orders?.[at] ?? ""));
    if (!done || index === null) preview({ panel, orders, rows });
    if (!done) return;
    before.current = null;
    if (index === null) return;
    now.data.panels[panel].orders = rows; // the next key may come before the answer
    now.change({ programs: now.programs.map((program, at) => (at === panel ? { ...program, orders } : program)) });
  };
  return { move, live };
};

const percent = (share) => `${(100 * share).toFixed(1)}%`;
const short = (value) => String(+value.toPrecision(5));

// What a program comes to: before and after its edits, or why it does not run.
const Verdict = ({ panel, live }) => {
  const { legal, message, hint, cycle, figures } = live ?? panel, { before } = panel;
  if (legal === undefined) return null;
  const base = before ?? panel.figures ?? figures;
  const changed = (label, from, to, write) => html`<div><dt>${t(label)}</dt>
    <dd>${!before && !live ? write(to) : html`${write(from)} → <b>${write(to)}</b>`}</dd></div>`;
  return html`<section class=${`verdict ${legal ? "" : "stuck"}`} aria-label=${`${t("Verdict")}: ${panel.title}`}>
    <p><b>${panel.title}</b>: ${legal ? t("✓ runs, and does the work of a step") : t("✗ does not run")}</p>
    ${legal ? html`<dl class="changes">
      ${changed("makespan", base.makespan, figures.makespan, short)}
      ${changed("bubble, share of the step", base.bubble, figures.bubble, percent)}
      ${changed("bubble, share of the work", base.over_ideal, figures.over_ideal, percent)}
      ${changed("peak activations", base.peak, figures.peak, short)}
    </dl>` : html`<p>${message}</p>${hint && html`<p class="quiet">${hint}</p>`}
    ${cycle?.length > 1 && html`<ol>${cycle.map(([waiting, awaited]) =>
      html`<li>${t("{waiting} waits for {awaited}", { waiting, awaited })}</li>`)}</ol>`}`}
  </section>`;
};

export const EditBar = ({ history, panels, live, programs, reset }) => html`
  <div class="fields edits" role="toolbar" aria-label=${t("Edits")}>
    <${Button} disabled=${!history.canUndo} onClick=${history.undo}>${t("Undo")} <kbd>Ctrl Z</kbd><//>
    <${Button} disabled=${!history.canRedo} onClick=${history.redo}>${t("Redo")} <kbd>Ctrl Shift Z</kbd><//>
    <${Button} disabled=${!programs.some((program) => program.orders)} onClick=${reset}>${t("Reset edits")}<//>
    <span class="quiet">${t("Drag an action to another place of its rank, or select it and press Alt and an arrow key.")}</span>
  </div>
  <div class="verdicts" role="status" aria-live="polite">${(panels ?? []).map((panel, at) =>
    html`<${Verdict} key=${at} panel=${panel} live=${live?.panel === at ? live : null} />`)}</div>`;
