// An assistant's answer as it arrives: reasoning, text with log-probabilities, tool calls, and the facts below.

import { count, h, many, milliseconds, setText, NONE } from "./dom.js";

/** Return the class of a token's probability: p0 (sure) to p4 (unlikely). */
function toneOf(logprob) {
  const probability = Math.exp(logprob);
  return probability >= 0.9 ? "p0" : probability >= 0.6 ? "p1" : probability >= 0.3 ? "p2" : probability >= 0.1 ? "p3" : "p4";
}

function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  return value >= 10 ? `${value.toFixed(1)} %` : value >= 0.01 ? `${value.toFixed(2)} %` : "< 0.01 %";
}

/** Write whitespace and control characters of a token so that they can be seen. */
function visible(token) {
  return token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣").replace(/[\u0000-\u001f\u007f]/g, "�") || "∅";
}

/** One box for all answers: the alternatives of the token that is pointed at. */
class Alternatives {
  constructor() {
    this.node = h("div", { class: "alternatives", role: "tooltip", id: "alternatives", hidden: true });
    document.body.append(this.node);
    window.addEventListener("scroll", () => this.hide(), true);
  }

  show(target, entries) {
    const rows = entries.flatMap(({ token, logprob, top_logprobs: top }) => {
      const others = (top ?? []).filter((each) => each.token !== token);
      const line = (each, chosen) => {
        const bar = h("i");
        bar.style.width = `${100 * Math.exp(each.logprob)}%`;
        return h("tr", { class: chosen ? "chosen" : null }, h("td", { class: "token" }, visible(each.token)), h("td", { class: "number" }, percent(each.logprob)), h("td", { class: "number muted" }, (Math.round(100 * each.logprob) / 100 + 0).toFixed(2)), h("td", { class: "meter" }, bar));
      };
      return [line({ token, logprob }, true), ...others.map((each) => line(each, false))];
    });
    this.node.replaceChildren(h("table", {}, h("tbody", {}, rows)));
    this.node.hidden = false;
    const box = target.getBoundingClientRect();
    const own = this.node.getBoundingClientRect();
    const below = box.bottom + own.height + 8 < window.innerHeight;
    this.node.style.left = `${Math.max(8, Math.min(box.left, window.innerWidth - own.width - 8))}px`;
    this.node.style.top = `${Math.max(8, below ? box.bottom + 4 : box.top - own.height - 4)}px`;
  }

  hide() {
    this.node.hidden = true;
  }
}

let alternatives = null;

/** Text that arrives token by token. With log-probabilities each token is a span; the arrow keys walk over them. */
class TokenText {
  constructor() {
    alternatives ??= new Alternatives();
    this.node = h("div", { class: "text" });
    this.value = "";
    this.tail = null;
    this.entries = new WeakMap();
    this.waiting = [];
    this.at = null;
    const point = (event) => this._point(event.target);
    this.node.addEventListener("pointerover", point);
    this.node.addEventListener("click", point);
    this.node.addEventListener("pointerleave", () => this._point(null));
    this.node.addEventListener("blur", () => this._point(null));
    this.node.addEventListener("keydown", (event) => this._key(event));
  }

  /** Add text; `entries`: the log-probabilities of its tokens, empty if they were not asked for. */
  add(text, entries) {
    this.waiting.push(...entries);
    if (!text) return;
    this.value += text;
    if (!this.waiting.length) {
      if (!this.tail) this.node.append((this.tail = document.createTextNode("")));
      this.tail.appendData(text);
      return;
    }
    this.tail = null;
    const least = Math.min(...this.waiting.map(({ logprob }) => logprob));
    const span = h("span", { class: `token ${toneOf(least)}` }, text);
    this.entries.set(span, this.waiting);
    this.waiting = [];
    this.node.append(span);
    if (!this.node.hasAttribute("tabindex")) {
      this.node.tabIndex = 0;
      this.node.setAttribute("role", "group");
      this.node.setAttribute("aria-label", "Answer by tokens: the arrow keys show the alternatives of each");
      this.node.setAttribute("aria-describedby", "alternatives");
    }
  }

  _point(target) {
    this.at?.classList.remove("at");
    this.at = null;
    const entries = target && this.entries.get(target);
    if (!entries) {
      alternatives.hide();
      return;
    }
    this.at = target;
    target.classList.add("at");
    alternatives.show(target, entries);
  }

  _key(event) {
    const spans = this.node.children;
    if (!spans.length) return;
    let to = null;
    if (event.key === "ArrowRight") to = this.at ? this.at.nextElementSibling : spans[0];
    else if (event.key === "ArrowLeft") to = this.at ? this.at.previousElementSibling : spans[spans.length - 1];
    else if (event.key !== "Escape") return;
    event.preventDefault();
    to?.scrollIntoView({ block: "nearest" });
    this._point(to ?? (event.key === "Escape" ? null : this.at));
  }
}

/** A tool call: its name and arguments, and a field for its result. */
class Call {
  constructor() {
    this.id = null;
    this.name = "";
    this.arguments = "";
    this.title = h("code");
    this.shown = h("pre");
    this.node = h("section", { class: "call", "aria-label": "Tool call" }, h("header", {}, h("span", { class: "muted" }, "calls"), this.title), this.shown);
  }

  add({ id, function: called }) {
    this.id ??= id ?? null;
    if (called?.name) setText(this.title, (this.name += called.name));
    this.arguments += called?.arguments ?? "";
    setText(this.shown, this.arguments);
  }

  finish() {
    try {
      setText(this.shown, JSON.stringify(JSON.parse(this.arguments || "{}"), null, 2));
    } catch {
      // cut off: shown as it came
    }
  }

