// Stacked bars: parts differ by colour and by pattern, so that they are told apart without colour.
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { html } from "stretto/markup";
import { t } from "stretto/strings";

// colour and pattern of each part; null is the hatching of idle time or memory beside tensors
export const STEP = {
  compute: ["#1e5a98", ""], recompute: ["#926ac5", "diagonal"], host: ["#fae23c", "grid"], tensor: ["#eba32c", ""],
  context: ["#268e88", "dots"], expert: ["#bed65a", "upright"], data: ["#8cdec8", "across"], optimiser: ["#784828", "grid"],
  offload: ["#f0aabe", "back"], other: ["#767676", "dots"], bubble: null,
};
export const MEMORY = {
  weights: ["#1e5a98", ""], masters: ["#6ea0d7", "diagonal"], gradients: ["#8cdec8", ""], optimizer: ["#268e88", "dots"],
  gathered: ["#bed65a", "upright"], open: ["#784828", "grid"], versions: ["#f0aabe", "back"], activations: ["#eba32c", ""],
  ends: ["#d6603e", "across"], messages: ["#926ac5", "diagonal"], transient: ["#fae23c", "upright"], batch: ["#767676", "dots"],
  "beside tensors": null,
};
const STROKES = {
  diagonal: "M-1 7L7 -1M-1 1L1 -1M5 7L7 5", back: "M-1 -1L7 7M-1 5L1 7M5 -1L7 1", across: "M0 3H6", upright: "M3 0V6",
  grid: "M0 3H6M3 0V6", dots: "M2.1 3a.9 .9 0 1 0 1.8 0a.9 .9 0 1 0 -1.8 0",
};

// black or white, whichever is easier to read on a colour (WCAG's relative luminance)
const inkOn = (colour) => {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
};

let drawings = 0;
const Patterns = ({ id, looks }) => html`<defs>
  <pattern id=${`${id}-idle`} width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
    <rect width="6" height="6" class="idle" /><path d="M0 0V6" class="hatch" /></pattern>
  ${Object.entries(looks).filter(([, look]) => look?.[1]).map(([name, [colour, pattern]]) => html`
    <pattern id=${`${id}-${name}`} width="6" height="6" patternUnits="userSpaceOnUse">
      <path d=${STROKES[pattern]} stroke=${inkOn(colour)} fill=${pattern === "dots" ? inkOn(colour) : "none"} stroke-opacity="0.5" /></pattern>`)}
</defs>`;

export const useWidth = () => {
  const ref = useRef(null), [width, setWidth] = useState(800);
  useLayoutEffect(() => {
    const measure = () => setWidth(Math.max(280, ref.current.clientWidth));
    const observer = new ResizeObserver(measure);
    observer.observe(ref.current);
    measure();
    return () => observer.disconnect();
  }, []);
  return [ref, width];
};

const ROW = 20, GAP = 24, LEFT = 26, LETTER = 6.9; // px; the last: the width of a letter, about
const MANY = 24; // bars above which they are low and unlabelled

// `bars`: {name, label, parts: {kind: value}, low, high, end}; the last is the text at the end of the bar.
// `limit`: {value, text}, drawn as a line; `unit` writes a value.
export const Bars = ({ bars, looks, label, unit, limit, marked, onBar }) => {
  const [ref, width] = useWidth(), [id] = useState(() => `bars-${++drawings}`);
  const many = bars.length > MANY, high = many ? 12 : ROW, pitch = many ? 16 : ROW + GAP;
  const narrow = width < 600, right = narrow ? 12 : 190;
  const total = ({ parts }) => Object.values(parts).reduce((sum, value) => sum + value, 0);
  const fullest = Math.max(1e-12, ...bars.map((bar) => Math.max(total(bar), bar.high ?? 0)));
  const longest = 1.02 * Math.max(fullest, limit ? Math.min(limit.value, 1.5 * fullest) : 0);
  const scale = (width - LEFT - right) / longest, height = bars.length * pitch + 14;
  const kinds = Object.keys(looks).filter((kind) => bars.some(({ parts }) => parts[kind] > 0));
  const fill = (kind) => (looks[kind] ? looks[kind][0] : `url(#${id}-idle)`);
  const drawn = bars.map((bar, at) => {
    const top = at * pitch + (many ? 4 : 20), sum = total(bar);
    let x = LEFT;
    const parts = kinds.filter((kind) => bar.parts[kind] > 0).map((kind) => {
      const value = bar.parts[kind], long = value * scale, from = x, look = looks[kind], name = t(kind);
      x += long;
      return html`<g><title>${`${name}: ${unit(value)}, ${(100 * value / sum).toFixed(1)}%`}</title>
        <rect data-part=${kind} x=${from} y=${top} width=${long} height=${high} fill=${fill(kind)} />
        ${look?.[1] && html`<rect x=${from} y=${top} width=${long} height=${high} fill=${`url(#${id}-${kind})`} />`}
        ${!many && long >= LETTER * name.length + 10 && html`<text x=${from + long / 2} y=${top + 14} text-anchor="middle"
          style=${`fill:${look ? inkOn(look[0]) : "var(--text)"};stroke:${look ? look[0] : "var(--idle)"}`} stroke-width="4" paint-order="stroke">${name}</text>`}
      </g>`;
    });
    const whisker = bar.high !== undefined && bar.high !== null && html`<path class="whisker" d=${`M${LEFT + bar.low * scale} ${top + high + 2}v6m0-3H${LEFT + bar.high * scale}m0-3v6M${LEFT + sum * scale} ${top + high + 2}v6`} />`;
    return html`<g class=${marked === at ? "marked" : ""} onClick=${onBar && (() => onBar(at))}>
      <text x=${LEFT - 6} y=${top + 0.7 * high} text-anchor="end" font-weight="600" font-size=${many ? 10 : 12}>${bar.name}</text>
      ${!many && html`<text class="quiet-text" x=${LEFT} y=${top - 5}>${narrow && bar.end ? `${bar.end} · ` : ""}${bar.label}</text>`}
      ${parts}${whisker}
      ${!narrow && bar.end && html`<text x=${width - right + 8} y=${top + 0.7 * high}>${bar.end}</text>`}</g>`;
  });
  const edge = limit && limit.value <= longest && LEFT + limit.value * scale;
  return html`<figure ref=${ref} class="bars"><svg width=${width} height=${height} role="img" aria-label=${t(label)}>
      <${Patterns} id=${id} looks=${looks} />${drawn}
      ${edge && html`<path class="limit" d=${`M${edge} 2V${height}`} /><text class="limit-text" x=${edge - 4} y="10" text-anchor="end">${limit.text}</text>`}
    </svg>
    <ul class="legend" aria-label=${t("Legend")}>${kinds.map((kind) => html`<li><svg width="14" height="14" aria-hidden="true">
      <rect width="14" height="14" fill=${fill(kind)} />${looks[kind]?.[1] && html`<rect width="14" height="14" fill=${`url(#${id}-${kind})`} />`}</svg>${t(kind)}</li>`)}</ul>
  </figure>`;
};
