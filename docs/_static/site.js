// Questions that open their explanation once they are answered, and figures that run.

const recall = (key) => { try { return localStorage.getItem(key); } catch { return null; } };
const remember = (key, value) => {
  try { value === null ? localStorage.removeItem(key) : localStorage.setItem(key, value); } catch { /* no storage */ }
};
const chinese = document.documentElement.lang.startsWith("zh");
const page = location.pathname.replace(/^.*\/(?=[^/]+\/[^/]+$)/, ""); // folder and file, the same in both languages

// "1,024", "27.3 %", "27,3", "1/4" and "1e9" are numbers: commas before three digits each group them, another is a
// decimal comma
const toDecimal = (text) => {
  const grouped = /^[-+]?[1-9]\d{0,2}(,\d{3})+(?!\d|,)/.test(text);
  return Number.parseFloat(grouped ? text.replaceAll(",", "") : text.replace(",", "."));
};
const toNumber = (text, unit) => {
  const plain = text.trim().replace("−", "-");
  const [, over, under] = plain.match(/^([-+.,\de]+)\s*\/\s*([.,\d]+)/i) ?? [];
  if (under) return toDecimal(over) / toDecimal(under) * (unit === "%" && !plain.includes("%") ? 100 : 1);
  return /^[\d\s]+\//.test(plain) ? NaN : toDecimal(plain.replaceAll(/[\s_]/g, "")); // "1 1/4" may be 1.25 or 11/4
};

const setUpQuestion = (section) => {
  const { answer, shown, tolerance, unit, right, wrong, none, number, choices } = section.dataset;
  const form = section.querySelector("form"), details = section.querySelector("details");
  const verdict = section.querySelector(".predict-verdict");
  const [check, again] = form.querySelectorAll("button"), inputs = [...form.querySelectorAll("input")];
  const key = `predict ${page} ${number}`;
  const show = (given) => {
    const value = +choices ? given : toNumber(given, unit);
    const isRight = +choices ? value === answer : Math.abs(value - answer) <= +tolerance + 1e-12 * Math.abs(answer);
    verdict.textContent = `${isRight ? right : wrong}${+choices ? section.querySelectorAll("label")[answer].textContent.trim() : shown}${unit && ` ${unit}`}`;
    section.dataset.verdict = isRight ? "right" : "wrong";
    for (const input of inputs) input.disabled = true;
    check.hidden = true;
    again.hidden = false;
    details.hidden = false;
    details.open = true;
  };
  const lock = () => {
    verdict.textContent = "";
    delete section.dataset.verdict;
    for (const input of inputs) input.disabled = false;
    check.hidden = false;
    again.hidden = true;
    details.hidden = true;
    details.open = false;
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const given = +choices ? inputs.find((input) => input.checked)?.value : inputs[0].value;
    if (!given?.trim()) return inputs[0].focus();
    if (!+choices && !Number.isFinite(toNumber(given, unit))) { verdict.textContent = none; return inputs[0].focus(); }
    remember(key, given);
    show(given);
    again.focus();
  });
  form.addEventListener("reset", () => { remember(key, null); lock(); inputs[0].focus(); });
  lock();
  const before = recall(key);
  if (before !== null) {
    if (+choices) { if (inputs[before]) { inputs[before].checked = true; show(before); } }
    else if (Number.isFinite(toNumber(before, unit))) { inputs[0].value = before; show(before); }
  }
};

const isDark = () => {
  const theme = document.body.dataset.theme;
  return theme === "dark" || (theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
};
let close = () => {}; // the figure that runs

const setUpFigure = (figure) => {
  const button = figure.querySelector("button"), still = figure.querySelector(".live-still");
  const status = figure.querySelector("[role=status]");
  if (!button) return;
  button.hidden = false;
  const label = button.textContent;
  if (location.protocol === "file:") { // whose pages may not start Python
    button.disabled = true;
    figure.querySelector("a").remove();
    status.textContent = button.dataset.file;
    return;
  }
  const start = () => {
    close();
    const frame = document.createElement("iframe");
    const [address, state] = figure.dataset.address.split("#");
    frame.src = `${address}?embed&language=${chinese ? "zh" : "en"}&theme=${isDark() ? "dark" : "light"}#${state}`;
    frame.title = figure.dataset.title;
    frame.height = Math.max(figure.dataset.height, still.offsetHeight);
    frame.className = "starting";
    still.after(frame);
    status.textContent = button.dataset.wait;
    button.textContent = button.dataset.back;
    const waiting = setInterval(() => { // until the view has drawn
      const inner = frame.contentDocument;
      if (!inner?.querySelector("main > *") || inner.querySelector("[aria-busy=true]")) return;
      clearInterval(waiting);
      frame.className = "";
      still.hidden = true;
      status.textContent = "";
    }, 200);
    close = () => {
      clearInterval(waiting);
      frame.remove();
      still.hidden = false;
      status.textContent = "";
      button.textContent = label;
      button.onclick = start;
      close = () => {};
    };
    button.onclick = () => close();
  };
  button.onclick = start;
};

// a running figure has the colours of the site
new MutationObserver(() => {
  const inner = document.querySelector("figure.live iframe")?.contentDocument?.documentElement;
  if (inner) inner.dataset.theme = isDark() ? "dark" : "light";
}).observe(document.body, { attributes: true, attributeFilter: ["data-theme"] });

// what the theme leaves to do for keyboards and screen readers: long lines scroll, and its two asides have names,
// and a corner of a table without a word is no header
const focusScrolled = () => {
  for (const box of document.querySelectorAll(".highlight pre, .table-wrapper, .live-still, .formula")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
};
addEventListener("resize", focusScrolled);
addEventListener("load", focusScrolled);
focusScrolled();
for (const header of document.querySelectorAll("th")) if (!header.textContent.trim()) header.outerHTML = "<td></td>";
document.querySelector("aside.sidebar-drawer")?.setAttribute("aria-label", chinese ? "所有页面" : "All pages");
document.querySelector("aside.toc-drawer")?.setAttribute("aria-label", chinese ? "本页内容" : "On this page");

// a page from a file may not read the pages that a search has found
if (location.protocol === "file:" && typeof DOCUMENTATION_OPTIONS !== "undefined") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

document.querySelectorAll("div.predict").forEach(setUpQuestion);
document.querySelectorAll("figure.live").forEach(setUpFigure);
