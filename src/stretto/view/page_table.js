// Tables sort by a click on a column's name: numbers by value, others as text; a second click turns the order.
const UNITS = { us: 1e-6, ms: 1e-3, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30 };
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  if (body.rows.length < 2) continue;
  const text = (row, at) => row.cells[at].textContent.trim();
  const value = (row, at) => {
    const [number, unit] = text(row, at).replaceAll(",", "").split(" ");
    return parseFloat(number) * (UNITS[unit] ?? 1);
  };
  const sort = (at, down) => {
    const rows = [...body.rows];
    const numbers = rows.every((row) => !text(row, at) || !Number.isNaN(value(row, at)));
    const compare = numbers
      ? (a, b) => (text(a, at) ? value(a, at) : Infinity) - (text(b, at) ? value(b, at) : Infinity)
      : (a, b) => text(a, at).localeCompare(text(b, at), "en", { numeric: true });
    rows.sort((a, b) => (down ? -1 : 1) * compare(a, b));
    body.append(...rows);
    for (const head of heads) head.removeAttribute("aria-sort");
    heads[at].setAttribute("aria-sort", down ? "descending" : "ascending");
  };
  heads.forEach((head, at) => {
    const button = Object.assign(document.createElement("button"), {
      type: "button", className: "sort", textContent: head.textContent || "#",
    });
    button.addEventListener("click", () => sort(at, head.getAttribute("aria-sort") === "ascending"));
    head.replaceChildren(button);
  });
}
