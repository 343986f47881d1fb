// The chat: the conversation, the field below it, and one request at a time that can be stopped.

import { Answer } from "./answer.js";
import { ApiError, address, events, json, keys, send } from "./api.js";
import { copy, h, setText } from "./dom.js";
import { openKeys } from "./dialogs.js";
import { Parameters } from "./parameters.js";

const SUGGESTIONS = ["Explain in two sentences why prefill and decode run on separate workers.", "Count from one to twenty in words.", "Tell me a short story about two cyclists."];

export class ChatView {
  /** `loaded` is called when the server has answered which model it serves, or has refused to. */
  constructor(root, loaded) {
    this.messages = [];
    this.turns = []; // {node, from}: `from` is the number of messages before the turn
    this.running = null;
    this.pending = null; // tool calls that wait for results: {calls, results}, results by id
    this.arrived = []; // chunks that are not drawn yet
    this.drawing = false;
    this.model = null;
    this.trouble = null; // the error of the last request for the model
    this.loaded = loaded;
    this.parameters = new Parameters();
    this.log = h("div", { class: "conversation", role: "log", "aria-label": "Conversation", "aria-live": "polite" });
    this.empty = h("div", { class: "hello" });
    this.scroller = h("div", { class: "scroller", tabindex: -1 }, this.empty, this.log);
    this.input = h("textarea", { id: "prompt", rows: 1, placeholder: "Message", "aria-label": "Message", oninput: () => this._grow(), onkeydown: (event) => this._key(event) });
    this.sendButton = h("button", { class: "primary", type: "submit", id: "send" }, "Send");
    this.stopButton = h("button", { class: "danger", type: "button", id: "stop", hidden: true, onclick: () => this.stop() }, "Stop");
    this.problem = h("p", { class: "problem", role: "alert" });
    const form = h("form", { class: "composer", onsubmit: (event) => (event.preventDefault(), this.submit()) },
      this.problem,
      h("div", { class: "box" }, this.input, this.sendButton, this.stopButton),
      h("div", { class: "under" },
        h("small", { class: "muted hint" }, "Enter sends, Shift+Enter makes a new line, Escape stops."),
        h("span", { class: "grow" }),
        h("button", { type: "button", class: "quiet small parameters-button", "aria-controls": "parameters", "aria-expanded": "false", onclick: (event) => this._toggle(event.currentTarget) }, "Parameters"),
        h("button", { type: "button", class: "quiet small curl", onclick: () => this._curl() }, "Copy as curl"),
        h("button", { type: "button", class: "quiet small", id: "again", onclick: () => this.again() }, "Answer again"),
        h("button", { type: "button", class: "quiet small", id: "clear", onclick: () => this.clear() }, "New chat")));
    this.side = h("aside", { class: "side", id: "parameters", "aria-label": "Parameters" }, h("header", {}, h("h2", {}, "Parameters"), h("button", { type: "button", class: "quiet small close", "aria-label": "Close the parameters", onclick: () => this._toggle(root.querySelector(".parameters-button")) }, "✕")), this.parameters.node);
    this.root = h("div", { class: "chat" }, h("div", { class: "talk" }, this.scroller, form), this.side);
    root.append(this.root);
    root.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      if (this.root.hasAttribute("data-parameters")) this._toggle(root.querySelector(".parameters-button"));
      else if (this.running) this.stop();
    });
    this.drawEmpty();
    this.load();
  }

  show(visible) {
    if (visible && matchMedia("(min-width: 700px)").matches) this.input.focus({ preventScroll: true });
  }

  /** Ask which model is served; the answer also shows whether a key is needed. */
  async load() {
    try {
      const listed = await json("v1/models");
      this.model = listed.data[0];
      this.trouble = null;
    } catch (error) {
      this.trouble = error;
    }
    setText(document.getElementById("model"), this.model?.id);
    this.drawEmpty();
    this.loaded();
    return this.trouble;
  }

  /** Whether the server answers the chat with the keys that are there, or without one. */
  get open() {
    return this.model !== null && this.trouble === null;
  }

  drawEmpty() {
    this.empty.hidden = this.turns.length > 0;
    if (this.trouble?.needsKey) {
      const wrong = keys.client || keys.admin;
      this.empty.replaceChildren(h("h2", {}, wrong ? "The key is refused" : "An API key is needed"),
        h("p", {}, wrong ? `${this.trouble.message} Enter another one.` : "This server answers only clients that have a key. It stays in this tab."),
        h("button", { class: "primary", type: "button", onclick: () => openKeys("client") }, "Enter the key"));
    } else if (this.trouble) {
      this.empty.replaceChildren(h("h2", {}, "The coordinator does not answer"), h("p", {}, this.trouble.message), h("button", { type: "button", onclick: () => this.load() }, "Try again"));
    } else {
      this.empty.replaceChildren(h("h2", {}, this.model ? `Chat with ${this.model.id}` : "Chat"),
        h("p", {}, this.model ? `Up to ${this.model.max_model_len.toLocaleString("en")} tokens of prompt and answer.` : "Connecting…"),
        h("div", { class: "suggestions" }, SUGGESTIONS.map((text) => h("button", { type: "button", onclick: () => this.submit(text) }, text))));
    }
  }

  submit(given) {
    const text = (given ?? this.input.value).trim();
    if (this.running || !text) return;
    if (!this._ask({ role: "user", content: text })) return;
    this.input.value = "";
    this._grow();
  }

  /** Remove the last answer and ask for it anew. */
  again() {
    if (this.running) return;
    const last = this.turns.findLast((turn) => turn.answer);
    if (!last) return;
    this.pending = null;
    this.turns.splice(this.turns.indexOf(last)).forEach(({ node }) => node.remove());
    this.messages.length = last.from;
    this._ask(null);
  }

  clear() {
    this.stop();
    this.messages = [];
    this.turns = [];
    this.pending = null;
    this.log.replaceChildren();
    setText(this.problem, "");
    this.drawEmpty();
    this.input.focus();
  }

  stop() {
    this.running?.abort();
  }

  /** Add `message` (null: none) and ask for an answer. Returns false if a parameter is not valid. */
  _ask(message) {
    let body;
    setText(this.problem, "");
    const added = [...this._results(), ...(message ? [message] : [])];
    try {
      body = this._body([...this.messages, ...added]);
    } catch (error) {
      setText(this.problem, error.message);
      return false;
    }
    for (const call of this.pending?.calls ?? []) if (!this.pending.results.has(call.id)) call.skip();
    this.pending = null;
    for (const each of added) this._add(each);
    this._run(body);
    return true;
  }

  _add(message) {
    const from = this.messages.length;
    this.messages.push(message);
    if (message.role !== "user") return;
    const node = h("article", { class: "turn user", "aria-label": "You" }, h("div", { class: "text" }, message.content));
    this.turns.push({ node, from });
    this.log.append(node);
  }

  _body(messages) {
    const system = this.parameters.system.trim() ? [{ role: "system", content: this.parameters.system }] : [];
    const body = { model: this.model?.id, messages: [...system, ...messages], stream: true, stream_options: { include_usage: true }, return_metrics: true };
    return { ...body, ...this.parameters.body(), stream: true };
  }

  async _run(body) {
    const answer = new Answer();
    this.turns.push({ node: answer.node, from: this.messages.length, answer });
    this.log.append(answer.node);
    this.empty.hidden = true;
    this._follow(true);
    const run = (this.running = new AbortController());
    this._buttons();
    let path = "";
    let complete = false;
    try {
      const response = await send("v1/chat/completions", { body, signal: run.signal });
      path = [response.headers.get("x-tandem-prefill"), response.headers.get("x-tandem-decode")].filter((each) => each && each !== "none").join(" → ");
      for await (const { data } of events(response)) {
        if (data === "[DONE]") {
          complete = true;
          break;
        }
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(response.status, chunk.error.message, { code: chunk.error.code });
        this._later(answer, chunk);
      }
      if (!complete) answer.fail("The connection ended before the answer did.");
    } catch (error) {
      if (!run.signal.aborted) this._fail(answer, error);
    }
    this._draw();
    if (this.running === run) this.running = null;
    answer.end({ path, stopped: run.signal.aborted });
    if (this.turns.some((turn) => turn.answer === answer)) this._keep(answer);
    this._buttons();
    this._follow(false);
  }

  /** Draw a chunk in the next frame, with all others that arrive until then. */
  _later(answer, chunk) {
    this.arrived.push([answer, chunk, performance.now()]);
    if (this.drawing) return;
    this.drawing = true;
    if (document.hidden) setTimeout(() => this._draw(), 250); // a hidden tab has no frames
    else requestAnimationFrame(() => this._draw());
  }

  _draw() {
    this.drawing = false;
    const arrived = this.arrived.splice(0);
    if (!arrived.length) return;
    const ends = this._atEnd();
    for (const [answer, chunk, at] of arrived) answer.take(chunk, at);
    if (ends) this._follow(true);
  }

  _fail(answer, error) {
    if (!(error instanceof ApiError)) {
      if (!(error instanceof TypeError)) console.error(error);
      answer.fail("The connection to the coordinator broke.");
      return;
    }
    const wait = error.retryAfterMs ? ` It says to try again in ${Math.ceil(error.retryAfterMs / 1000)} s.` : "";
    answer.fail(`${error.message}${wait}`);
    if (!error.needsKey) return;
    answer.problem.append(" ", h("button", { type: "button", class: "small", onclick: () => openKeys("client") }, "Enter the key"));
  }

  /** Keep the answer for the next request, and ask for the results of its tool calls. */
  _keep(answer) {
    const message = answer.message();
    if (!message) return;
    this.messages.push(message);
    const calls = answer.wholeCalls();
    if (!calls.length) return;
    const pending = (this.pending = { calls, results: new Map() });
    for (const call of calls) {
      call.ask((text) => {
        pending.results.set(call.id, text);
        if (pending.results.size === calls.length && this.pending === pending) this._ask(null);
      });
    }
  }

  /** The messages with the results of the last tool calls; each call has one, since models and servers want it so. */
  _results() {
    const { calls, results } = this.pending ?? { calls: [] };
    return calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: results.get(id) ?? "No result: the call was not made." }));
  }

  _buttons() {
    const running = this.running !== null;
    const focused = document.activeElement === this.sendButton || document.activeElement === this.stopButton;
    this.sendButton.hidden = running;
    this.stopButton.hidden = !running;
    if (focused) (running ? this.stopButton : this.input).focus();
  }

  /** Scroll to the end if it is near; `always`: in any case. */
  _follow(always) {
    if (always || this._atEnd()) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  _atEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight < 120;
  }

  _grow() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight, 220)}px`;
  }

  _key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.submit();
  }

  _toggle(button) {
    const open = this.root.toggleAttribute("data-parameters");
    button.setAttribute("aria-expanded", String(open));
    if (open) this.side.querySelector("textarea").focus();
    else button.focus();
  }

  _curl() {
    let body;
    try {
      const text = this.input.value.trim();
      const messages = [...this.messages, ...this._results()];
      body = this._body(text ? [...messages, { role: "user", content: text }] : messages);
    } catch (error) {
      setText(this.problem, error.message);
      return;
    }
    const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
    const key = keys.client || keys.admin ? ' -H "authorization: Bearer $TANDEM_API_KEY"' : "";
    copy(`curl -N ${address("v1/chat/completions")} -H 'content-type: application/json'${key} -d '${quoted}'`, "The request");
  }
}