  /** Ask for the result; `given(text)` gets it. */
  ask(given) {
    const input = h("textarea", { rows: 2, placeholder: "The result, as the tool would return it", "aria-label": `Result of ${this.name}` });
    const done = h("button", { type: "button" }, "Use this result");
    const row = h("div", { class: "result" }, input, done);
    done.addEventListener("click", () => {
      row.replaceChildren(h("span", { class: "muted" }, "returned"), h("pre", {}, input.value));
      given(input.value);
    });
    this.node.append(row);
    this.row = row;
  }

  /** Take the field for the result away: the conversation goes on without it. */
  skip() {
    this.row.replaceChildren(h("span", { class: "muted" }, "no result was given"));
  }
}

export class Answer {
  constructor() {
    this.text = new TokenText();
    this.reasoningText = h("div", { class: "reasoning-text" });
    this.reasoningTitle = h("summary", {}, "Reasoning");
    this.reasoning = h("details", { class: "reasoning", hidden: true }, this.reasoningTitle, this.reasoningText);
    this.callList = h("div", { class: "calls" });
    this.calls = [];
    this.problem = h("p", { class: "problem", role: "alert", hidden: true });
    this.facts = h("p", { class: "facts" });
    this.node = h("article", { class: "turn assistant", "aria-label": "Assistant", "aria-busy": "true" }, this.reasoning, this.text.node, this.callList, this.problem, this.facts);
    this.started = performance.now();
    this.firstAt = this.lastAt = null;
    this.tokens = 0;
    this.thought = "";
    this.finish = null;
    this.usage = null;
    this.metrics = null;
    this.id = null;
  }

  /** Take a chunk of the stream that arrived at `at`, in milliseconds of performance.now(). */
  take(chunk, at) {
    this.id ??= chunk.id ?? null;
    this.usage = chunk.usage ?? this.usage;
    this.metrics = chunk.tandem ?? this.metrics;
    const choice = chunk.choices?.find(({ index }) => index === 0); // "n" may be among the other fields
    if (!choice) return;
    const delta = choice.delta ?? {};
    const entries = choice.logprobs?.content ?? [];
    if (choice.finish_reason) this.finish = choice.finish_reason;
    else {
      this.lastAt = at;
      this.firstAt ??= at;
      this.tokens += 1;
    }
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) this._think(thought);
    if (delta.tool_calls?.length) {
      for (const each of delta.tool_calls.slice(0, 64)) this._call(each);
      this.text.waiting = [];
    }
    if (delta.content || (!thought && !delta.tool_calls)) this.text.add(delta.content ?? "", thought ? [] : entries);
  }

  _think(text) {
    if (this.reasoning.hidden) {
      this.reasoning.hidden = false;
      this.reasoning.open = true;
      this.thinking = document.createTextNode("");
      this.reasoningText.append(this.thinking);
    }
    this.thought += text;
    this.thinking.appendData(text);
  }

  _call(delta) {
    const index = delta.index ?? 0;
    if (!this.calls[index]) {
      this.calls[index] = new Call();
      this.callList.append(this.calls[index].node);
    }
    this.calls[index].add(delta);
  }

  /** Write the line below the answer. `path`: what the headers of the response say; `stopped`: whether the user ended it. */
  end({ path, stopped, openWaterfall }) {
    this.node.setAttribute("aria-busy", "false");
    this.calls = this.calls.filter(Boolean);
    for (const call of this.calls) call.finish();
    if (this.thought && this.text.value) this.reasoning.open = false;
    if (this.thought) setText(this.reasoningTitle, `Reasoning (${count(this.thought.length)} characters)`);
    const done = this.usage?.completion_tokens ?? this.tokens;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    const facts = [];
    if (stopped) facts.push("stopped by you");
    else if (this.finish === "length") facts.push("cut at the longest length");
    else if (this.finish && this.finish !== "stop" && this.finish !== "tool_calls") facts.push(`ended by ${this.finish}`);
    if (this.firstAt !== null) facts.push(`first token ${milliseconds(this.metrics?.ttft_ms ?? this.firstAt - this.started)}`);
    facts.push(many(done, "token"));
    // a short answer may arrive in one piece, so the server's own figure is better than the times of its chunks
    const rate = this.metrics?.itl_ms_mean > 0 ? 1000 / this.metrics.itl_ms_mean : done > 1 && seconds > 0 ? (done - 1) / seconds : null;
    if (rate) facts.push(`${rate.toFixed(1)} tokens/s`);
    if (this.usage) facts.push(`prompt ${count(this.usage.prompt_tokens)}${this.usage.prompt_tokens_details?.cached_tokens ? ` (${count(this.usage.prompt_tokens_details.cached_tokens)} cached)` : ""}`);
    if (this.metrics?.prefill || path) facts.push(this.metrics ? [...new Set([this.metrics.prefill, this.metrics.decode])].filter((each) => each && each !== "none").join(" → ") : path);
    this.facts.replaceChildren(facts.filter(Boolean).join(" · ") || NONE);
    if (this.id) this.facts.append(" · ", h("a", { href: `#requests/${encodeURIComponent(this.id)}`, onclick: openWaterfall ?? null }, "waterfall"));
  }

  fail(words) {
    this.problem.hidden = false;
    setText(this.problem, words);
  }

  /** The calls that can be answered: none of an answer that was cut off, whose arguments may be too. */
  wholeCalls() {
    return this.finish === "tool_calls" || this.finish === "stop" ? this.calls.filter((call) => call.id) : [];
  }

  /** The message for the next request, null if there was none. */
  message() {
    const calls = this.wholeCalls();
    if (!this.text.value && !calls.length) return null;
    const message = { role: "assistant", content: this.text.value || null };
    if (calls.length) message.tool_calls = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
    return message;
  }
}
