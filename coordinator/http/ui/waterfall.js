// The waterfall of one request: as one line in a list, and in full with an axis, a row per span and its details.

import { bytes, copy, count, h, many, milliseconds, setAttribute, setText } from "./dom.js";
import { barsOf, endOf, isOver, lengthOf, nameOf, rowsOf, storyOf, ticksOf, toneOf } from "./spans.js";

const percent = (part, whole) => `${Math.max(0, Math.min(100, (100 * part) / whole)).toFixed(3)}%`;

function place(node, start, end, length) {
  node.style.left = percent(start, length);
  node.style.width = percent(Math.min(end, length) - start, length);
}

/** All spans on one line. */
export class MiniWaterfall {
  constructor() {
    this.node = h("div", { class: "mini", "aria-hidden": "true" });
    this.bars = [];
  }

  /** Draw `request`; the line is `scale` milliseconds long. */
  update(request, scale, nowS) {
    const length = lengthOf(request, nowS);
    const bars = barsOf(request, length);
    if (!request.spans) bars.push({ tone: "unknown", start: 0, end: length });
    while (this.bars.length > bars.length) this.bars.pop().remove();
    while (this.bars.length < bars.length) {
      const bar = h("i");
      this.bars.push(bar);
      this.node.append(bar);
    }
    bars.forEach(({ tone, start, end, inside }, index) => {
      this.bars[index].className = inside ? `${tone} inside` : tone;
      place(this.bars[index], start, end, scale);
    });
  }
}

/** The panel with one request in full. `close` is called by its button. */
export class Details {
  constructor(close) {
    this.request = null;
    this.selected = -1;
    this.title = h("h2", { id: "details-title" });
    this.state = h("span", { class: "pill" });
    this.close = h("button", { class: "quiet", type: "button", "aria-label": "Close the details", onclick: close }, "✕");
    this.facts = h("dl", { class: "facts" });
    this.story = h("ol", { class: "story" });
    this.axis = h("div", { class: "axis", "aria-hidden": "true" });
    this.rows = h("div", { class: "rows", role: "listbox", "aria-label": "Spans", tabindex: 0, onkeydown: (event) => this._key(event) });
    this.gaps = h("div", { class: "gaps", "aria-hidden": "true" });
    this.span = h("div", { class: "span-details", "aria-live": "polite" });
    this.node = h("aside", { class: "details", "aria-labelledby": "details-title", hidden: true },
      h("header", {}, this.title, this.state, h("span", { class: "grow" }), this.close),
      h("div", { class: "scroll" }, this.facts,
        h("div", { class: "waterfall" }, this.axis, h("div", { class: "lanes" }, this.gaps, this.rows)),
        this.span,
        h("h3", {}, "What happened"), this.story));
  }

  /** Show `request`, null for none. */
  update(request, nowS) {
    this.node.hidden = !request;
    if (!request) {
      this.request = null;
      return;
    }
    if (request === this.request && request.spans === this.spans && isOver(request)) return;
    this.spans = request.spans;
    if (request.id !== this.request?.id) this.selected = -1;
    this.request = request;
    const length = lengthOf(request, nowS);
    setText(this.title, request.id);
    setText(this.state, request.state);
    setAttribute(this.state, "data-state", request.state);
    this._drawFacts(request);
    this._drawAxis(request, length);
    this._drawRows(request, length);
    this._drawSpan(length);
    const story = request.spans ? storyOf(request) : ["Loading…"];
    if (request.forgotten) story.unshift("The coordinator no longer keeps the spans of this request.");
    if (this.story.childElementCount !== story.length || story.some((text, index) => this.story.children[index].textContent !== text)) {
      this.story.replaceChildren(...story.map((text) => h("li", {}, text)));
    }
  }

  _drawFacts(request) {
    const { itl_ms: itl } = request;
    const facts = [
      ["Time to first token", milliseconds(request.ttft_ms)],
      ["Total", request.total_ms === null ? "running" : milliseconds(request.total_ms)],
      ["Inter-token latency", itl ? `${milliseconds(itl.mean)} mean, ${milliseconds(itl.p99)} p99, ${milliseconds(itl.max)} max` : "–"],
      ["Tokens", `${count(request.prompt_tokens)} in (${count(request.cached_tokens)} cached), ${count(request.output_tokens)} out`],
      ["Path", request.path ?? "–"],
      ["Endpoint", `${request.endpoint}${request.stream ? ", stream" : ""}${request.choices > 1 ? `, ${many(request.choices, "choice")}` : ""}`],
      ["Retries, migrations", `${count(request.retries)}, ${count(request.migrations)}`],
      ["Finish", request.finish.filter(Boolean).join(", ") || "–"],
      ["Request id", request.request_id],
      ["Trace id", request.trace_id],
      ["Error", request.error],
    ].filter(([, value]) => value);
    if (this.facts.childElementCount === facts.length) {
      facts.forEach(([name, value], index) => {
        setText(this.facts.children[index].firstChild, name);
        setText(this.facts.children[index].children[1], value);
      });
      return;
    }
    this.facts.replaceChildren(...facts.map(([name, value]) => {
      const long = name.endsWith(" id");
      const button = long ? h("button", { class: "quiet small", type: "button", onclick: () => copy(this.request[name === "Trace id" ? "trace_id" : "request_id"], name) }, "Copy") : null;
      return h("div", { class: long || name === "Error" ? "wide" : null }, h("dt", {}, name), h("dd", { class: long ? "mono" : null }, value), button);
    }));
  }

