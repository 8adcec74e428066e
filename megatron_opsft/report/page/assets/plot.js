"use strict";
// Line plots and points as SVG. Zoom: drag over it, buttons, or the keys + - 0; arrows read values.

const MARGIN = { left: 52, right: 10, top: 8, bottom: 30 };
const HEIGHT = 216;

/** Round values inside [low, high], about `count` of them. */
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) {
    found.push(Number((n * step).toPrecision(12)));
  }
  return found;
}

/** Plots whose horizontal range is one and the same: what is zoomed in one is zoomed in all. */
class Zoom {
  constructor() {
    this.range = null;
    this.plots = [];
  }

  set(range) {
    this.range = range;
    this.draw();
  }

  draw() {
    this.plots.forEach((plot) => plot.draw());
  }

  /** factor below 1: nearer; around: where it stays in place. */
  scale(factor, around = null) {
    const [low, high] = this.range ?? this.whole();
    const middle = around ?? (low + high) / 2;
    const [least, most] = this.whole();
    const range = [Math.max(least, middle - (middle - low) * factor), Math.min(most, middle + (high - middle) * factor)];
    this.set(range[0] <= least && range[1] >= most ? null : range);
  }

  whole() {
    const xs = this.plots.flatMap((plot) => plot.reach());
    return [Math.min(...xs), Math.max(...xs)];
  }

  buttons() {
    const button = (text, label, act) =>
      h("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
    return h("div", { class: "row" },
      button("+", "nearer", () => this.scale(0.5)),
      button("−", "further", () => this.scale(2)),
      button("whole", "the whole range", () => this.set(null)),
      h("small", {}, "drag over a plot to zoom; in a plot, arrow keys read values, + − 0 zoom"));
  }
}

class Plot {
  /**
   * series: {label, place, xs, ys, kind, low, high, lowX, highX}; kind: "curve", "held" (dotted with dots),
   * "points" (dots with whiskers) or "front". x and y texts: axes. show: a y value as text.
   */
  constructor(zoom, { title, x = "step", series, show = shown, fromZero = false, logX = false, ends = null }) {
    Object.assign(this, { zoom, x, series, show, fromZero, logX, ends, cursor: null });
    this.title = title;
    this.values = h("div", { class: "values", "aria-live": "polite" });
    this.svg = svg("svg", { tabindex: 0, role: "img", "aria-label": `${title}: arrow keys read values`, height: HEIGHT });
    const legend = series.filter((one) => one.label).map((one) =>
      h("span", { class: `${colour(one.place)} ${one.kind === "held" ? "held" : ""}` }, one.label));
    this.element = h("figure", {}, h("figcaption", {}, title), this.svg, h("div", { class: "legend" }, legend), this.values);
    zoom.plots.push(this);
    this.listen();
  }

  reach() {
    return this.series.flatMap(({ xs, lowX, highX }) => [...xs, ...(lowX ?? []), ...(highX ?? [])]);
  }

  draw() {
    this.width = this.svg.clientWidth || this.svg.parentNode?.clientWidth || 0;
    if (!this.width) return;
    this.domain = this.zoom.range ?? padded(this.reach(), this.logX ? 0 : 0.02);
    this.range = this.vertical();
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const clip = `clip-${Plot.number = (Plot.number ?? 0) + 1}`;
    const inner = { x: MARGIN.left, y: 0, width: this.width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.bottom };
    this.svg.replaceChildren(
      svg("clipPath", { id: clip }, svg("rect", inner)),
      ...this.axes(),
      svg("g", { "clip-path": `url(#${clip})` }, this.series.map((one) => this.drawn(one))));
    this.overlay = svg("g");
    this.svg.append(this.overlay);
    if (this.cursor !== null) this.read(this.cursor);
  }

  /** Lowest and highest value that is seen. */
  vertical() {
    const seen = [];
    for (const { xs, ys, low, high } of this.series) {
      xs.forEach((x, n) => {
        if (x < this.domain[0] || x > this.domain[1]) return;
        for (const value of [ys[n], low?.[n], high?.[n]]) if (Number.isFinite(value)) seen.push(value);
      });
    }
    const [low, high] = padded(this.fromZero ? [0, ...seen] : seen, 0.06);
    return this.ends ? [Math.max(low, this.ends[0]), Math.min(high, this.ends[1])] : [this.fromZero ? Math.max(0, low) : low, high];
  }

  px(x) {
    const place = (value) => (this.logX ? Math.log2(value) : value);
    const [low, high] = this.domain.map(place);
    return MARGIN.left + ((place(x) - low) / (high - low || 1)) * (this.width - MARGIN.left - MARGIN.right);
  }

