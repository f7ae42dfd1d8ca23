// What lies under the pointer in the figures of a plan: the nearest candidate, or a part of a bar.
{
  const facts = JSON.parse(document.getElementById("candidates").textContent);
  const tell = (title, rows, x, y) => {
    choose(null, null);
    const list = make("dl");
    for (const [term, text] of rows)
      list.append(make("dt", { textContent: term }), make("dd", { textContent: text }));
    tip.replaceChildren(make("b", { textContent: title }), list);
    tip.hidden = false;
    place(x, y);
  };
  const scatter = document.getElementById("scatter");
  const spot = (event) => {
    const box = scatter.getBoundingClientRect(), scale = scatter.viewBox.baseVal.width / box.width;
    return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
  };
  const nearest = (x, y) => {
    let best = null;
    facts.x.forEach((at, i) => {
      const far = Math.hypot(at - x, facts.y[i] - y);
      if (far < 14 && (!best || far < best.far)) best = { i, far };
    });
    return best && best.i;
  };
  const say = (i) => [
    ["step", facts.seconds[i]], ["memory", facts.memory[i]], ["", facts.verdict[i]],
    ...(facts.front[i] ? [["", "none is faster with less memory"]] : []),
  ];
  scatter?.addEventListener("pointermove", (event) => {
    const i = nearest(...spot(event));
    if (i === null) { tip.hidden = true; return; }
    tell(facts.layout[i], say(i), event.clientX, event.clientY);
  });
  for (const figure of document.querySelectorAll(".figure")) {
    figure.addEventListener("pointerleave", () => { tip.hidden = true; });
    if (figure.contains(scatter)) continue;
    figure.addEventListener("pointermove", (event) => {
      const part = event.target.closest("[data-name]");
      if (!part) { tip.hidden = true; return; }
      const { name, of, value, share } = part.dataset;
      tell(name, [["of", of], ["", value], ["", share]].filter(([, text]) => text), event.clientX, event.clientY);
    });
  }
}
