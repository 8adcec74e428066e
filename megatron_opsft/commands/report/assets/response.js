"use strict";
// A response: its text, what it is, and why it was judged so.

/** The reason of a verdict, in a sentence. */
function reasonOf(row, gold) {
  const read = row.answer ? `read ${row.answer}` : "read nothing";
  const expected = gold === null || gold === undefined ? "" : `, expected answer: ${gold}`;
  const reasons = {
    correct: `${read}${expected}`,
    wrong: `${read}${expected}`,
    no_answer: `it ended by itself, but no answer could be read${expected}`,
    unfinished: `cut off after ${shown(row.num_tokens)} tokens and not judged${expected}`,
    timeout: `judging took too long; ${read}${expected}`,
    error: `judging failed; ${read}${expected}`,
  };
  return reasons[row.outcome] ?? `${row.outcome}; ${read}${expected}`;
}

/** The text as a list of nodes, in which every match of the search is marked. */
function marked(text, search) {
  if (!search) return [text];
  const nodes = [];
  const lower = text.toLowerCase();
  // If lower case has another length, positions differ: then nothing is marked.
  if (lower.length !== text.length) return [text];
  let from = 0;
  for (let at = lower.indexOf(search); at >= 0; at = lower.indexOf(search, from)) {
    nodes.push(text.slice(from, at), h("mark", {}, text.slice(at, at + search.length)));
    from = at + search.length;
  }
  return [...nodes, text.slice(from)];
}

const PROBABILITIES = [0.9, 0.5, 0.25, 0.1, 0.01]; // lower ends of all colours but the last

/** The text by tokens, coloured by how probable each was; null if that was not saved. */
function tokensOf(row) {
  const [logs, lengths] = [row.log_probs, row.piece_lengths];
  if (!logs || logs.length !== lengths.length) return null;
  const characters = Array.from(row.text ?? ""); // lengths count whole characters
  let at = 0;
  const tokens = logs.map((log, n) => {
    const piece = characters.slice(at, at + lengths[n]).join("");
    at += lengths[n];
    if (!piece || !Number.isFinite(log)) return piece;
    const probability = Math.exp(log);
    const index = PROBABILITIES.findIndex((least) => probability >= least);
    const colour = index < 0 ? PROBABILITIES.length : index;
    const title = `probability ${percent(probability)}`;
    return h("span", { class: `p${colour}`, title }, piece);
  });
  return [...tokens, characters.slice(at).join("")];
}

function probabilityLegend() {
  const whole = (share) => `${Math.round(100 * share)} %`;
  const names = PROBABILITIES.map((least, n) =>
    n ? `${whole(least)} to ${whole(PROBABILITIES[n - 1])}` : `above ${whole(least)}`,
  );
  names.push(`below ${whole(last(PROBABILITIES))}`);
  return h(
    "div",
    { class: "probabilities" },
    "probability of each token when it was sampled: ",
    names.map((name, n) => h("span", { class: `p${n}` }, name)),
  );
}

/** A response as an article. head: its heading; search: what is marked in it, in lower case. */
function responseCard(row, run, head, search = "") {
  const [problem, gold] = run.rollouts.problems[row.problem_id] ?? [null, null];
  const verdict = h(
    "span",
    { class: `verdict ${row.outcome}` },
    row.outcome.replaceAll("_", " "),
  );
  const ending = row.finish_reason === "stop" ? "ended by itself" : "cut off";
  const facts = [
    ["verdict", [verdict, `: ${reasonOf(row, gold)}`]],
    ["length", `${shown(row.num_tokens)} tokens, ${ending}`],
  ];
  if (row.reward !== null) {
    facts.push(["reward", `${shown(row.reward)}, advantage ${shown(row.advantage)}`]);
  }
  const tokens = search ? null : tokensOf(row); // either matches or tokens are coloured
  return h(
    "article",
    {},
    h("h3", {}, head),
    h("dl", {}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    problem
      ? h(
          "details",
          { open: true },
          h("summary", {}, "problem"),
          h("pre", {}, marked(problem, search)),
        )
      : null,
    tokens ? probabilityLegend() : null,
    h("pre", { class: "response" }, tokens ?? marked(row.text ?? "", search)),
  );
}