  _drawAxis(request, length) {
    const marks = ticksOf(length).filter((at) => at < 0.94 * length).map((at) => h("span", { class: "tick", style: { left: percent(at, length) } }, at === 0 ? "0" : milliseconds(at)));
    if (request.ttft_ms !== null && request.ttft_ms <= length) {
      marks.push(h("span", { class: "first", style: { left: percent(request.ttft_ms, length) }, title: `first token after ${milliseconds(request.ttft_ms)}` }));
    }
    this.axis.replaceChildren(...marks);
    const gaps = (request.spans ?? []).filter((span) => toneOf(span) === "loss").map((span) => {
      const gap = h("i");
      place(gap, span.start_ms, endOf(span, length), length);
      return gap;
    });
    if (request.ttft_ms !== null && request.ttft_ms <= length) gaps.push(h("b", { style: { left: percent(request.ttft_ms, length) } }));
    this.gaps.replaceChildren(...gaps);
  }

  _drawRows(request, length) {
    const rows = rowsOf(request);
    const bars = barsOf(request, length);
    while (this.rows.childElementCount > rows.length) this.rows.lastChild.remove();
    rows.forEach((row, index) => {
      let node = this.rows.children[index];
      if (!node) {
        node = h("div", { role: "option", class: "lane", id: `lane-${index}`, onclick: () => this._select(index) },
          h("span", { class: "what" }, h("b"), h("span", { class: "who" })), h("span", { class: "track" }), h("span", { class: "took" }));
        this.rows.append(node);
      }
      this._drawRow(node, row, bars, length, index);
    });
  }

  _drawRow(node, { span, depth, chunks, stalls }, bars, length, index) {
    const [what, track, took] = node.children;
    node.dataset.span = span.name;
    node.style.setProperty("--depth", depth);
    setText(what.firstChild, nameOf(span));
    const who = span.name === "transfer" && span.detail?.to ? `${span.worker ?? "?"} → ${span.detail.to}` : span.name === "place" ? [...new Set([span.detail?.prefill, span.detail?.decode])].filter(Boolean).join(" → ") : toneOf(span) === "loss" && span.detail?.from ? `from ${span.detail.from}` : span.worker;
    setText(what.children[1], who);
    what.title = [nameOf(span), who].filter(Boolean).join(" ");
    const pieces = bars.filter((bar) => bar.span === span).map(({ tone, start, end }) => ({ tone: span.end_ms === null ? `${tone} running` : tone, start, end }));
    if (span.name === "place") pieces.push({ tone: "mark", start: span.start_ms, end: span.start_ms });
    for (const chunk of chunks.slice(1)) pieces.push({ tone: "cut", start: chunk.start_ms, end: chunk.start_ms });
    for (const stall of stalls) pieces.push({ tone: "stall", start: stall.start_ms, end: endOf(stall, length) });
    while (track.childElementCount > pieces.length) track.lastChild.remove();
    while (track.childElementCount < pieces.length) track.append(h("i"));
    pieces.forEach(({ tone, start, end }, at) => {
      track.children[at].className = tone;
      place(track.children[at], start, end, length);
    });
    const words = span.name === "place" ? `at ${milliseconds(span.start_ms)}` : span.end_ms === null ? "running" : milliseconds(span.end_ms - span.start_ms);
    setText(took, words);
    setAttribute(node, "aria-selected", String(index === this.selected));
    setAttribute(node, "aria-label", `${what.title}, from ${milliseconds(span.start_ms)}, ${words}`);
  }

  _drawSpan(length) {
    const row = rowsOf(this.request)[this.selected];
    setAttribute(this.rows, "aria-activedescendant", row ? `lane-${this.selected}` : null);
    if (!row) {
      setText(this.span, this.request.spans?.length ? "Select a span for its details: click it, or use the arrow keys." : "");
      this.shown = null;
      return;
    }
    const { span, chunks, stalls } = row;
    const key = JSON.stringify([this.request.id, row]);
    if (this.shown === key) return;
    this.shown = key;
    const parts = [["start", milliseconds(span.start_ms)], ["end", span.end_ms === null ? "running" : milliseconds(span.end_ms)], ["attempt", count((span.attempt ?? 0) + 1)]];
    if (span.worker) parts.push(["worker", span.worker]);
    for (const [name, value] of Object.entries(span.detail ?? {})) {
      const text = typeof value !== "number" ? String(value ?? "–") : name.endsWith("_ms") ? milliseconds(value) : name === "bytes" ? bytes(value) : count(value);
      parts.push([name.replace(/_ms$/, "").replaceAll("_", " "), text]);
    }
    for (const stall of stalls) parts.push(["stall", `${milliseconds(stall.detail?.gap_ms ?? endOf(stall, length) - stall.start_ms)} at ${milliseconds(stall.start_ms)}`]);
    chunks.forEach((chunk, index) => parts.push([`chunk ${index + 1}`, `${many(chunk.detail?.tokens ?? 0, "token")}, ${milliseconds(endOf(chunk, length) - chunk.start_ms)}`]));
    this.span.replaceChildren(h("h3", {}, nameOf(span)), h("dl", {}, parts.map(([name, value]) => h("div", { class: value.length > 28 ? "wide" : null }, h("dt", {}, name), h("dd", {}, value)))));
  }

  _select(index) {
    this.selected = index;
    [...this.rows.children].forEach((each, at) => setAttribute(each, "aria-selected", String(at === index)));
    this._drawSpan(this.request.total_ms ?? 0);
    this.rows.children[index]?.scrollIntoView({ block: "nearest" });
  }

  _key(event) {
    const last = this.rows.childElementCount - 1;
    const to = { ArrowDown: Math.min(last, this.selected + 1), ArrowUp: Math.max(0, this.selected - 1), Home: 0, End: last }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    event.stopPropagation();
    this._select(to);
  }
}
