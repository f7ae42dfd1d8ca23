// The state of the page is in its address: #view?name=value&..., so that whatever is shown can be sent.
// Long texts, such as a program of one's own, are deflated and written in base64url after a "~".

const bytesToText = (bytes) => btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
const textToBytes = (text) => Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (c) => c.charCodeAt(0));
const through = async (bytes, stream) =>
  new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());

const LONG = 120; // characters
const pack = async (text) => {
  if (text.length < LONG && !text.startsWith("~")) return text;
  const bytes = await through(new TextEncoder().encode(text), new CompressionStream("deflate-raw"));
  let packed = "";
  for (let at = 0; at < bytes.length; at += 3 * 4096) packed += bytesToText(bytes.subarray(at, at + 3 * 4096));
  return `~${packed}`;
};
const unpack = async (text) => {
  if (!text.startsWith("~")) return text;
  return new TextDecoder().decode(await through(textToBytes(text.slice(1)), new DecompressionStream("deflate-raw")));
};

// The view and the state of an address, with the types of the view's defaults.
export const readAddress = async (hash, defaultsOf) => {
  const [view, query = ""] = hash.replace(/^#/, "").split("?");
  const defaults = defaultsOf(view), state = { ...defaults };
  for (const [name, packed] of new URLSearchParams(query)) {
    if (!(name in defaults)) continue;
    const text = await unpack(packed).catch(() => ""), example = defaults[name];
    if (typeof example === "number") state[name] = Number.isFinite(+text) && text !== "" ? +text : example;
    else if (typeof example === "boolean") state[name] = text === "1";
    else if (typeof example === "string") state[name] = text;
    else try { state[name] = JSON.parse(text); } catch { /* the default stays */ }
  }
  return { view, state };
};

export const writeAddress = async (view, state, defaults) => {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    const example = defaults[name];
    if (example === undefined || JSON.stringify(value) === JSON.stringify(example)) continue;
    const text = typeof value === "boolean" ? (value ? "1" : "0") : typeof value === "object" ? JSON.stringify(value) : String(value);
    query.set(name, await pack(text));
  }
  return `#${view}${query.size ? `?${query}` : ""}`;
};
