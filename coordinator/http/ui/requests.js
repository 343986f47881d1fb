// The view of the requests: a list of the recent ones with a waterfall each, and one of them in full.

import { clock, count, h, keyed, milliseconds, setAttribute, setText } from "./dom.js";
import { live } from "./live.js";
import { showNotice } from "./notices.js";
import { TONES, isOver, lengthOf, workersOf } from "./spans.js";
import { Details, MiniWaterfall } from "./waterfall.js";

const SHOWN = 150;
const FILTERS = [
  ["all", "All", () => true],
  ["active", "Running", (request) => !isOver(request)],
  ["moved", "Retried or migrated", ({ retries, migrations }) => retries + migrations > 0],
  ["failed", "Failed or aborted", ({ state }) => state === "failed" || state === "aborted"],
];

class Row {
  constructor(view, { id }) {
    this.id = id;
    this.near = false;
    this.time = h("td", { class: "time" });
    this.name = h("span", { class: "id" });
    this.endpoint = h("small");
    this.path = h("span", { class: "path" });
    this.badge = h("span", { class: "badge" });
    this.where = h("td", { class: "where" }, this.path, this.badge);
    this.mini = new MiniWaterfall();
    this.tokens = h("td", { class: "number tokens" });
    this.ttft = h("td", { class: "number ttft" });
    this.total = h("td", { class: "number total" });
    this.state = h("span", { class: "pill" });
    this.node = h("tr", { tabindex: -1, "data-request": id, onclick: () => view.open(id), onfocus: () => view.focusOn(id) },
      this.time, h("td", { class: "name" }, this.name, this.endpoint), this.where, h("td", { class: "bars" }, this.mini.node),
      this.tokens, this.ttft, this.total, h("td", { class: "outcome" }, this.state));
  }

