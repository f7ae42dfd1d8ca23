// Programs as files, out and in: CSV, JSON, pictures, Megatron-LM's layout, the config that trains one.
import { useState } from "preact/hooks";
import { Button, Choice, Drop, NumberField, Problem, copy, html, save } from "stretto/controls";
import { t } from "stretto/strings";

const FORMATS = [
  ["csv", "CSV of torch"], ["json", "JSON"], ["config", "Config that trains it"], ["megatron", "Layout of Megatron-LM"],
  ["svg", "SVG"], ["png", "PNG"],
];
const WIDEST = 8000; // px of a PNG

// A picture of Python's as pixels, twice as many as it has.
const pixels = async (svg) => {
  const address = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" })), image = new Image();
  image.src = address;
  await image.decode();
  URL.revokeObjectURL(address);
  const scale = Math.min(2, WIDEST / image.width), canvas = document.createElement("canvas");
  Object.assign(canvas, { width: image.width * scale, height: image.height * scale });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });
};

export const Files = ({ ask, programs, describe, costs, panels, layers, onLayers, onProgram }) => {
  const [at, setAt] = useState(0), [problem, setProblem] = useState(null), [said, say] = useState("");
  const shown = Math.min(at, programs.length - 1);
  const attempt = async (act) => {
    setProblem(null);
    say("");
    try { await act(); } catch (error) { setProblem(error); }
  };
  const write = (format) => attempt(async () => {
    const picture = format === "svg" || format === "png", chosen = picture ? programs : [programs[shown]];
    const { files } = await ask({
      ask: "program file", format: format === "png" ? "svg" : format, layers, costs, programs: chosen.map(describe),
    });
    for (const { name, type, text } of files) {
      if (format === "png") save(name.replace(/svg$/, "png"), await pixels(text));
      else save(name, text, type);
    }
    say(t("written: {names}", { names: files.map(({ name }) => (format === "png" ? name.replace(/svg$/, "png") : name)).join(", ") }));
  });
  const read = (name, text) => attempt(async () => {
    const program = { name: name.replace(/\.[^.]*$/, ""), text };
    await ask({ ask: "edit", program, costs: {} }); // refused here, if it is no program
    onProgram(program);
  });
  return html`<section aria-label=${t("Files")}><h2>${t("Files")}</h2>
    <div class="fields">
      ${programs.length > 1 && html`<${Choice} name="file-program" label="Schedule" value=${String(shown)} onChange=${(to) => setAt(+to)}
        choices=${programs.map((program, n) => [String(n), panels?.[n]?.title ?? program.name])} />`}
      <${NumberField} name="layers" label="Layers of the model" value=${layers} least=${1} most=${10000} onChange=${onLayers} />
      ${FORMATS.map(([format, label]) => html`<${Button} key=${format} onClick=${() => write(format)}>${t(label)}<//>`)}
      <${Button} onClick=${() => attempt(() => copy(location.href, say))}>${t("Copy the link")}<//>
    </div>
    <${Problem} error=${problem} />
    <p role="status" class="quiet">${said}</p>
    <${Drop} label="Drop a program here, CSV or JSON" accept=".csv,.json" onFile=${read} />
  </section>`;
};
