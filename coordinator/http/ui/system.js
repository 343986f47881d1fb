// The view of the system: rates and latencies over the last minutes, the pools with their workers, and the links.

import { json } from "./api.js";
import { Chart } from "./charts.js";
import { openScale, poolSizes } from "./dialogs.js";
import { clock, count, digits, h, keyed, many, milliseconds, setAttribute, setText, toast, NONE } from "./dom.js";
import { live } from "./live.js";
import { showNotice } from "./notices.js";
import { WorkerCard } from "./workers.js";

const ROLES = [
  ["prefill", "Prefill", "computes prompts, samples the first token"],
  ["decode", "Decode", "takes over the KV cache, streams the rest"],
  ["colocated", "Colocated", "does both"],
];
const MAX_CARDS = 100; // of a pool; those that are not ready come first if there are more
const RANK = new Map(ROLES.map(([role], index) => [role, index]));

class Tile {
  constructor(label, unit) {
    this.value = h("b", {}, NONE);
    this.more = h("span");
    this.bad = h("b", { class: "bad" });
    this.node = h("div", { class: "tile" }, h("span", { class: "label" }, label), h("span", { class: "value" }, this.value, unit ? h("i", {}, unit) : null), h("small", {}, this.more, this.bad));
  }

  /** Show `value`, and below it `more` and what is bad, "" for nothing. */
  set(value, more, bad = "") {
    setText(this.value, value);
    setText(this.more, more);
    setText(this.bad, bad);
  }
}

class Pool {
  constructor(role, name, what) {
    this.role = role;
    this.cards = new Map();
    this.summary = h("span", { class: "summary" });
    this.list = h("div", { class: "cards" });
    this.rest = h("p", { class: "muted rest" });
    this.node = h("section", { class: `pool ${role}`, "aria-label": `${name} pool` },
      h("header", {}, h("h3", { title: what }, name), this.summary),
      this.list, this.rest);
  }

  update(workers) {
    const ready = workers.filter(({ state }) => state === "ready").length;
    const running = workers.reduce((sum, { row, lost }) => sum + (lost ? 0 : (row?.running ?? 0)), 0);
    setText(this.summary, workers.length ? `${ready} of ${workers.length} ready · ${many(running, "sequence")}` : "no workers");
    const shown = workers.length <= MAX_CARDS ? workers : [...workers].sort((a, b) => (a.state === "ready") - (b.state === "ready")).slice(0, MAX_CARDS);
    setText(this.rest, shown.length < workers.length ? `and ${many(workers.length - shown.length, "more worker")}` : "");
    keyed(this.list, this.cards, shown, ({ name }) => name, ({ name }) => new WorkerCard(name));
    setAttribute(this.list, "data-empty", workers.length ? null : "");
  }
}

class LinkRow {
  constructor() {
    this.from = h("span", { class: "name prefill" });
    this.to = h("span", { class: "name decode" });
    this.rate = h("b");
    this.more = h("small");
    this.bar = h("i");
    this.node = h("li", {},
      h("span", { class: "ends" }, this.from, h("span", { class: "arrow", "aria-label": "to" }, "→"), this.to),
      h("span", { class: "rate" }, this.rate),
      h("span", { class: "meter", "aria-hidden": "true" }, this.bar),
      this.more);
  }

  update({ from, to, transport, mb_s: rate, ms, share }) {
    setText(this.from, from);
    setText(this.to, to);
    setText(this.rate, rate === null || rate === undefined ? "not measured" : rate >= 1000 ? `${digits(rate / 1000)} GB/s` : `${digits(rate)} MB/s`);
    setText(this.more, [transport, ms === null || ms === undefined ? null : milliseconds(ms)].filter(Boolean).join(" · "));
    this.bar.style.width = `${100 * share}%`;
  }
}

/** Return a function from the rate of a link to the length of its bar: the fastest link has a whole one. */
function scaleOf(links) {
  const most = Math.max(1e-3, ...links.map(({ mb_s: rate }) => rate ?? 0));
  return (rate) => (rate === null || rate === undefined ? 0 : Math.max(0.01, rate / most));
}

