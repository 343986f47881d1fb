// Small line charts over the last minutes, as SVG. A pointer or the arrow keys move a cursor that shows the values.

import { h, setAttribute, setText, svg, NONE } from "./dom.js";
import { HISTORY_S } from "./live.js";

const WIDTH = 300;
const HEIGHT = 72;

/** Return the smallest of 1, 2, 2.5, 5 × 10ⁿ that is not below `value`. */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  for (const step of [1, 2, 2.5, 5, 10]) if (step * unit >= value * (1 - 1e-9)) return step * unit;
  return 10 * unit;
}

/** A chart of `series`: {label, tone, value(row)}. `format` writes a value. */
export class Chart {
  constructor({ title, series, format }) {
    Object.assign(this, { title, series, format, rows: [], end: 0, at: null });
    this.lines = series.map(({ tone }) => svg("path", { class: `line ${tone}` }));
    this.dots = series.map(({ tone }) => svg("path", { class: `lone ${tone}` }));
    this.areas = series.length === 1 ? [svg("path", { class: `area ${series[0].tone}` })] : [];
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    const grid = [0, 0.5, 1].map((share) => {
      const y = HEIGHT * (1 - share) + (share === 1 ? 0.5 : -0.5);
      return svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y });
    });
    this.plot = svg(
      "svg",
      {
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        preserveAspectRatio: "none",
        tabindex: 0,
        role: "img",
        onpointermove: (event) => this._point(event),
        onpointerleave: () => this._move(null),
        onblur: () => this._move(null),
        onkeydown: (event) => this._key(event),
      },
      grid, this.areas, this.lines, this.dots, this.cursor,
    );
    this.values = series.map(() => h("b"));
    this.when = h("span", { class: "when" });
    this.top = h("span", { class: "tick top" });
    this.half = h("span", { class: "tick half" });
    const legend = series.map(({ label, tone }, index) => h("span", { class: `key ${tone}` }, label, " ", this.values[index]));
    this.node = h("figure", { class: "chart" },
      h("figcaption", {}, h("span", { class: "title" }, title), h("span", { class: "legend" }, legend)),
      h("div", { class: "plot" }, this.plot, this.top, this.half, h("span", { class: "tick zero" }, "0")),
      h("div", { class: "times" }, h("span", {}, "−5 min"), this.when, h("span", {}, "now")),
    );
  }

  /** Draw `rows` (each has `t` in seconds), of which the newest are at `end`. */
  update(rows, end) {
    Object.assign(this, { rows, end });
    let most = 0;
    for (const row of rows) for (const { value } of this.series) most = Math.max(most, value(row) ?? 0);
    const top = roundUp(most);
    setText(this.top, most > 0 ? this.format(top) : "");
    setText(this.half, most > 0 ? this.format(top / 2) : "");
    this.series.forEach(({ value }, index) => {
      const { line, area, dots } = this._trace(value, top);
      setAttribute(this.lines[index], "d", line);
      setAttribute(this.dots[index], "d", dots);
      if (this.areas[index]) setAttribute(this.areas[index], "d", area);
    });
    this._label();
  }

  _x(row) {
    return WIDTH * (1 - (this.end - row.t) / HISTORY_S);
  }

  _trace(value, top) {
    let line = "";
    let area = "";
    let dots = "";
    let point = "";
    let begun = null;
    let before = null;
    const close = () => {
      if (begun !== null) area += `L${before} ${HEIGHT}L${begun} ${HEIGHT}Z`;
      if (begun !== null && begun === before) dots += `M${point}h0.01`; // a value alone
      begun = null;
    };
    let last = -Infinity;
    for (const row of this.rows) {
      const found = value(row);
      if (found === null || found === undefined || row.t - last > 15) close();
      if (found === null || found === undefined) continue;
      last = row.t;
      const x = this._x(row).toFixed(1);
      point = `${x} ${(HEIGHT - 1 - (HEIGHT - 2) * Math.min(1, found / top)).toFixed(1)}`;
      line += (begun === null ? "M" : "L") + point;
      area += (begun === null ? "M" : "L") + point;
      begun ??= x;
      before = x;
    }
    close();
    return { line, area, dots };
  }

  _label() {
    const row = this.at === null ? this.rows.at(-1) : this._nearest(this.at);
    const shown = this.series.map(({ value }) => {
      const found = row && value(row);
      return found === null || found === undefined ? NONE : this.format(found);
    });
    shown.forEach((text, index) => setText(this.values[index], text));
    if (this.at === null || !row) {
      this.cursor.setAttribute("visibility", "hidden");
      setText(this.when, "");
    } else {
      const x = this._x(row);
      setAttribute(this.cursor, "x1", x);
      setAttribute(this.cursor, "x2", x);
      this.cursor.setAttribute("visibility", "visible");
      setText(this.when, `${Math.round(this.end - row.t)} s ago`);
    }
    const words = this.series.map(({ label }, index) => `${label} ${shown[index]}`).join(", ");
    setAttribute(this.plot, "aria-label", `${this.title}, last five minutes. ${this.when.textContent || "Now"}: ${words}`);
  }

  _nearest(seconds) {
    let best = null;
    for (const row of this.rows) {
      if (best === null || Math.abs(this.end - row.t - seconds) < Math.abs(this.end - best.t - seconds)) best = row;
    }
    return best;
  }

  _point(event) {
    const box = this.plot.getBoundingClientRect();
    this._move(HISTORY_S * (1 - (event.clientX - box.left) / box.width));
  }

  _key(event) {
    const steps = { ArrowLeft: 5, ArrowRight: -5, PageUp: 60, PageDown: -60 };
    if (event.key === "Escape") this._move(null);
    else if (event.key in steps) this._move(Math.min(HISTORY_S, Math.max(0, (this.at ?? 0) + steps[event.key])));
    else return;
    event.preventDefault();
  }

  _move(at) {
    this.at = at;
    this._label();
  }
}

/** A line of recent values without axes, between 0 and the largest of them. */
export class Spark {
  constructor(label) {
    this.path = svg("path", { class: "area decode" });
    this.node = svg("svg", { class: "spark", viewBox: "0 0 60 16", preserveAspectRatio: "none", "aria-hidden": "true" }, this.path);
    this.label = label;
    this.values = [];
  }

  push(value) {
    this.values.push(value); // one per second
    if (this.values.length > 60) this.values.shift();
    if (this.values.length < 3) return;
    const most = Math.max(1, ...this.values);
    const start = 60 - this.values.length;
    const points = this.values.map((each, index) => `L${start + index} ${(16 - 15 * (each / most)).toFixed(1)}`);
    setAttribute(this.path, "d", `M${start} 16${points.join("")}L59 16Z`);
  }
}
