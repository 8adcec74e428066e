"use strict";
// A response as it is read: what it is, why it was judged so, its text.

/** The reason of a verdict, in a sentence. */
function reasonOf(row, gold) {
  const read = row.answer ? `read ${row.answer}` : "read nothing";
  const wanted = gold === null || gold === undefined ? "" : `, expected answer: ${gold}`;
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

const PROBABILITIES = [0.9, 0.5, 0.25, 0.1, 0.01]; // what each colour but the last begins at

/** The text by tokens, coloured by how probable each was; null where that was not saved. */
function tokensOf(row) {
  const [logs, lengths] = [row.log_probs, row.piece_lengths];
  if (!logs || logs.length !== lengths.length) return null;
  const signs = Array.from(row.text ?? ""); // lengths count whole characters
  let at = 0;
  const tokens = logs.map((log, n) => {
    const piece = signs.slice(at, at += lengths[n]).join("");
    if (!piece || !Number.isFinite(log)) return piece;
    const share = Math.exp(log);
    const place = PROBABILITIES.findIndex((least) => share >= least);
    return h("span", { class: `p${place < 0 ? PROBABILITIES.length : place}`, title: `probability ${percent(share)}` }, piece);
  });
  return [...tokens, signs.slice(at).join("")];
}

function probabilityLegend() {
  const whole = (share) => `${Math.round(100 * share)} %`;
  const names = PROBABILITIES.map((least, n) => (n ? `${whole(least)} to ${whole(PROBABILITIES[n - 1])}` : `above ${whole(least)}`));
  return h("div", { class: "probabilities" }, "probability of each token when it was sampled: ",
    [...names, `below ${whole(last(PROBABILITIES))}`].map((name, n) => h("span", { class: `p${n}` }, name)));
}

/** One response; head: its heading. */
function responseCard(row, run, head, search = "") {
  const [problem, gold] = run.rollouts.problems[row.problem_id] ?? [null, null];
  const facts = [
    ["verdict", [h("span", { class: `verdict ${row.outcome}` }, row.outcome.replaceAll("_", " ")), `: ${reasonOf(row, gold)}`]],
    ["length", `${shown(row.num_tokens)} tokens, ${row.finish_reason === "stop" ? "ended by itself" : "cut off"}`],
  ];
  if (row.reward !== null) facts.push(["reward", `${shown(row.reward)}, advantage ${shown(row.advantage)}`]);
  const tokens = search ? null : tokensOf(row); // what is searched for is marked instead
  return h("article", {}, h("h3", {}, head),
    h("dl", {}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]).flat()),
    problem ? h("details", { open: true }, h("summary", {}, "problem"), h("pre", {}, marked(problem, search))) : null,
    tokens ? probabilityLegend() : null,
    h("pre", { class: "response" }, tokens ?? marked(row.text ?? "", search)));
}