  update({ request, scale, selected, nowS }) {
    const last = this.last;
    if (last?.request === request && last.scale === scale && last.selected === selected && request.spans && isOver(request)) return;
    this.last = { request, scale, selected };
    setText(this.time, clock(request.arrived));
    setText(this.name, request.id.replace(/^(chatcmpl|cmpl|resp|msg)[-_]/, ""));
    this.name.title = request.id;
    setText(this.endpoint, request.endpoint?.replace(/^\/v1\//, ""));
    const names = workersOf(request);
    const where = names.length ? names.join(" → ") : (request.path ?? "");
    setText(this.path, where);
    this.where.title = where;
    setText(this.badge, [timesOf(request.migrations, "migrated"), timesOf(request.retries, "retried")].filter(Boolean).join(", "));
    this.badge.hidden = this.badge.textContent === "";
    const length = lengthOf(request, nowS);
    this.mini.update(request, scale ?? length, nowS);
    setText(this.tokens, `${count(request.prompt_tokens)} → ${count(request.output_tokens)}`);
    setText(this.ttft, milliseconds(request.ttft_ms));
    setText(this.total, milliseconds(length));
    setText(this.state, request.state);
    setAttribute(this.state, "data-state", request.state);
    this.state.title = request.error ?? request.finish.filter(Boolean).join(", ");
    setAttribute(this.node, "aria-selected", String(selected));
    if (this.near) this.want();
  }

  /** Ask for the spans if they are not known: only of rows that are seen, or nearly. */
  want() {
    if (this.last && !this.last.request.spans) live.want(this.id);
  }
}

export class RequestsView {
  constructor(root) {
    this.visible = false;
    this.selected = null;
    this.focused = null;
    this.rows = new Map();
    this.frozen = null;
    this.drawing = false;
    this.notice = h("div");
    this.search = h("input", { type: "search", id: "request-search", placeholder: "Id, worker, endpoint", "aria-label": "Find requests by id, worker, endpoint or trace id", spellcheck: "false", oninput: () => this.draw(), onkeydown: (event) => event.key === "Enter" && this._find() });
    this.filter = h("select", { "aria-label": "Which requests", onchange: () => this.draw() }, FILTERS.map(([value, label]) => h("option", { value }, label)));
    this.scale = h("select", { "aria-label": "Scale of the waterfalls", onchange: () => this.draw() }, h("option", { value: "own" }, "Each to its own scale"), h("option", { value: "same" }, "All to one scale"));
    this.pause = h("button", { type: "button", "aria-pressed": "false", onclick: () => this._pause() }, "Pause");
    this.summary = h("span", { class: "muted summary", role: "status" });
    const head = ["Arrived", "Request", "Workers", "Waterfall", "Tokens", "TTFT", "Total", "State"];
    this.tbody = h("tbody");
    this.table = h("table", { role: "grid", "aria-label": "Recent requests", onkeydown: (event) => this._key(event) },
      h("thead", {}, h("tr", {}, head.map((each) => h("th", { scope: "col", class: `head-${each.toLowerCase()}` }, each)))), this.tbody);
    this.empty = h("p", { class: "muted empty" });
    this.problem = h("p", { class: "problem", role: "status" });
    this.details = new Details(() => this.open(null));
    const scroll = h("div", { class: "scroll" }, this.table, this.empty);
    this.observer = new IntersectionObserver((entries) => this._seen(entries), { root: scroll, rootMargin: "200px" });
    const legend = h("div", { class: "legend" }, TONES.map(([tone, label]) => h("span", { class: `key span ${tone}` }, label)));
    this.body = h("div", { class: "requests" },
      h("div", { class: "list" },
        h("div", { class: "tools" }, this.search, this.filter, this.scale, this.pause, this.summary),
        legend,
        this.problem,
        scroll),
      this.details.node);
    root.append(this.notice, this.body);
    root.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.selected && event.target !== this.search) this.open(null);
    });
    document.addEventListener("keydown", (event) => this._keyElsewhere(event));
    live.addEventListener("requests", () => this.later());
    live.addEventListener("status", () => this.later());
    live.addEventListener("system", () => this.later()); // running ones grow
  }

  /** Show or hide the view; `id`: the request that the address names. */
  show(visible, id) {
    this.visible = visible;
    if (!visible) return;
    this.selected = id || null;
    this.draw();
  }

  /** Select a request (null: none) and name it in the address. */
  open(id) {
    const before = this.selected;
    location.replace(id ? `#requests/${encodeURIComponent(id)}` : "#requests");
    this.selected = id;
    this.draw();
    if (id) this.rows.get(id)?.node.focus({ preventScroll: true });
    else if (before) this.rows.get(before)?.node.focus();
  }

  focusOn(id) {
    const before = this.rows.get(this.focused);
    if (before) before.node.tabIndex = -1;
    this.focused = id;
    const row = this.rows.get(id);
    if (row) row.node.tabIndex = 0;
  }

  /** Draw in the next frame, once for all changes until then. */
  later() {
    if (!this.visible || this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      this.draw();
    });
  }

  draw() {
    if (!this.visible) return;
    const all = this.frozen ?? [...live.requests.values()];
    showNotice(this.notice, "the requests", all.length > 0 || live.status.state === "live" || live.system !== null);
    this.body.hidden = this.notice.childElementCount > 0;
    if (this.body.hidden) return;
    const nowS = this.frozenAt ?? live.now();
    const words = this.search.value.trim().toLowerCase();
    if (words) for (const each of all) if (!each.spans) live.want(each.id); // workers are found in spans
    const [, , wanted] = FILTERS.find(([value]) => value === this.filter.value);
    const found = all.filter((request) => wanted(request) && (!words || textOf(request).includes(words)));
    found.sort((a, b) => b.arrived - a.arrived || (a.id < b.id ? 1 : -1));
    const shown = found.slice(0, SHOWN);
    const scale = this.scale.value === "same" ? Math.max(1, ...shown.map((each) => lengthOf(each, nowS))) : null;
    const items = shown.map((request) => ({ request, scale, selected: request.id === this.selected, nowS }));
    keyed(this.tbody, this.rows, items, ({ request }) => request.id, ({ request }) => this._row(request));
    if (!this.rows.has(this.focused) && shown.length) this.focusOn(shown[0].id);
    const running = all.filter((each) => !isOver(each)).length;
    setText(this.summary, `${count(found.length)} of ${count(all.length)} kept${running ? `, ${count(running)} running` : ""}${this.frozen ? ", paused" : ""}`);
    this.found = shown;
    setText(this.empty, shown.length ? "" : words && this.filter.value === "all" ? "No request fits. Enter asks the coordinator for the one with this id." : all.length ? "No request fits the filter." : "No request yet. Send one in the chat, and it appears here.");
    const chosen = this.selected ? (all.find((each) => isNamed(each, this.selected)) ?? [...live.requests.values()].find((each) => isNamed(each, this.selected))) : null;
    this.details.update(chosen ?? null, nowS);
    setAttribute(this.body, "data-open", chosen ? "" : null);
    if (chosen && this.scrolled !== chosen.id && this.rows.has(chosen.id)) this.rows.get(chosen.id).node.scrollIntoView({ block: "nearest" });
    if (!chosen || this.rows.has(chosen.id)) this.scrolled = chosen?.id ?? null;
    if (this.selected && !chosen?.spans) live.want(this.selected);
    const unknown = this.selected !== null && !chosen && live.unknown.has(this.selected);
    setText(this.problem, unknown ? `The coordinator does not know the request ${this.selected}: it keeps those that run and the last ones that ended.` : "");
  }

  /** Open the only request that fits the search; without one, ask for that with this id: of many requests per second the
   * page is sent only some. */
  _find() {
    const id = this.search.value.trim();
    if (!id || this.found?.length > 1) return;
    if (!this.found?.length) live.ask(id);
    this.open(this.found?.[0]?.id ?? id);
    this.search.focus();
  }

  _row(request) {
    const row = new Row(this, request);
    this.observer.observe(row.node);
    return row;
  }

  _seen(entries) {
    for (const { target, isIntersecting } of entries) {
      const row = this.rows.get(target.dataset.request);
      if (!row) this.observer.unobserve(target); // it was removed
      else if ((row.near = isIntersecting)) row.want();
    }
  }

  _pause() {
    this.frozen = this.frozen ? null : [...live.requests.values()];
    this.frozenAt = this.frozen ? live.now() : null;
    setText(this.pause, this.frozen ? "Go on" : "Pause");
    setAttribute(this.pause, "aria-pressed", String(this.frozen !== null));
    this.draw();
  }

  /** Keys while the focus is not in the list: the first one brings it there. */
  _keyElsewhere(event) {
    if (!this.visible || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea, select, dialog, tbody, [role=listbox]")) return;
    const moves = ["j", "k"].includes(event.key) || (event.target === document.body && ["ArrowDown", "ArrowUp"].includes(event.key));
    if (event.key === "/") this.search.focus();
    else if (moves) this.rows.get(this.focused)?.node.focus();
    else return;
    event.preventDefault();
  }

  _key(event) {
    const nodes = [...this.tbody.children];
    const at = nodes.indexOf(document.activeElement);
    if (at < 0) return;
    const last = nodes.length - 1;
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, j: at + 1, k: at - 1, Home: 0, End: last, PageDown: at + 10, PageUp: at - 10 }[event.key];
    if (event.key === "Enter" || event.key === " ") this.open(nodes[at].dataset.request);
    else if (event.key === "/") this.search.focus();
    else if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    else {
      const node = nodes[Math.max(0, Math.min(last, to))];
      node.focus();
      if (this.selected) this.open(node.dataset.request);
    }
    event.preventDefault();
  }
}

/** Whether `id` is that of the request's answer, or its x-request-id. */
function isNamed(request, id) {
  return request.id === id || request.request_id === id;
}

function textOf(request) {
  return [request.id, request.request_id, request.trace_id, request.endpoint, request.state, ...workersOf(request)].join(" ").toLowerCase();
}

function timesOf(number, word) {
  return number > 1 ? `${word} ${count(number)} times` : number ? word : null;
}
