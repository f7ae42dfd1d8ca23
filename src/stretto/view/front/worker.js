// Python in the page: Pyodide runs the parts of Stretto that need no torch, and answers the page's questions.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const cancelled = new Set();
const start = async () => {
  const python = await loadPyodide({ indexURL: new URL("./pyodide/", self.location).href });
  postMessage({ progress: "Stretto" });
  const archive = await (await fetch("stretto.zip")).arrayBuffer();
  python.unpackArchive(archive, "zip", { extractDir: "/stretto" });
  python.runPython("import sys; sys.path.insert(0, '/stretto')");
  const answers = python.pyimport("stretto.web.answers");
  postMessage({ started: true });
  return answers;
};
const answers = start().catch((error) => { postMessage({ failed: String(error) }); throw error; });
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

// Imports what other views will ask for, a module at a time, while nothing is asked.
let asked = 0;
const importRest = async () => {
  const python = await answers;
  for (const module of python.MODULES.toJs()) {
    for (let before = -1; before !== asked; await pause(500)) before = asked;
    python.import_module(module).destroy();
  }
};
importRest().catch(() => { /* a question says it */ });

self.onmessage = async ({ data: { id, question, cancel } }) => {
  if (cancel) { cancelled.add(cancel); return; }
  asked += 1;
  const python = await answers;
  await pause(); // lets in what came meanwhile: a slider's earlier questions are cancelled before they begin
  if (cancelled.delete(id)) return;
  const replies = python.reply_lines(question);
  for (const line of replies) {
    postMessage({ id, reply: line });
    await pause(); // lets a cancellation in
    if (cancelled.delete(id)) break;
  }
  replies.destroy();
};
