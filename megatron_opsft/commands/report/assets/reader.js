"use strict";
// The reader of responses: filters, a list, one response, its group, its problem before and after.

const PAGE = 100; // rows of the list at a time
const PLACEHOLDER = "search in texts and answers";
const MAX_PROBLEM_IDS = 2000; // that the filter suggests
const NARROW = 832; // pixels: there the response is below the list, as in page.css

class Reader {
  constructor(runs) {
    this.runs = runs;
    this.chosen = null;
    this.startView = runs.length > 1 && runs.every(isEvaluation) ? "pair" : "one";
    this.view = this.startView;
    this.byProbability = false;
    this.limit = PAGE;
    this.searchTimer = null;
    this.makeFilters();
    this.count = h("p", { class: "faint", id: "count", "aria-live": "polite" });
    this.lengths = h("figure", { id: "lengths" });
    this.list = h("div", { class: "list", id: "list" });
    this.detail = h("div", { id: "detail" });
    this.element = h(
      "div",
      {},
      h(
        "div",
        { class: "row" },
        runs.length > 1 ? labelled("run", this.run) : null,
        labelled(runs.every(isEvaluation) ? "benchmark" : "step", this.step),
        labelled("verdict", this.verdict),
        this.problem,
        this.problems,
        labelled("tokens", this.from),
        this.to,
      ),
      h("div", { class: "row" }, this.search, this.order, this.makeButtons()),
      this.count,
      this.lengths,
      h("div", { class: "reader" }, this.list, this.detail),
    );
    this.fillChoices();
  }

  makeFilters() {
    const changed = () => {
      this.limit = PAGE;
      this.update();
    };
    const control = (tag, attributes, ...children) =>
      h(tag, { onchange: changed, ...attributes }, ...children);
    const chooseRun = () => {
      this.chosen = null;
      this.fillChoices();
      changed();
    };
    const searchSoon = () => {
      clearTimeout(this.searchTimer);
      this.searchTimer = setTimeout(changed, 150);
    };
    const runNames = this.runs.map((run, index) => [index, run.name]);
    this.run = control("select", { onchange: chooseRun }, options(runNames));
    this.step = control("select", { id: "step" });
    this.verdict = control("select", { id: "verdict" });
    this.problem = control("input", {
      id: "problem",
      type: "search",
      list: "problem-ids",
      placeholder: "problem",
      size: 14,
    });
    this.problems = h("datalist", { id: "problem-ids" });
    this.from = control("input", { id: "from", type: "number", min: 0, placeholder: "from" });
    this.to = control("input", { id: "to", type: "number", min: 0, placeholder: "to" });
    this.search = h("input", {
      id: "search",
      class: "grow",
      type: "search",
      placeholder: PLACEHOLDER,
      oninput: searchSoon,
    });
    const orders = [
      ["step", "by step"],
      ["shortest", "shortest first"],
      ["longest", "longest first"],
    ];
    this.order = control("select", { id: "order" }, options(orders));
  }

  makeButtons() {
    const shorter = (a, b) => (b.num_tokens < a.num_tokens ? b : a);
    const longer = (a, b) => (b.num_tokens > a.num_tokens ? b : a);
    const pick = (text, choose) =>
      h("button", { type: "button", onclick: () => this.pick(choose) }, text);
    const clear = { type: "button", id: "clear", onclick: () => this.clear() };
    return [
      pick("Shortest", (rows) => rows.reduce(shorter)),
      pick("Longest", (rows) => rows.reduce(longer)),
      pick("Random", (rows) => rows[Math.floor(Math.random() * rows.length)]),
      h("button", clear, "Clear filters"),
    ];
  }

  get data() {
    return this.runs[Number(this.run.value || 0)];
  }

  /** Fill the choices of the filters with the steps, verdicts and problems of the run. */
  fillChoices() {
    const unique = (name) => [...new Set(this.data.responses.map((row) => row[name]))];
    const choices = (select, values) => {
      const before = select.value;
      const pairs = values.map((value) => [value, String(value).replaceAll("_", " ")]);
      select.replaceChildren(...options([["", "all"], ...pairs]));
      select.value = values.map(String).includes(before) ? before : "";
    };
    choices(this.step, unique("step"));
    choices(this.verdict, unique("outcome").sort());
    const ids = unique("problem_id").sort().slice(0, MAX_PROBLEM_IDS);
    this.problems.replaceChildren(...ids.map((id) => h("option", { value: id })));
  }

