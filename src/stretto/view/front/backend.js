// Who answers the page's questions: Python in a worker, the studio's server, or answers written in the page.
// A question is an object with the name of what is asked in `ask`; web/answers.py lists them. Each way has
// `ask(question, {onPart, signal})`, which resolves to the last answer; longer work sends parts before it.

import { t } from "stretto/strings";

export class Refused extends Error {
  constructor({ message, field = "", hint = "" }) {
    super(message);
    Object.assign(this, { field, hint });
  }
}

// Collects the lines of a reply: takes each, and says the answer once it is there.
const collector = (onPart) => {
  let last = null;
  return ({ error, part, answer }) => {
    if (error) throw new Refused(error);
    if (part === undefined) return answer ?? last; // an answer of null is the last part
    last = part;
    onPart?.(part);
    return undefined;
  };
};

// Answers that a page carries: of the question that it was written for, and no other.
class Recorded {
  name = "recorded";
  constructor(answers) { this.answers = answers; }
  async start() { return Object.keys(this.answers); }
  async ask(question) {
    const answer = this.answers[question.ask];
    if (answer === undefined) throw new Refused({ message: `this page was written without ${question.ask}` });
    return answer;
  }
}

// Pyodide in a worker. The page carries answers to the first questions ({questions, answers}), so that there is a
// picture before Python has started. A page opened from a folder has only these: browsers start no worker from a file.
class InWorker {
  name = "worker";
  constructor(first) { Object.assign(this, { first, pending: new Map(), count: 0, progress: "Python", onProgress: () => {} }); }
  report(progress) { this.progress = progress; this.onProgress(progress); }
  async start(onProgress = this.onProgress) {
    this.onProgress = onProgress;
    this.ready ??= new Promise((resolve, reject) => {
      if (location.protocol === "file:") return reject(new Refused({
        message: t("This page was opened as a file, but browsers run Python only for pages from a server."),
        hint: t("Run `python -m http.server` in its folder and open http://localhost:8000, or run `stretto studio`."),
      }));
      this.worker = new Worker(new URL("worker.js", document.baseURI), { type: "module" });
      this.worker.onerror = (event) => reject(new Refused({ message: event.message || "the worker did not start" }));
      this.worker.onmessage = ({ data }) => {
        if (data.progress) this.report(data.progress);
        else if (data.started) { this.report(""); resolve(); }
        else if (data.failed) reject(new Refused({ message: data.failed }));
        else this.pending.get(data.id)?.(data.reply);
      };
      return undefined;
    });
    this.ready.catch(() => { /* the app shows it */ });
    onProgress(this.progress);
    return this.first.questions;
  }
  async ask(question, { onPart, signal } = {}) {
    const text = JSON.stringify(question), carried = this.first.answers[text];
    if (carried) return structuredClone(carried);
    await this.start();
    await this.ready;
    if (signal?.aborted) return null;
    const id = ++this.count;
    return new Promise((resolve, reject) => {
      signal?.addEventListener("abort", () => this.worker.postMessage({ cancel: id }));
      const collect = collector(onPart);
      this.pending.set(id, (text) => {
        try {
          const answer = collect(JSON.parse(text));
          if (answer === undefined) return;
          resolve(answer);
        } catch (error) { reject(error); }
        this.pending.delete(id);
      });
      this.worker.postMessage({ id, question: text });
    });
  }
}

// `stretto studio`: an answer is a stream of lines of JSON.
class Studio {
  name = "studio";
  async start() { return (await this.ask({ ask: "questions" })).questions; }
  async ask(question, { onPart, signal } = {}) {
    const reply = await fetch("ask", {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(question), signal,
    });
    if (!reply.ok) throw new Refused({ message: `the studio answered ${reply.status}: ${await reply.text()}` });
    const collect = collector(onPart), reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "", answer;
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return answer;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line) answer = collect(JSON.parse(line)) ?? answer;
    }
  }
}

export const backend = () => {
  const recorded = document.getElementById("answers");
  if (recorded) return new Recorded(JSON.parse(recorded.textContent));
  if (document.documentElement.dataset.backend === "studio") return new Studio();
  return new InWorker(JSON.parse(document.getElementById("first").textContent));
};
