"use strict";
// A response as it is read: what it is, why it was judged so, its text.

/** The reason of a verdict, in a sentence. */
function reasonOf(row, gold) {
  const read = row.answer ? `read ${row.answer}` : "read nothing";
  const wanted = gold === null || gold === undefined ? "" : `, to be found was ${gold}`;
  return {
    correct: `${read}${wanted}`,
    wrong: `${read}${wanted}`,
    no_answer: `it ended by itself, but no answer could be read${wanted}`,
    unfinished: `cut off after ${shown(row.num_tokens)} tokens and not judged${wanted}`,
    timeout: `judging took too long; ${read}${wanted}`,
    error: `judging failed; ${read}${wanted}`,
  }[row.outcome] ?? `${row.outcome}; ${read}${wanted}`;
}

/** Text in which what was searched for is marked. */
function marked(text, search) {
  if (!search) return [text];
  const parts = [];
  const lower = text.toLowerCase();
  // Where lower case has another length, places would not fit: then nothing is marked.
  if (lower.length !== text.length) return [text];
  let from = 0;
  for (let at = lower.indexOf(search); at >= 0; at = lower.indexOf(search, from)) {
    parts.push(text.slice(from, at), h("mark", {}, text.slice(at, at + search.length)));
    from = at + search.length;
  }
  return [...parts, text.slice(from)];
}

/** One response; head: its heading. */
function responseCard(row, run, head, search = "") {
  const [problem, gold] = run.rollouts.problems[row.problem_id] ?? [null, null];
  const facts = [
    ["verdict", [h("span", { class: `verdict ${row.outcome}` }, row.outcome.replaceAll("_", " ")), `: ${reasonOf(row, gold)}`]],
    ["length", `${shown(row.num_tokens)} tokens, ${row.finish_reason === "stop" ? "ended by itself" : "cut off"}`],
  ];
  if (row.reward !== null) facts.push(["reward", `${shown(row.reward)}, advantage ${shown(row.advantage)}`]);
  return h("article", {}, h("h3", {}, head),
    h("dl", {}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]).flat()),
    problem ? h("details", { open: true }, h("summary", {}, "problem"), h("pre", {}, marked(problem, search))) : null,
    h("pre", { class: "response" }, marked(row.text ?? "", search)));
}
