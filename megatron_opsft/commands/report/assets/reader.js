"use strict";
// The reader of responses: filters, a list, one response, its group, its problem before and after.

const PAGE = 100; // rows of the list at a time

class Reader {
  constructor(runs) {
    this.runs = runs;
    this.chosen = null;
    this.view = "one";
    this.limit = PAGE;
    this.searchTimer = null;
    const changed = () => { this.limit = PAGE; this.update(); };
    const control = (tag, attributes, ...children) => h(tag, { onchange: changed, ...attributes }, ...children);
    this.run = control("select", { onchange: () => { this.chosen = null; this.fillChoices(); changed(); } },
      options(runs.map((run, place) => [place, run.name])));
    this.step = control("select", { id: "step" });
    this.verdict = control("select", { id: "verdict" });
    this.problem = control("input", { id: "problem", type: "search", list: "problem-ids", placeholder: "problem", size: 14 });
    this.problems = h("datalist", { id: "problem-ids" });
    this.from = control("input", { id: "from", type: "number", min: 0, placeholder: "from" });
    this.to = control("input", { id: "to", type: "number", min: 0, placeholder: "to" });
    this.search = h("input", { id: "search", class: "grow", type: "search", placeholder: "search in texts and answers",
      oninput: () => { clearTimeout(this.searchTimer); this.searchTimer = setTimeout(changed, 150); } });
    this.order = control("select", { id: "order" }, options([["step", "by step"], ["shortest", "shortest first"], ["longest", "longest first"]]));
    this.count = h("p", { class: "faint", id: "count", "aria-live": "polite" });
    this.lengths = h("figure", { id: "lengths" });
    this.list = h("div", { class: "list", id: "list" });
    this.detail = h("div", { id: "detail" });
    const pick = (text, choose) => h("button", { type: "button", onclick: () => this.pick(choose) }, text);
    this.element = h("div", {},
      h("div", { class: "row" }, runs.length > 1 ? labelled("run", this.run) : null, labelled("step", this.step),
        labelled("verdict", this.verdict), this.problem, this.problems, labelled("tokens", this.from), this.to),
      h("div", { class: "row" }, this.search, this.order,
        pick("Shortest", (rows) => rows.reduce((a, b) => (b.num_tokens < a.num_tokens ? b : a))),
        pick("Longest", (rows) => rows.reduce((a, b) => (b.num_tokens > a.num_tokens ? b : a))),
        pick("Random", (rows) => rows[Math.floor(Math.random() * rows.length)]),
        h("button", { type: "button", id: "clear", onclick: () => this.clear() }, "Clear filters")),
      this.count, this.lengths, h("div", { class: "reader" }, this.list, this.detail));
    this.fillChoices();
  }

  get data() {
    return this.runs[Number(this.run.value || 0)];
  }

  /** The choices that the run has. */
  fillChoices() {
    const unique = (name) => [...new Set(this.data.responses.map((row) => row[name]))];
    const choices = (select, values) => {
      const before = select.value;
      select.replaceChildren(...options([["", "all"], ...values.map((value) => [value, String(value).replaceAll("_", " ")])]));
      select.value = values.map(String).includes(before) ? before : "";
    };
    choices(this.step, unique("step"));
    choices(this.verdict, unique("outcome").sort());
    this.problems.replaceChildren(...unique("problem_id").sort().slice(0, 2000).map((id) => h("option", { value: id })));
  }

  clear() {
    for (const control of [this.step, this.verdict, this.problem, this.from, this.to, this.search]) control.value = "";
    this.limit = PAGE;
    this.update();
  }

  /** Responses that pass the filters; without those of lengths for the histogram. */
  matching(byLength = true) {
    const words = this.search.value.toLowerCase();
    const texts = (row) => [row.text, row.answer, this.data.rollouts.problems[row.problem_id]?.[0]];
    return this.data.responses.filter((row) =>
      (!this.step.value || String(row.step) === this.step.value)
      && (!this.verdict.value || row.outcome === this.verdict.value)
      && (!this.problem.value || row.problem_id.includes(this.problem.value))
      && (!byLength || this.from.value === "" || row.num_tokens >= Number(this.from.value))
      && (!byLength || this.to.value === "" || row.num_tokens <= Number(this.to.value))
      && (!words || texts(row).some((text) => text && text.toLowerCase().includes(words))));
  }

  update() {
    const rows = this.matching();
    if (this.order.value !== "step") {
      const sign = this.order.value === "shortest" ? 1 : -1;
      rows.sort((a, b) => sign * (a.num_tokens - b.num_tokens));
    }
    if (!rows.includes(this.chosen)) { this.chosen = rows[0] ?? null; this.view = "one"; }
    const { responses, rollouts } = this.data;
    const share = rollouts.total > responses.length
      ? `; in this page are ${shown(responses.length)} of the run's ${shown(rollouts.total)} (${percent(responses.length / rollouts.total)}), whole groups by chance` : "";
    this.count.textContent = `${shown(rows.length)} of ${shown(responses.length)} responses${share}`;
    this.drawLengths();
    this.drawList(rows);
    this.drawDetail();
  }

