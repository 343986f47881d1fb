// One worker as a card: state, KV blocks as a filled bar, batch and queue.

import { Spark } from "./charts.js";
import { openDrain } from "./dialogs.js";
import { bytes, count, digits, h, setAttribute, setText } from "./dom.js";
import { live } from "./live.js";

const WORDS = { ready: "ready", joining: "joining", draining: "draining", lost: "lost", left: "left" };

export class WorkerCard {
  constructor(name) {
    this.state = h("span", { class: "state" });
    this.held = h("i", { class: "held" });
    this.cached = h("i", { class: "cached" });
    this.kv = h("div", { class: "kv", role: "img" }, this.held, this.cached);
    this.blocks = h("span", { class: "blocks" });
    this.batch = h("b");
    this.waiting = h("b");
    this.spark = new Spark();
    this.why = h("p", { class: "why" });
    this.machine = h("small", { class: "machine" });
    this.gpus = h("ul", { class: "gpus" });
    this.avoids = h("p", { class: "avoids" });
    this.drain = h("button", { class: "quiet small", type: "button", "aria-label": `Drain ${name}`, onclick: () => openDrain(name) }, "Drain");
    this.seen = 0;
    this.node = h("article", { class: "worker", "data-worker": name },
      h("header", {}, h("span", { class: "dot", "aria-hidden": "true" }), h("h4", {}, name), this.state, h("span", { class: "grow" }), this.drain),
      this.why,
      h("div", { class: "meters" },
        this.kv,
        this.blocks,
        h("dl", {}, h("div", {}, h("dt", {}, "batch"), h("dd", {}, this.batch)), h("div", {}, h("dt", {}, "waiting"), h("dd", {}, this.waiting)), this.spark.node)),
      this.machine, this.gpus, this.avoids);
  }

  update({ name, row, state, why, restartAt, lost }) {
    setAttribute(this.node, "data-state", state);
    setAttribute(this.node, "aria-label", `${name}, ${WORDS[state] ?? state}`);
    setText(this.state, WORDS[state] ?? state);
    const back = lost && restartAt ? Math.max(0, Math.ceil(restartAt - live.now())) : null;
    setText(this.why, [why, back === null ? null : back ? `restarts in ${back} s` : "restarting"].filter(Boolean).join(" · "));
    this.why.hidden = this.why.textContent === "";
    this.drain.disabled = lost || state === "draining";
    setAttribute(this.node, "data-bare", row ? null : "");
    if (!row) return;
    const { total, held, cached, free } = row.kv_blocks;
    const share = (blocks) => (total ? `${(100 * blocks) / total}%` : "0");
    this.held.style.width = share(lost ? 0 : held);
    this.cached.style.width = share(lost ? 0 : cached);
    const words = lost ? `${count(total)} KV blocks` : `${count(held)} held · ${count(cached)} cached · ${count(free)} free`;
    setText(this.blocks, words);
    setAttribute(this.kv, "aria-label", lost ? "KV blocks: lost" : `KV blocks: ${words}, of ${count(total)}`);
    const batch = lost ? 0 : row.running;
    setText(this.batch, count(batch));
    setText(this.waiting, lost ? "0" : count(row.waiting));
    if (live.system.t !== this.seen) {
      this.seen = live.system.t;
      this.spark.push(batch);
    }
    const parts = [row.device, row.dtype, row.host, row.pid ? `pid ${row.pid}` : null];
    setText(this.machine, parts.filter(Boolean).join(" · "));
    this._drawGpus(lost ? [] : (row.gpus ?? []));
    setText(this.avoids, !lost && row.avoids?.length ? `hands off no KV to ${row.avoids.join(", ")} for now` : "");
  }

  _drawGpus(gpus) {
    while (this.gpus.childElementCount > gpus.length) this.gpus.lastChild.remove();
    while (this.gpus.childElementCount < gpus.length) this.gpus.append(h("li", {}, h("span"), h("b")));
    gpus.forEach((gpu, index) => {
      const [state, trouble] = this.gpus.children[index].children;
      setText(state, gpuWords(gpu));
      setText(trouble, [...(gpu.throttled_by ?? []).map((each) => each.replaceAll("_", " ")), ...Object.entries(gpu.xids ?? {}).map(([xid, times]) => `Xid ${xid} × ${times}`)].join(", "));
      this.gpus.children[index].title = gpu.name;
    });
  }
}

/** One GPU in words; what its card does not report is left out. */
function gpuWords({ index, utilization, memory_used: used, memory_total: total, power_mw: power, temperature }) {
  const there = (value) => value !== null && value !== undefined;
  const parts = [`GPU ${index}`];
  if (there(utilization)) parts.push(`${utilization} %`);
  if (there(used) && there(total)) parts.push(`${digits(used / 1e9)} of ${bytes(total)}`);
  if (there(temperature)) parts.push(`${temperature} °C`);
  if (there(power)) parts.push(`${Math.round(power / 1000)} W`);
  return parts.join(" · ");
}