  py(y) {
    const [low, high] = this.range;
    return HEIGHT - MARGIN.bottom - ((y - low) / (high - low || 1)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  }

  at(px) {
    const [low, high] = this.domain;
    const share = Math.min(1, Math.max(0, (px - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right)));
    return this.logX ? low * (high / low) ** share : low + share * (high - low);
  }

  axes() {
    const marks = this.logX ? [...new Set(this.series.flatMap(({ xs }) => xs))] : ticks(...this.domain, this.width < 350 ? 4 : 7);
    const bottom = HEIGHT - MARGIN.bottom;
    return [
      ...ticks(...this.range, 5).map((y) => [
        svg("line", { class: "grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: this.py(y), y2: this.py(y) }),
        svg("text", { x: MARGIN.left - 5, y: this.py(y) + 4, "text-anchor": "end" }, this.show(y).replace(".0 %", " %")),
      ]),
      ...marks.filter((x) => x >= this.domain[0] && x <= this.domain[1]).map((x) =>
        svg("text", { x: this.px(x), y: bottom + 13, "text-anchor": "middle" }, shown(x))),
      svg("text", { x: this.width - MARGIN.right, y: HEIGHT - 4, "text-anchor": "end" }, this.x),
    ].flat();
  }

  drawn({ xs, ys, kind = "curve", place, low, high, lowX, highX }) {
    const group = svg("g", { class: colour(place) });
    const points = xs.map((x, n) => [x, ys[n], n]).filter(([, y]) => Number.isFinite(y));
    const [from, to] = this.domain;
    const line = (x1, y1, x2, y2) => svg("line", { class: "whisker", x1: this.px(x1), y1: this.py(y1), x2: this.px(x2), y2: this.py(y2) });
    if (kind !== "points") {
      const path = points.map(([x, y], n) => {
        const step = kind === "front" && n ? `H${this.px(x).toFixed(1)}V` : `${n ? "L" : "M"}${this.px(x).toFixed(1)} `;
        return step + this.py(y).toFixed(1);
      }).join("");
      group.append(svg("path", { class: kind === "front" ? "front" : `curve ${kind}`, d: path }));
    }
    for (const [x, y, n] of points) {
      if (x < from || x > to) continue;
      if (Number.isFinite(low?.[n])) group.append(line(x, low[n], x, high[n]));
      if (Number.isFinite(lowX?.[n])) group.append(line(lowX[n], y, highX[n], y));
      if (kind === "held" || kind === "points" || (kind === "curve" && points.length < 3)) {
        group.append(svg("circle", { class: "dot", cx: this.px(x), cy: this.py(y), r: kind === "points" ? 5 : 4 }));
      }
    }
    return group;
  }

  /** Show the values at the x that is nearest. */
  read(x) {
    const xs = [...new Set(this.series.filter(({ kind }) => kind !== "front").flatMap((one) => one.xs))]
      .filter((one) => one >= this.domain[0] && one <= this.domain[1]);
    if (!xs.length) return;
    const near = xs.reduce((best, one) => (Math.abs(one - x) < Math.abs(best - x) ? one : best));
    this.cursor = near;
    this.overlay.replaceChildren(svg("line", { class: "cursor", x1: this.px(near), x2: this.px(near), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
    const found = this.series.filter(({ kind }) => kind !== "front").flatMap(({ label, xs: all, ys }) => {
      const n = all.indexOf(near);
      return n >= 0 && Number.isFinite(ys[n]) ? [`${label ? `${label} ` : ""}${this.show(ys[n])}`] : [];
    });
    this.values.textContent = `${this.x} ${shown(near)}: ${found.join(", ")}`;
  }

  /** The neighbour of the cursor; the first where there is none. */
  step(by) {
    const xs = [...new Set(this.series.filter(({ kind }) => kind !== "front").flatMap((one) => one.xs))].sort((a, b) => a - b);
    const now = this.cursor === null ? -by : xs.indexOf(this.cursor);
    const next = xs[Math.min(xs.length - 1, Math.max(0, (this.cursor === null ? (by > 0 ? -1 : xs.length) : now) + by))];
    if (this.zoom.range && (next < this.domain[0] || next > this.domain[1])) {
      const half = (this.domain[1] - this.domain[0]) / 2;
      this.cursor = next;
      this.zoom.set([next - half, next + half]);
    }
    this.read(next);
  }

  listen() {
    const place = (event) => event.clientX - this.svg.getBoundingClientRect().left;
    let start = null;
    this.svg.addEventListener("pointerdown", (event) => { start = place(event); });
    this.svg.addEventListener("pointermove", (event) => {
      if (!this.domain) return;
      this.read(this.at(place(event)));
      if (start !== null && Math.abs(place(event) - start) > 4) {
        const [low, high] = [start, place(event)].sort((a, b) => a - b);
        this.overlay.append(svg("rect", { class: "chosen", x: low, width: high - low, y: MARGIN.top, height: HEIGHT - MARGIN.top - MARGIN.bottom }));
      }
    });
    this.svg.addEventListener("pointerup", (event) => {
      const [low, high] = [start ?? 0, place(event)].sort((a, b) => a - b);
      const isDrag = start !== null && high - low > 8;
      start = null;
      if (isDrag) this.zoom.set([this.at(low), this.at(high)]);
    });
    this.svg.addEventListener("pointerleave", () => { start = null; });
    this.svg.addEventListener("keydown", (event) => {
      const acts = {
        ArrowRight: () => this.step(1), ArrowLeft: () => this.step(-1),
        "+": () => this.zoom.scale(0.5, this.cursor), "=": () => this.zoom.scale(0.5, this.cursor),
        "-": () => this.zoom.scale(2, this.cursor), 0: () => this.zoom.set(null), Escape: () => this.zoom.set(null),
      };
      if (acts[event.key]) {
        event.preventDefault();
        acts[event.key]();
      }
    });
  }
}

/** [low, high] of the values with a share of room on both sides. */
function padded(values, share) {
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!Number.isFinite(low)) return [0, 1];
  const room = share * (high - low) || (share && (Math.abs(low) * 0.1 || 0.5));
  return [low - room, high + room];
}
