"use strict";
// The tab of curves: a quantity a plot, a run a colour.

const QUANTITIES = [
  { title: "Mean response tokens", train: "mean_response_tokens", held: "eval_mean_response_tokens", fromZero: true },
  { title: "Accuracy", train: "accuracy", held: "eval_accuracy", show: percent, ends: [0, 1] },
  { title: "Acceptance", train: "accept_rate", show: percent, ends: [0, 1] },
  { title: "Cut off at the limit", train: "truncated_share", show: percent, ends: [0, 1] },
  { title: "Loss", train: "loss" },
  { title: "Gradient norm", train: "grad_norm", fromZero: true },
  { title: "Mean reward", train: "reward_mean" },
  { title: "Learning rate", train: "lr", fromZero: true },
  { title: "Log-prob difference, engine against trainer: mean", train: "logprob_diff_mean", fromZero: true },
  { title: "Log-prob difference: largest", train: "logprob_diff_max", fromZero: true },
  { title: "Divergence from the reference model", train: "kl_mean" },
  { title: "Trained tokens", train: "trained_tokens", fromZero: true },
];

function curvesTab() {
  const zoom = new Zoom();
  const plots = [...[...QUANTITIES, ...moreSets()].map((one) => quantityPlot(zoom, one)), ...page.runs.map((run) => phasePlot(zoom, run))];
  const found = plots.filter((plot) => plot !== null);
  if (!found.length) return null;
  return {
    name: "Curves",
    element: h("div", {}, page.runs.filter(isThinned).map((run) => h("p", { class: "faint" }, `${run.name}: ${stepsShown(run)} steps are shown.`)),
      zoom.buttons(), h("div", { class: "plots" }, found.map((plot) => plot.element)), stepTables()),
    show: () => zoom.draw(),
  };
}

function isThinned(run) {
  return run.metrics.step && run.metrics.step.length < run.num_steps;
}

function stepsShown(run) {
  return `${shown(run.metrics.step.length)} of ${shown(run.num_steps)}`;
}

/** Quantities of the sets that runs are evaluated on besides the held-out problems. */
function moreSets() {
  const keys = page.runs.flatMap((run) => Object.keys(run.evals));
  const names = new Set(keys.map((key) => /^eval_(.+)_accuracy$/.exec(key)?.[1]).filter((name) => name));
  return [...names].flatMap((name) => [
    { title: `Mean response tokens on ${name}`, held: `eval_${name}_mean_response_tokens`, fromZero: true },
    { title: `Accuracy on ${name}`, held: `eval_${name}_accuracy`, show: percent, ends: [0, 1] },
  ]);
}

function quantityPlot(zoom, { title, train, held, ...rest }) {
  const many = page.runs.length > 1;
  const series = page.runs.flatMap((run, place) => {
    const found = [];
    if (train && run.metrics[train]) {
      found.push({ label: many ? run.name : held ? "training rollouts" : "", place, xs: run.metrics.step, ys: run.metrics[train] });
    }
    if (held && run.evals[held]) {
      const label = many ? `${run.name}, held-out` : "held-out problems";
      found.push({ label, place, kind: "held", xs: run.evals.step, ys: run.evals[held] });
    }
    return found;
  });
  return series.length ? new Plot(zoom, { title, series, ...rest }) : null;
}

/** Seconds of the parts of a step. */
function phasePlot(zoom, run) {
  const keys = Object.keys(run.metrics).filter((key) => key.endsWith("_seconds"));
  if (!keys.length) return null;
  const series = keys.map((key, place) => ({
    label: key.replace("_seconds", "").replaceAll("_", " "), place, xs: run.metrics.step, ys: run.metrics[key],
  }));
  const title = page.runs.length > 1 ? `Seconds by phase: ${run.name}` : "Seconds by phase";
  return new Plot(zoom, { title, series, fromZero: true });
}

/** Every number of every step, folded away. */
function stepTables() {
  return page.runs.filter((run) => run.metrics.step).map((run) => {
    const holder = h("details", {}, h("summary", {}, isThinned(run) ? `Numbers of ${run.name} at ${stepsShown(run)} steps` : `All numbers of ${run.name}, step by step`));
    holder.addEventListener("toggle", () => {
      if (holder.children.length > 1) return;
      const keys = Object.keys(run.metrics);
      const rows = run.metrics.step.map((_, n) => keys.map((key) => run.metrics[key][n]));
      holder.append(sortableTable(keys, rows, `steps of ${run.name}`));
    });
    return holder;
  });
}
