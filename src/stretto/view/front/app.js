// The page: its views, the address, language and colours.
import { render } from "preact";
import { useCallback, useEffect, useState } from "preact/hooks";
import { backend } from "stretto/backend";
import { Problem, html } from "stretto/controls";
import { readAddress, writeAddress } from "stretto/state";
import { getLanguage, setLanguage, t } from "stretto/strings";
import { plan } from "stretto/plan";
import { comparisonPage, timelinePage } from "stretto/recorded";
import { proofs } from "stretto/proofs";
import { runs } from "stretto/runs";
import { layout } from "stretto/layout";
import { memory } from "stretto/memory";
import { schedules } from "stretto/schedules";
import { tables } from "stretto/tables";

// A view: its id in the address, its title, the questions that it needs, who alone answers them if not
// everybody does (`only`), the defaults of its state, and the component that draws it from {state, set, ask, backend, asks}.
const VIEWS = [schedules, layout, memory, plan, tables, runs, proofs, timelinePage, comparisonPage];

const other = backend();
globalThis.stretto = { ask: (question, options) => other.ask(question, options) }; // for scripts beside the page
const defaultsOf = (id) => VIEWS.find((view) => view.id === id)?.defaults ?? {};

const themeNow = () => document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
const remember = (name, value) => { try { localStorage.setItem(name, value); } catch { /* a page from a file may have no storage */ } };
const recall = (name) => { try { return localStorage.getItem(name); } catch { return null; } };
// a page that shows one view in a frame says ?embed, and may choose &language= and &theme=
const embedded = new URLSearchParams(location.search);

const App = () => {
  const [at, setAt] = useState(null); // {view, state}
  const [asks, setAsks] = useState(null);
  const [progress, setProgress] = useState("");
  const [problem, setProblem] = useState(null);
  const [language, setShown] = useState(getLanguage());

  useEffect(() => {
    const read = () => readAddress(location.hash, defaultsOf).then(setAt);
    addEventListener("hashchange", read);
    read();
    other.start(setProgress).then(setAsks).then(() => other.ready).catch(setProblem);
    return () => removeEventListener("hashchange", read);
  }, []);

  const available = VIEWS.filter((view) => (asks ? view.asks.every((ask) => asks.includes(ask)) : !view.only || view.only === other.name));
  const view = available.find((each) => each.id === at?.view) ?? available[0];
  const state = at && view && (at.view === view.id ? at.state : view.defaults);

  const set = useCallback((patch) => setAt((before) => {
    const base = before.view === view.id ? before.state : view.defaults;
    const next = { ...base, ...(typeof patch === "function" ? patch(base) : patch) };
    writeAddress(view.id, next, view.defaults).then((hash) => history.replaceState(null, "", hash));
    return { view: view.id, state: next };
  }), [view]);
  const ask = useCallback((question, options) => other.ask(question, options), []);
  const speak = (to) => { setLanguage(to); remember("language", to); setShown(to); };

  const starting = (!asks || progress) && !problem && html`<span class="quiet" role="status">${t("starting")} ${progress}</span>`;
  return html`
    ${!embedded.has("embed") && html`<header class="top">
      <a class="brand" href="#">Stretto</a>
      <nav aria-label=${t("Views")}>${available.map((each) => html`
        <a href=${`#${each.id}`} aria-current=${each === view ? "page" : null}>${t(each.title)}</a>`)}</nav>
      ${starting}
      <div class="tools">
        <button type="button" onClick=${() => speak(language === "en" ? "zh" : "en")}
          lang=${language === "en" ? "zh-CN" : "en"}>${language === "en" ? "中文" : "English"}</button>
        <button type="button" id="theme" onClick=${() => {
          const to = themeNow() === "dark" ? "light" : "dark";
          document.documentElement.dataset.theme = to;
          remember("theme", to);
        }}>${t("Light or dark")}</button>
      </div>
    </header>`}
    <main key=${language} aria-busy=${!asks && !problem}>
      ${embedded.has("embed") && starting}<${Problem} error=${problem} />
      ${view && state && html`<${view.View} key=${view.id} state=${state} set=${set} ask=${ask} backend=${other.name} asks=${asks ?? []} />`}
    </main>`;
};

setLanguage(embedded.get("language") ?? recall("language") ?? (navigator.language.startsWith("zh") ? "zh" : "en"));
if (embedded.has("embed")) document.documentElement.dataset.embed = "";
const theme = embedded.get("theme") ?? recall("theme");
if (theme) document.documentElement.dataset.theme = theme;
render(html`<${App} />`, document.getElementById("app"));
