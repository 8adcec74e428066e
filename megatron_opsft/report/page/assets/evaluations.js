"use strict";
// The tab of evaluations: a table a benchmark, accuracy against length, budget curves.

const METRICS = [["accuracy", "Acc", percent], ["pass_at_n", "P@N", percent], ["mean_tokens", "Tok", shown],
  ["compression_ratio", "CR", percent], ["efficiency", "Eff", shown], ["norm_std", "NormStd", shown],
  ["truncated_share", "cut off", percent], ["no_answer_share", "no answer", percent]];

function evaluationTable(block) {
  const found = page.evaluations.filter((one) => one.blocks[block]);
  const used = METRICS.filter(([key]) => found.some((one) => one.blocks[block].metrics[key]));
  const cell = (estimate, show) => {
    if (!estimate) return [null, "–"];
    const [value, low, high] = estimate;
    return [value, low === null ? show(value) : `${show(value)} [${show(low)}, ${show(high)}]`];
  };
  return h("div", {}, sortableTable(["model", ...used.map(([, heading]) => heading)],
    found.map((one) => [one.name, ...used.map(([key, , show]) => cell(one.blocks[block].metrics[key], show))]), block),
    found.filter((one) => one.baseline).map((one) => h("p", { class: "faint" }, `CR of ${one.name}: to the tokens of ${one.baseline}.`)));
}

function evaluationBlocks() {
  return [...new Set(page.evaluations.flatMap((one) => Object.keys(one.blocks)))];
}

function evaluationsTab() {
  if (!page.evaluations.length) return null;
  const blocks = evaluationBlocks();
  const zooms = [];
  const parts = blocks.map((block) => {
    const sizes = page.evaluations.map((one) => one.blocks[block]).filter((one) => one?.num_problems)
      .map((one) => `${one.num_problems} problems, ${one.samples_per_problem} samples each`);
    const scatter = new Zoom();
    const budgets = new Zoom();
    zooms.push(scatter, budgets);
    const plots = [scatterPlot(scatter, block), ...budgetPlots(budgets, block)];
    return [h("h2", {}, block), sizes.length ? h("p", { class: "faint" }, [...new Set(sizes)].join(" / ")) : null,
      evaluationTable(block), scatter.buttons(), h("div", { class: "plots" }, plots.map((plot) => plot.element))];
  });
  return {
    name: "Evaluations",
    element: h("div", {}, h("p", { class: "faint" }, "In brackets: intervals by bootstrap over problems."), parts.flat()),
    show: () => zooms.forEach((zoom) => zoom.draw()),
  };
}

function scatterPlot(zoom, block) {
  const found = page.evaluations.map((one, place) => ({ one, place })).filter(({ one }) => one.blocks[block]);
  const series = found.map(({ one, place }) => {
    const [tokens, accuracy] = ["mean_tokens", "accuracy"].map((key) => one.blocks[block].metrics[key]);
    return { label: one.name, place, kind: "points", xs: [tokens[0]], ys: [accuracy[0]],
      low: [accuracy[1]], high: [accuracy[2]], lowX: [tokens[1] ?? tokens[0]], highX: [tokens[2] ?? tokens[0]] };
  });
  const points = series.map(({ xs, ys }) => [xs[0], ys[0]]);
  const best = points.filter(([x, y]) => !points.some(([a, b]) => a <= x && b >= y && (a !== x || b !== y)))
    .sort(([a], [b]) => a - b);
  if (points.length > 1) {
    best.push([Math.max(...points.map(([x]) => x)), last(best)[1]]);
    series.push({ label: "", place: 6, kind: "front", xs: best.map(([x]) => x), ys: best.map(([, y]) => y) });
  }
  return new Plot(zoom, { title: `Accuracy against mean response tokens${points.length > 1 ? ", with the Pareto front" : ""}`, x: "tokens", series, show: percent, ends: [0, 1] });
}

function budgetPlots(zoom, block) {
  const found = page.evaluations.map((one, place) => ({ one, place })).filter(({ one }) => one.blocks[block]?.budgets.length);
  const measured = (key) => found.some(({ one }) => one.blocks[block].budgets.some(([, metrics]) => metrics[key]));
  return METRICS.filter(([key]) => ["accuracy", "mean_tokens", "norm_std"].includes(key) && measured(key)).map(([key, heading, show]) => {
    const series = found.map(({ one, place }) => {
      const points = one.blocks[block].budgets;
      const values = points.map(([, metrics]) => metrics[key] ?? [null, null, null]);
      return { label: one.name, place, xs: points.map(([budget]) => budget),
        ys: values.map(([value]) => value), low: values.map(([, low]) => low), high: values.map(([, , high]) => high) };
    });
    return new Plot(zoom, { title: `${heading} at a token budget`, x: "budget (log scale)", series, show, logX: true, fromZero: true });
  });
}
