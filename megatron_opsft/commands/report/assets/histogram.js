"use strict";

/**
 * Lengths of responses, correct ones in one colour; a click on a bin, or Enter, calls choose(from, to).
 * rows: responses; chosen: [from, to] or null.
 */
function histogram(rows, width, chosen, choose) {
  const most = rows.reduce((high, row) => Math.max(high, row.num_tokens), 1);
  const bins = Math.min(width < 500 ? 12 : 24, most);
  const size = Math.ceil((most + 1) / bins);
  const counts = Array.from({ length: Math.ceil((most + 1) / size) }, () => [0, 0]);
  for (const row of rows) counts[Math.floor(row.num_tokens / size)][row.outcome === "correct" ? 0 : 1] += 1;
  const top = counts.reduce((high, [good, bad]) => Math.max(high, good + bad), 1);
  const [height, base] = [110, 92];
  const wide = width / counts.length;
  const groups = counts.map(([good, bad], n) => {
    const [from, to] = [n * size, (n + 1) * size - 1];
    const tall = (count) => (count / top) * (base - 6);
    const act = () => choose(from, to);
    const isOn = chosen !== null && chosen[0] === from && chosen[1] === to;
    return svg("g", { class: `bin ${isOn ? "on" : ""}`, tabindex: 0, role: "button", onclick: act, "aria-pressed": String(isOn),
      "aria-label": `${from} to ${to} tokens: ${good} correct, ${bad} not`,
      onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); } } },
    svg("title", {}, `${from} to ${to} tokens: ${good} correct, ${bad} not`),
    svg("rect", { class: "bar good", x: n * wide + 1, width: Math.max(1, wide - 2), y: base - tall(good), height: tall(good) }),
    svg("rect", { class: "bar bad", x: n * wide + 1, width: Math.max(1, wide - 2), y: base - tall(good) - tall(bad), height: tall(bad) }),
    svg("rect", { class: "hit", x: n * wide, width: wide, y: 0, height: base }));
  });
  const labels = counts.map((_, n) => n).filter((n) => n % Math.ceil(counts.length / 6) === 0).map((n) =>
    svg("text", { x: n * wide, y: height - 3 }, shown(n * size)));
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": "lengths in tokens" }, groups, labels);
}