  drawLengths() {
    const chosen = this.from.value !== "" && this.to.value !== "" ? [Number(this.from.value), Number(this.to.value)] : null;
    const choose = (from, to) => {
      const again = chosen !== null && chosen[0] === from && chosen[1] === to;
      [this.from.value, this.to.value] = again ? ["", ""] : [from, to];
      this.limit = PAGE;
      this.update();
    };
    const width = Math.max(200, this.lengths.clientWidth - 20);
    this.lengths.replaceChildren(h("figcaption", {}, "Lengths in tokens"), histogram(this.matching(false), width, chosen, choose),
      h("div", { class: "legend" }, h("span", { class: "c0" }, "correct"), h("span", { class: "c1" }, "not correct"),
        h("span", { class: "faint plain" }, "a click on a bin filters")));
  }

  drawList(rows) {
    const items = rows.slice(0, this.limit).map((row) => h("button",
      { type: "button", "aria-current": String(row === this.chosen), onclick: () => this.choose(row) },
      `${placeOf(row)} `,
      h("span", { class: `verdict ${row.outcome}` }, row.outcome.replaceAll("_", " ")), ` ${shown(row.num_tokens)} tokens`,
      h("span", { class: "snippet" }, (row.text ?? "").slice(0, 160))));
    if (rows.length > this.limit) {
      items.push(h("button", { type: "button", onclick: () => { this.limit += PAGE; this.update(); } }, `${shown(rows.length - this.limit)} more …`));
    }
    const top = this.list.scrollTop;
    this.list.replaceChildren(...items);
    this.list.scrollTop = top;
  }

  choose(row, view = "one") {
    [this.chosen, this.view] = [row, view];
    this.update();
    if (window.innerWidth < 832) this.detail.scrollIntoView({ block: "start" });
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
    const views = [["one", "This response"], ["group", "Its group"], ["times", "Before and after"]];
    if (this.runs.length > 1) views.push(["runs", "In every run"]);
    const buttons = views.map(([name, text]) => h("button",
      { type: "button", "aria-pressed": String(name === this.view), onclick: () => { this.view = name; this.drawDetail(); } }, text));
    this.detail.replaceChildren(h("div", { class: "row" }, buttons), h("div", { class: "beside" }, this.cards()));
  }

  cards() {
    const [row, run, words] = [this.chosen, this.data, this.search.value.toLowerCase()];
    const card = (one, of = run, before = "") =>
      responseCard(one, of, `${before}${placeOf(one)}`, words);
    const same = (of) => of.responses.filter((one) => one.problem_id === row.problem_id);
    if (this.view === "group") return same(run).filter((one) => one.step === row.step).map((one) => card(one));
    if (this.view === "times") {
      const seen = same(run);
      const steps = [...new Set(seen.map((one) => one.step))];
      const pairs = [steps[0], ...(steps.length > 1 ? [last(steps)] : [])].map((step) => closest(seen.filter((one) => one.step === step), row));
      return [...pairs.map((one) => card(one)), steps.length > 1 ? null : h("p", {}, "Responses to this problem are from one step here.")];
    }
    if (this.view === "runs") {
      const without = this.runs.filter((other) => !same(other).length).map((other) => other.name);
      const cards = this.runs.filter((other) => same(other).length).map((other) => {
        const near = same(other).reduce((best, one) => (Math.abs(one.step - row.step) < Math.abs(best.step - row.step) ? one : best));
        return card(closest(same(other).filter((one) => one.step === near.step), row), other, `${other.name}: `);
      });
      return [...cards, without.length ? h("p", {}, `No response to this problem is here of ${without.join(", ")}.`) : null];
    }
    return [card(row)];
  }
}

/** Step or benchmark, problem and number. */
function placeOf(row) {
  const step = typeof row.step === "number" ? `step ${row.step}` : row.step;
  return `${step}, ${row.problem_id} #${row.sample_index}`;
}

/** The response with the same index, or the first. */
function closest(rows, row) {
  return rows.find((one) => one.sample_index === row.sample_index) ?? rows[0];
}

/** Fill the part of responses, where the page has one. */
function showReader() {
  const { runs } = page;
  if (!runs.length) return;
  for (const run of runs) {
    run.responses = run.rollouts.rows.map((row) => Object.fromEntries(run.rollouts.fields.map((name, n) => [name, row[n]])));
  }
  const reader = new Reader(runs);
  document.getElementById("responses").append(reader.element);
  window.addEventListener("resize", () => reader.drawLengths());
  reader.update();
}

themes();
tellWhenTapped();
showReader();
