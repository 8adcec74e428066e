"use strict";

/**
 * A table that sorts by a click on a heading, numbers before what has none.
 * headings: texts; rows: cells as [value to sort by, text to show] or a plain value.
 */
function sortableTable(headings, rows, caption = "") {
  const cells = rows.map((row) => row.map((cell) => (Array.isArray(cell) ? cell : [cell, shown(cell)])));
  const isText = headings.map((_, place) => cells.some((row) => typeof row[place][0] === "string"));
  const body = h("tbody");
  const heads = headings.map((heading, place) =>
    h("th", { scope: "col", class: isText[place] ? "text" : null },
      h("button", { type: "button", onclick: () => sortBy(place) }, heading)));
  const fill = () => body.replaceChildren(...cells.map((row) =>
    h("tr", {}, row.map(([, text], place) => h("td", { class: isText[place] ? "text" : null }, text)))));

  function sortBy(place) {
    const up = heads[place].getAttribute("aria-sort") !== "ascending";
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[place].setAttribute("aria-sort", up ? "ascending" : "descending");
    cells.sort(([...one], [...other]) => {
      const [a, b] = [one[place][0], other[place][0]];
      const missing = (value) => value === null || value === undefined;
      if (missing(a) || missing(b)) return missing(a) - missing(b);
      const order = typeof a === "number" && typeof b === "number"
        ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
      return up ? order : -order;
    });
    fill();
  }

  fill();
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption || "table" },
    h("table", {}, h("thead", {}, h("tr", {}, heads)), body));
}