  clear() {
    const filters = [this.step, this.verdict, this.problem, this.from, this.to, this.search];
    for (const filter of filters) filter.value = "";
    this.limit = PAGE;
    this.update();
  }

  /** Responses that pass the filters. byLength: whether the filters of lengths count, too. */
  matching(byLength = true) {
    const words = this.search.value.toLowerCase();
    const contains = (text) => text && text.toLowerCase().includes(words);
    const isFound = (row) => {
      const [problem] = problemOf(row, this.data);
      return [row.text, row.answer, problem].some(contains);
    };
    const isInRange = ({ num_tokens: count }) =>
      (this.from.value === "" || count >= Number(this.from.value)) &&
      (this.to.value === "" || count <= Number(this.to.value));
    return this.data.responses.filter(
      (row) =>
        (!this.step.value || String(row.step) === this.step.value) &&
        (!this.verdict.value || row.outcome === this.verdict.value) &&
        (!this.problem.value || row.problem_id.includes(this.problem.value)) &&
        (!byLength || isInRange(row)) &&
        (!words || isFound(row)),
    );
  }

  update() {
    const rows = this.matching();
    if (this.order.value !== "step") {
      const sign = this.order.value === "shortest" ? 1 : -1;
      rows.sort((a, b) => sign * (a.num_tokens - b.num_tokens));
    }
    if (!rows.includes(this.chosen)) {
      this.chosen = rows[0] ?? null;
      this.view = this.startView;
    }
    const { responses, rollouts } = this.data;
    let text = `${shown(rows.length)} of ${shown(responses.length)} responses`;
    if (rollouts.total > responses.length) {
      const share = percent(responses.length / rollouts.total);
      text += `; in this page are ${shown(responses.length)} of the run's `;
      text += `${shown(rollouts.total)} (${share}), whole groups by chance`;
    }
    this.count.textContent = text;
    this.drawLengths();
    this.drawList(rows);
    this.drawDetail();
  }

  drawLengths() {
    const hasRange = this.from.value !== "" && this.to.value !== "";
    const chosen = hasRange ? [Number(this.from.value), Number(this.to.value)] : null;
    const choose = (from, to) => {
      const isChosen = chosen !== null && chosen[0] === from && chosen[1] === to;
      [this.from.value, this.to.value] = isChosen ? ["", ""] : [from, to];
      this.limit = PAGE;
      this.update();
    };
    const width = Math.max(200, this.lengths.clientWidth - 20);
    this.lengths.replaceChildren(
      h("figcaption", {}, "Lengths in tokens"),
      histogram(this.matching(false), width, chosen, choose),
      h(
        "div",
        { class: "legend" },
        h("span", { class: "c0" }, "correct"),
        h("span", { class: "c1" }, "not correct"),
        h("span", { class: "faint plain" }, "a click on a bin filters"),
      ),
    );
  }

  drawList(rows) {
    const items = rows.slice(0, this.limit).map((row) => this.listItem(row));
    if (rows.length > this.limit) {
      const showMore = () => {
        this.limit += PAGE;
        this.update();
      };
      const text = `${shown(rows.length - this.limit)} more …`;
      items.push(h("button", { type: "button", onclick: showMore }, text));
    }
    const top = this.list.scrollTop;
    this.list.replaceChildren(...items);
    this.list.scrollTop = top;
  }

  listItem(row) {
    const attributes = {
      type: "button",
      "aria-current": String(row === this.chosen),
      onclick: () => this.choose(row),
    };
    return h(
      "button",
      attributes,
      `${placeOf(row)} `,
      h("span", { class: `verdict ${row.outcome}` }, row.outcome.replaceAll("_", " ")),
      ` ${shown(row.num_tokens)} tokens`,
      h("span", { class: "snippet" }, (row.text ?? "").slice(0, 160)),
    );
  }

  choose(row) {
    this.chosen = row;
    this.view = this.startView;
    this.update();
    if (window.innerWidth < NARROW) this.detail.scrollIntoView({ block: "start" });
  }

  pick(choose) {
    const rows = this.matching();
    if (rows.length) this.choose(choose(rows));
  }

