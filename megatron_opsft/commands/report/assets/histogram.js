"use strict";

/**
 * Lengths of responses, correct ones in one colour. A click on a bin, or Enter, calls
 * choose(from, to). rows: responses; chosen: [from, to] or null.
 */
function histogram(rows, width, chosen, choose) {
  const longest = rows.reduce((high, row) => Math.max(high, row.num_tokens), 1);
  const bins = Math.min(width < 500 ? 12 : 24, longest);
  const size = Math.ceil((longest + 1) / bins);
  const counts = Array.from({ length: Math.ceil((longest + 1) / size) }, () => [0, 0]);
  for (const row of rows) {
    counts[Math.floor(row.num_tokens / size)][row.outcome === "correct" ? 0 : 1] += 1;
  }
  const top = counts.reduce((high, [good, bad]) => Math.max(high, good + bad), 1);
  const height = 110;
  const base = 92; // of the bars
  const binWidth = width / counts.length;
  const barHeight = (count) => (count / top) * (base - 6);
  const groups = counts.map(([good, bad], n) => {
    const from = n * size;
    const to = (n + 1) * size - 1;
    const isChosen = chosen !== null && chosen[0] === from && chosen[1] === to;
    const label = `${from} to ${to} tokens: ${good} correct, ${bad} not`;
    const x = n * binWidth + 1;
    const barWidth = Math.max(1, binWidth - 2);
    const goodHeight = barHeight(good);
    const badHeight = barHeight(bad);
    const attributes = {
      class: `bin ${isChosen ? "on" : ""}`,
      tabindex: 0,
      role: "button",
      onclick: () => choose(from, to),
      "aria-pressed": String(isChosen),
      "aria-label": label,
      onkeydown: (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          choose(from, to);
        }
      },
    };
    return svg(
      "g",
      attributes,
      svg("title", {}, label),
      svg("rect", {
        class: "bar good",
        x,
        width: barWidth,
        y: base - goodHeight,
        height: goodHeight,
      }),
      svg("rect", {
        class: "bar bad",
        x,
        width: barWidth,
        y: base - goodHeight - badHeight,
        height: badHeight,
      }),
      svg("rect", { class: "hit", x: n * binWidth, width: binWidth, y: 0, height: base }),
    );
  });
  const binsPerLabel = Math.ceil(counts.length / 6);
  const labels = [];
  for (let n = 0; n < counts.length; n += binsPerLabel) {
    labels.push(svg("text", { x: n * binWidth, y: height - 3 }, shown(n * size)));
  }
  const attributes = {
    viewBox: `0 0 ${width} ${height}`,
    height,
    role: "group",
    "aria-label": "lengths in tokens",
  };
  return svg("svg", attributes, groups, labels);
}
