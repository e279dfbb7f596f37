"use strict";
const value = (cell) => { const number = parseFloat(cell.textContent); return Number.isNaN(number) ? null : number; };

function sort(header) {
  const table = header.closest("table"), body = table.tBodies[0], column = header.cellIndex;
  const down = header.getAttribute("aria-sort") === "ascending";
  const compare = (a, b) => {
    const [x, y] = [value(a.cells[column]), value(b.cells[column])];
    if (x !== null && y !== null && x !== y) return x - y;
    if ((x === null) !== (y === null)) return x === null ? 1 : -1;
    return a.cells[column].textContent.localeCompare(b.cells[column].textContent);
  };
  const rows = [...body.rows].sort(compare);
  if (down) rows.reverse();
  body.append(...rows);
  for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", down ? "descending" : "ascending");
}

document.querySelectorAll("th").forEach((header) => {
  header.addEventListener("click", () => sort(header));
  header.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(header); });
});

document.querySelectorAll("input[type=search]").forEach((input) => {
  const rows = [...input.closest("section").querySelectorAll("tbody tr")];
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const cells = [...row.cells].map((cell) => cell.textContent.toLowerCase()).join("\t");
      row.hidden = !words.every((word) => cells.includes(word));
    }
  });
});

document.querySelectorAll(".legend button").forEach((button) => {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    const series = button.closest("figure").querySelector(`svg [data-series="${button.dataset.series}"]`);
    if (series) series.toggleAttribute("hidden", !shown);
  });
});

const tip = document.getElementById("tip");
function show(event) {
  const mark = event.target.closest ? event.target.closest("[data-tip]") : null;
  tip.hidden = !mark;
  if (!mark) return;
  tip.textContent = mark.dataset.tip;
  const box = mark.getBoundingClientRect();
  const x = event.clientX || box.right, y = event.clientY || box.top;
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${Math.max(4, y - tip.offsetHeight - 10)}px`;
}
for (const kind of ["pointermove", "pointerdown", "focusin"]) document.addEventListener(kind, show);

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
