// The timelines in a notebook, through anywidget. Traits of the model: data (as panel_record.py writes it), css (the
// page's style sheet), selected (an action's name, or null) and view ([from, to], or null).
import { t } from "stretto/strings";
import { Timelines } from "stretto/timeline";

const REPORT_MS = 150; // the kernel is told of a pan when it ends

class NotebookTimelines extends Timelines {
  look(from, to) {
    super.look(from, to);
    this.onLook?.(this.view.from, this.view.to);
  }
  // without a hovered action, the selected one keeps its outline
  choose(chart, block, x, y, aloud) {
    this.pointed = block ? this.name(block) : null;
    if (block || !this.selected) return super.choose(chart, block, x, y, aloud);
    super.choose(this.selected.chart, this.selected.block, 0, 0);
    this.tip.hidden = true;
    return undefined;
  }
  // above all that scrolls around it, and placed in the window
  place(x, y) {
    if (!this.tip.popover) {
      this.tip.popover = "manual";
      Object.assign(this.tip.style, { inset: "auto", margin: 0, color: "var(--text)" });
      this.tip.showPopover?.();
    }
    super.place(x, y);
  }
  name(block) { return `${block.stage}${block.kind}${block.microbatch ?? ""}`; }
  pick(name) {
    this.selected = null;
    for (const chart of this.charts) {
      const block = chart.blocks.find((each) => this.name(each) === name);
      if (block) this.selected ??= { chart, block };
    }
    this.root.dataset.selected = this.selected ? name : "";
    if (!this.selected) return this.pointed ? undefined : this.choose(null, null);
    const { block } = this.selected, { view } = this, half = (view.to - view.from) / 2;
    const middle = (block.start + block.end) / 2;
    if (block.end < view.from || block.start > view.to) this.look(middle - half, middle + half);
    return this.pointed ? undefined : this.choose(null, null);
  }
}

// the background of a notebook's theme is dark
const isDark = (element) => {
  for (let each = element; each; each = each.parentElement) {
    const [red, green, blue, alpha = 1] = getComputedStyle(each).backgroundColor.match(/[\d.]+/g)?.map(Number) ?? [];
    if (blue !== undefined && alpha > 0.5) return 0.299 * red + 0.587 * green + 0.114 * blue < 128;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
};

const render = ({ model, el }) => {
  // styles of the page stay inside, and those of the notebook outside
  const host = document.createElement("div"), shadow = host.attachShadow({ mode: "open" });
  const style = document.createElement("style"), root = document.createElement("div");
  style.textContent = `${model.get("css")} .bar { position: static; background: none; } h2 { margin-top: 6px; }`;
  root.className = "timelines";
  shadow.append(style, root);
  host.dataset.lmSuppressShortcuts = "true"; // of JupyterLab: pressing d twice deletes the cell
  el.append(host);
  const timelines = new NotebookTimelines(root, { t });
  const tint = () => { host.dataset.theme = isDark(el) ? "dark" : "light"; timelines.retint(); };
  const themes = new MutationObserver(tint);
  for (const each of [document.documentElement, document.body]) themes.observe(each, { attributes: true });

  const save = (trait, value) => { model.set(trait, value); model.save_changes(); };
  const show = () => {
    timelines.selected = null;
    timelines.show(model.get("data"));
    timelines.pick(model.get("selected"));
    if (model.get("view")) timelines.look(...model.get("view"));
  };
  let later = 0, down = null;
  const changed = {
    "change:data": show,
    "change:selected": () => timelines.pick(model.get("selected")),
    "change:view": () => {
      const view = model.get("view");
      if (view && (view[0] !== timelines.view.from || view[1] !== timelines.view.to)) timelines.look(...view);
    },
  };
  for (const [event, act] of Object.entries(changed)) model.on(event, act);
  const select = () => save("selected", timelines.pointed ?? null); // which picks it, too
  root.addEventListener("pointerdown", (event) => { down = event.clientX; }, true);
  root.addEventListener("click", (event) => {
    if (event.target.tagName === "CANVAS" && Math.abs(event.clientX - down) < 4) select();
  });
  root.addEventListener("keydown", (event) => { if (event.key === "Enter" && event.target.tagName === "CANVAS") select(); });
  // the wheel scrolls the notebook; with Ctrl it zooms
  root.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) event.stopPropagation();
  }, true);
  // a notebook puts the element into the page later, which gives it colours and a width
  const sizes = new ResizeObserver(() => {
    if (!host.clientWidth) return;
    tint();
    if (timelines.onLook) return;
    show();
    timelines.onLook = (from, to) => {
      clearTimeout(later);
      later = setTimeout(() => save("view", [from, to]), REPORT_MS);
    };
  });
  sizes.observe(host);
  return () => {
    clearTimeout(later);
    themes.disconnect();
    sizes.disconnect();
    timelines.close();
    for (const [event, act] of Object.entries(changed)) model.off(event, act);
  };
};

export default { render };