  drawDetail() {
    if (this.chosen === null) {
      this.detail.replaceChildren(h("p", {}, "No response passes the filters."));
      return;
    }
    const views = [["one", "This response"], ["group", "Its group"]];
    if (!isEvaluation(this.data)) views.push(["times", "Before and after"]);
    if (this.partner) views.push(["pair", "Side by side"]);
    if (this.runs.length > (this.partner ? 2 : 1)) views.push(["runs", "In every run"]);
    if (!views.some(([name]) => name === this.view)) this.view = "one";
    const draw = (changes) => () => {
      Object.assign(this, changes);
      this.drawDetail();
    };
    const buttons = views.map(([name, text]) =>
      toggle(text, name === this.view, draw({ view: name })),
    );
    if (this.chosen.parts && this.chosen.log_probs) {
      const other = { byProbability: !this.byProbability };
      buttons.push(toggle("Probabilities", this.byProbability, draw(other)));
    }
    this.detail.replaceChildren(
      h("div", { class: "row" }, buttons),
      problemBox(this.chosen, this.data, this.search.value.toLowerCase()),
      h("div", { class: this.view === "pair" ? "beside pair" : "beside" }, this.cards()),
    );
  }

  /** The evaluation beside which the chosen one stands: the first, or the last; null: none. */
  get partner() {
    if (!isEvaluation(this.data)) return null;
    const evaluations = this.runs.filter(isEvaluation);
    if (evaluations.length < 2) return null;
    return this.data === evaluations[0] ? last(evaluations) : evaluations[0];
  }

  /** The responses of the chosen view. */
  cards() {
    if (this.view === "group") return this.groupCards();
    if (this.view === "times") return this.cardsBeforeAndAfter();
    if (this.view === "pair") {
      const isChosen = (run) => run === this.data || run === this.partner;
      return this.cardsOfRuns(this.runs.filter(isChosen));
    }
    if (this.view === "runs") return this.cardsOfRuns(this.runs);
    return [this.card(this.chosen)];
  }

  groupCards() {
    const rows = this.sameProblem(this.data).filter((row) => row.step === this.chosen.step);
    return rows.map((row) => this.card(row));
  }

  cardsBeforeAndAfter() {
    const rows = this.sameProblem(this.data);
    const steps = [...new Set(rows.map((row) => row.step))];
    const ends = steps.length > 1 ? [steps[0], last(steps)] : steps;
    const cards = ends.map((step) => this.card(this.closestIn(rows, step)));
    if (steps.length === 1) {
      cards.push(h("p", {}, "Responses to this problem are from one step here."));
    }
    return cards;
  }

  cardsOfRuns(runs) {
    const cards = [];
    const without = [];
    for (const run of runs) {
      const rows = this.sameProblem(run);
      if (!rows.length) {
        without.push(run.name);
        continue;
      }
      // Of an evaluation the step is a benchmark, the same for all rows of a problem.
      const distance = (row) => Math.abs(row.step - this.chosen.step) || 0;
      const nearest = rows.reduce((best, row) => (distance(row) < distance(best) ? row : best));
      cards.push(this.card(this.closestIn(rows, nearest.step), run, `${run.name}: `));
    }
    if (without.length) {
      cards.push(h("p", {}, `No response to this problem is here of ${without.join(", ")}.`));
    }
    return cards;
  }

  card(row, run = this.data, before = "") {
    const search = this.search.value.toLowerCase();
    return responseCard(row, run, `${before}${placeOf(row)}`, search, this.byProbability);
  }

  /** The run's responses to the problem of the chosen one. */
  sameProblem(run) {
    const key = problemKey(this.chosen);
    return run.responses.filter((row) => problemKey(row) === key);
  }

  /** The response of a step with the same index as the chosen one, or the step's first. */
  closestIn(rows, step) {
    const ofStep = rows.filter((row) => row.step === step);
    return ofStep.find((row) => row.sample_index === this.chosen.sample_index) ?? ofStep[0];
  }
}

/** Fill the section of responses, if the page has one. */
function showReader() {
  const { runs } = page;
  if (!runs.length) return;
  for (const run of runs) {
    const { fields, rows } = run.rollouts;
    run.responses = rows.map((row) =>
      Object.fromEntries(fields.map((name, n) => [name, row[n]])),
    );
  }
  const reader = new Reader(runs);
  document.getElementById("responses").append(reader.element);
  window.addEventListener("resize", () => reader.drawLengths());
  reader.update();
}

themes();
tellWhenTapped();
showReader();