export class SystemView {
  constructor(root) {
    this.root = root;
    this.visible = false;
    this.notice = h("div");
    this.pools = new Map(ROLES.map(([role, name, what]) => [role, new Pool(role, name, what)]));
    this.links = new Map();
    this.linkList = h("ul", { class: "links" });
    this.measure = h("button", { type: "button", class: "quiet small", title: "By trial hand-offs between all pairs, one after another", onclick: () => this._measure() }, "Measure");
    this.linkPanel = h("section", { class: "panel link-panel", "aria-label": "Links" },
      h("header", {}, h("h3", { title: "Measured by trial hand-offs when both workers had joined, or later by the button" }, "KV links"), h("span", { class: "summary" }, "prefill → decode"), this.measure),
      this.linkList);
    this.tiles = {
      requests: new Tile("Requests", "/s"),
      output: new Tile("Output tokens", "/s"),
      prompt: new Tile("Prompt tokens", "/s"),
      ttft: new Tile("Time to first token", null),
      itl: new Tile("Inter-token latency", null),
      queue: new Tile("Queue", null),
    };
    const three = (field) => ["p50", "p90", "p99"].map((label) => ({ label, tone: label, value: (row) => row[field]?.[label] ?? null }));
    this.charts = [
      new Chart({
        title: "Tokens per second",
        format: digits,
        series: [
          { label: "output", tone: "decode", value: (row) => row.output_tokens_s ?? null },
          { label: "prompt", tone: "prefill", value: (row) => row.prompt_tokens_s ?? null },
        ],
      }),
      new Chart({ title: "Time to first token", format: milliseconds, series: three("ttft_ms") }),
      new Chart({ title: "Inter-token latency", format: milliseconds, series: three("itl_ms") }),
      new Chart({
        title: "Requests",
        format: (value) => (Number.isInteger(value) ? count(value) : digits(value)),
        series: [
          { label: "running", tone: "decode", value: (row) => row.running ?? null },
          { label: "waiting", tone: "p99", value: (row) => row.waiting ?? null },
        ],
      }),
    ];
    this.logLines = new Map();
    this.log = h("ol", { class: "log", "aria-label": "Events of workers" });
    this.logPanel = h("section", { class: "panel log-panel", "aria-label": "Worker events", hidden: true }, h("header", {}, h("h3", {}, "Worker events")), this.log);
    this.scale = h("button", { type: "button", id: "scale-button", onclick: () => openScale(poolSizes()) }, "Scale pools…");
    this.body = h("div", { class: "system" },
      h("div", { class: "tiles" }, Object.values(this.tiles).map(({ node }) => node)),
      h("div", { class: "charts" }, this.charts.map(({ node }) => node)),
      h("div", { class: "heading" }, h("h2", {}, "Workers"),
        h("span", { class: "legend kv-legend" },
          h("span", { class: "key held" }, "held"), h("span", { class: "key cached" }, "cached"), h("span", { class: "key free" }, "free"),
          h("span", { class: "muted" }, "KV blocks")),
        h("span", { class: "grow" }), this.scale),
      h("div", { class: "flow" }, this.pools.get("prefill").node, this.linkPanel, this.pools.get("decode").node, this.pools.get("colocated").node),
      this.logPanel);
    root.append(this.notice, this.body);
    live.addEventListener("system", () => this.draw());
    live.addEventListener("status", () => this.draw());
  }

  show(visible) {
    this.visible = visible;
    if (visible) this.draw();
  }

  draw() {
    if (!this.visible) return;
    showNotice(this.notice, "the system", live.system !== null);
    this.body.hidden = !live.system;
    const system = live.system;
    if (!system) return;
    setAttribute(this.body, "data-stale", live.status.state === "live" ? null : "");
    this._drawTiles(system);
    for (const chart of this.charts) chart.update(live.history, system.t);
    this._drawPools(system);
    this._drawLog();
  }

  async _measure() {
    this.measure.disabled = true;
    this.measure.setAttribute("aria-busy", "true");
    try {
      const { links } = await json("admin/links", { body: {}, admin: true });
      toast(`${many(links.length, "link")} measured.`);
    } catch (error) {
      toast(error.needsKey ? `${error.message} Enter the admin key under Keys.` : error.message, "bad");
    } finally {
      this.measure.disabled = false;
      this.measure.removeAttribute("aria-busy");
    }
  }

  _drawLog() {
    const lines = live.workerEvents.map((event) => ({ ...event, key: `${event.t} ${event.name} ${event.state}` }));
    keyed(this.log, this.logLines, lines, ({ key }) => key, (event) => ({ node: logLine(event), update() {} }));
    this.logPanel.hidden = !lines.length;
  }

  _drawTiles({ rates, ttft_ms: ttft, itl_ms: itl, queue, running }) {
    const last = "last minute";
    const refused = rates?.refused_s > 0 ? ` · ${digits(rates.refused_s)}/s refused` : "";
    this.tiles.requests.set(digits(rates?.requests_s), `${count(running)} running`, refused);
    this.tiles.output.set(digits(rates?.output_tokens_s), "last seconds");
    this.tiles.prompt.set(digits(rates?.prompt_tokens_s), "last seconds");
    this.tiles.ttft.set(milliseconds(ttft?.p50), ttft ? `p99 ${milliseconds(ttft.p99)}` : last);
    this.tiles.itl.set(milliseconds(itl?.p50), itl ? `p99 ${milliseconds(itl.p99)}` : last);
    this.tiles.queue.set(count(queue?.requests), queue ? many(queue.tokens, "token") : "");
  }

  _drawPools(system) {
    const byRole = new Map(ROLES.map(([role]) => [role, []]));
    for (const worker of live.workers.values()) byRole.get(RANK.has(worker.role) ? worker.role : roleOf(worker.name)).push(worker);
    for (const [role, workers] of byRole) {
      workers.sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
      const pool = this.pools.get(role);
      pool.update(workers);
      pool.node.hidden = !workers.length && (role === "colocated" || (role === "prefill" && byRole.get("colocated").length > 0));
    }
    this.scale.hidden = byRole.get("colocated").length > 0 && !byRole.get("prefill").length && !byRole.get("decode").length; // no pools
    const links = system.links ?? [];
    const share = scaleOf(links);
    keyed(this.linkList, this.links, links.slice(0, 64).map((link) => ({ ...link, share: share(link.mb_s) })), ({ from, to }) => `${from}\n${to}`, () => new LinkRow());
    this.linkPanel.hidden = !links.length;
    setAttribute(this.body.querySelector(".flow"), "data-links", links.length ? "" : null);
  }
}

function logLine({ name, state, why, t }) {
  return h("li", { "data-state": state }, h("time", {}, clock(t)), h("b", {}, name), h("span", {}, state), h("span", { class: "muted" }, why));
}

/** The role of a worker that was never seen, from the names that tandem up gives. */
function roleOf(name) {
  const role = name.split("-")[0];
  return RANK.has(role) ? role : "colocated";
}
