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

/** Name of a part of a response -> its legend; the template has the same list. */
const PARTS = {
  thinking: "thinking",
  right: "first right answer",
  after: "thinking after it",
  answer: "answer",
};

/** The text in its parts, each in its colour; null if they are not known. */
function partsOf(row, search) {
  if (!row.parts) return null;
  const characters = Array.from(row.text ?? ""); // lengths count whole characters
  let at = 0;
  return row.parts.map(([name, length]) => {
    const piece = characters.slice(at, at + length).join("");
    at += length;
    return h("span", { class: `part-${name}`, title: PARTS[name] }, marked(piece, search));
  });
}

function partsLegend() {
  const names = Object.entries(PARTS);
  return h(
    "p",
    { class: "text-parts faint" },
    names.map(([name, text]) => [h("span", { class: `part-${name}` }, text), " "]),
  );
}

/** Where the tokens went, in a sentence. */
function useOf({ token_use: use, num_tokens: count }) {
  const texts = [`${shown(use.num_thinking)} of thinking`];
  texts.push(`${shown(count - use.num_thinking)} of answer`);
  if (isPresent(use.first_right)) {
    texts.push(`first right after ${shown(use.first_right)}`);
    texts.push(`stated again ${shown(use.num_restated)} times`);
  }
  if (use.num_doubts) texts.push(`${shown(use.num_doubts)} turns of self-doubt`);
  return texts.join(", ");
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

/** The key of a row's problem: two benchmarks may have equal ids. */
function problemKey(row) {
  return typeof row.step === "number" ? row.problem_id : `${row.step}/${row.problem_id}`;
}

/** Text and gold answer of a row's problem; null for what is not known. */
function problemOf(row, run) {
  return run.rollouts.problems[problemKey(row)] ?? [null, null];
}

/** The text of a row's problem and its gold answer, once above all responses to it. */
function problemBox(row, run, search) {
  const [problem, gold] = problemOf(row, run);
  if (!problem) return "";
  return h(
    "details",
    { open: true },
    h("summary", {}, "problem"),
    h("pre", { class: "problem" }, marked(problem, search)),
    isPresent(gold) ? h("p", { class: "problem faint" }, `gold answer: ${gold}`) : null,
  );
}

/** Whether the responses are an evaluation's: their step is a benchmark. */
function isEvaluation(run) {
  return typeof run.responses[0].step !== "number";
}

/** Step or benchmark, problem and number. */
function placeOf(row) {
  const step = typeof row.step === "number" ? `step ${row.step}` : row.step;
  return `${step}, ${row.problem_id} #${row.sample_index}`;
}

/**
 * A response as an article. head: its heading; search: what is marked in it, in lower case;
 * byProbability: whether tokens are coloured by their probability where its parts could be.
 */
function responseCard(row, run, head, search, byProbability) {
  const [, gold] = problemOf(row, run);
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
  if (row.token_use) facts.push(["tokens", useOf(row)]);
  // Matches, parts or tokens: one of them is coloured.
  const tokens = search || (row.parts && !byProbability) ? null : tokensOf(row);
  return h(
    "article",
    {},
    h("h3", {}, head),
    h("dl", {}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    tokens ? probabilityLegend() : row.parts ? partsLegend() : null,
    h(
      "pre",
      { class: "response" },
      tokens ?? partsOf(row, search) ?? marked(row.text ?? "", search),
    ),
  );
}
