"use strict";
// The tabs of the summary and of the settings.

function summaryTab() {
  const rows = page.runs.map((run) => {
    const { metrics, evals } = run;
    const ends = (key) => [evals[key]?.[0] ?? null, evals[key] && evals[key].length > 1 ? last(evals[key]) : null];
    const [accuracy, accuracyNow] = ends("eval_accuracy");
    const [tokens, tokensNow] = ends("eval_mean_response_tokens");
    const change = tokens && tokensNow !== null ? tokensNow / tokens - 1 : null;
    return [run.name, run.state, last(metrics.step), [accuracy, percent(accuracy)], [accuracyNow, percent(accuracyNow)],
      tokens, tokensNow, [change, percent(change)], [last(metrics.accept_rate), percent(last(metrics.accept_rate))],
      run.num_steps ? run.seconds / run.num_steps : null, run.seconds ? run.seconds / 60 : null];
  });
  const headings = ["run", "state", "steps", "accuracy before", "after", "tokens before", "after", "change", "accepted, last step",
    "seconds a step", "minutes"];
  const facts = page.runs.map((run) => [h("h3", {}, run.name),
    h("dl", {}, h("dt", {}, "directory"), h("dd", {}, run.directory),
      run.facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]).flat())]);
  return {
    name: "Summary",
    element: h("div", {},
      page.runs.length ? [h("h2", {}, "Runs, on their held-out problems"), sortableTable(headings, rows, "runs"), h("h2", {}, "About them"), facts.flat()] : null,
      evaluationBlocks().filter((block) => block.startsWith("overall")).map((block) => [h("h2", {}, `Evaluations, ${block}`), evaluationTable(block)]),
      h("p", { class: "faint" }, `Made ${page.made}.`)),
  };
}

function settingsTab() {
  if (!page.runs.some((run) => Object.keys(run.settings).length)) return null;
  const text = (value) => (value === undefined ? "(not set)" : value === null ? "null" : String(value));
  const table = (keys, caption) => sortableTable(["setting", ...page.runs.map((run) => run.name)],
    keys.map((key) => [key, ...page.runs.map((run) => text(run.settings[key]))]), caption);
  const all = [...new Set(page.runs.flatMap((run) => Object.keys(run.settings)))];
  const several = page.runs.length > 1;
  const whole = h("details", { open: !several }, h("summary", {}, "All settings"), table(all, "all settings"));
  return {
    name: "Settings",
    element: h("div", {},
      several ? h("h2", {}, "Settings that differ") : null,
      several ? (page.settings.length ? table(page.settings, "settings that differ") : h("p", {}, "None.")) : null,
      whole),
  };
}
