// The parameters of a chat: the form beside it, and the fields of the request that they become.

import { h, setText } from "./dom.js";

const STORED = "tandem-parameters";
const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a city.",
      parameters: { type: "object", properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } }, required: ["city"] },
    },
  },
];

/** Numbers: the field of the request, its label, and its range. An empty one is left out. */
const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }],
  ["max_tokens", "Longest answer (tokens)", { min: 1, step: 1 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "Top k", { min: -1, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["seed", "Seed", { step: 1 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.01, max: 100, step: "any" }],
];

/** The form. `node` is its element. */
export class Parameters {
  constructor() {
    this.fields = new Map();
    const field = (name, label, input, help) => {
      input.id = `p-${name}`;
      this.fields.set(name, input);
      return h("div", { class: "field" }, h("label", { for: input.id }, label), input, help ? h("small", {}, help) : null);
    };
    const number = ([name, label, range]) => field(name, label, h("input", { type: "number", inputmode: "decimal", placeholder: "default", ...range }));
    const area = (rows, placeholder) => h("textarea", { rows, placeholder, spellcheck: "false" });
    this.logprobs = h("input", { type: "checkbox", id: "p-logprobs" });
    this.tokens = h("input", { type: "range", id: "p-top-logprobs", min: 0, max: 20, value: 5, "aria-label": "Alternatives per token" });
    this.tokensSaid = h("output", { for: "p-top-logprobs" }, "5");
    this.tokens.addEventListener("input", () => setText(this.tokensSaid, this.tokens.value));
    const fold = (title, ...content) => h("details", {}, h("summary", {}, title), ...content);
    const select = (...options) => h("select", {}, options.map(([value, label]) => h("option", { value }, label)));
    this.node = h("form", { class: "parameters", "aria-label": "Parameters", novalidate: true },
      field("system", "System prompt", h("textarea", { rows: 3, placeholder: "None" })),
      h("div", { class: "grid" }, NUMBERS.slice(0, 2).map(number)),
      h("div", { class: "field" },
        h("label", { class: "check", for: "p-logprobs" }, this.logprobs, " Log-probabilities"),
        h("div", { class: "range" }, this.tokens, this.tokensSaid),
        h("small", {}, "Colours each token by its probability. Point at one for the alternatives.")),
      fold("Sampling", h("div", { class: "grid" }, NUMBERS.slice(2).map(number)), field("stop", "Stop strings, one per line", area(2, "none"))),
      fold("Reasoning",
        field("thinking", "Reasoning", select(["", "As the model does by default"], ["true", "On"], ["false", "Off"])),
        field("reasoning_effort", "Effort", select(["", "default"], ["low", "low"], ["medium", "medium"], ["high", "high"]), "For models whose template knows it.")),
      fold("Tools",
        field("tools", "Tools (JSON array)", area(6, "none")),
        h("button", { type: "button", class: "small", onclick: () => this._example() }, "Insert an example"),
        field("tool_choice", "Tool choice", select(["", "auto"], ["none", "none"], ["required", "required"]))),
      fold("Output format",
        field("format", "Format", select(["", "Text"], ["json_object", "JSON"], ["json_schema", "JSON by the schema below"])),
        field("schema", "JSON schema", area(5, "none"))),
      fold("Other fields", field("other", "Fields of the request (JSON object)", area(4, '{"min_tokens": 8}'), "They override the fields above.")),
    );
    this.node.addEventListener("input", () => this._store());
    this.node.addEventListener("submit", (event) => event.preventDefault());
    this._restore();
  }

  get system() {
    return this.fields.get("system").value;
  }

  /** Return the fields of the request. Raises Error with words if one is not valid, and focuses it. */
  body() {
    const body = {};
    for (const [name, label] of NUMBERS) {
      const input = this.fields.get(name);
      if (!input.checkValidity()) this._refuse(input, `${label}: ${input.validationMessage}`);
      if (input.value !== "") body[name] = Number(input.value);
    }
    if (this.logprobs.checked) Object.assign(body, { logprobs: true, top_logprobs: Number(this.tokens.value) });
    const value = (name) => this.fields.get(name).value;
    const stops = value("stop").split("\n").filter(Boolean);
    if (stops.length) body.stop = stops;
    if (value("thinking")) body.enable_thinking = value("thinking") === "true";
    if (value("reasoning_effort")) body.reasoning_effort = value("reasoning_effort");
    const tools = this._json("tools", "Tools", Array.isArray, "a JSON array");
    if (tools?.length) {
      body.tools = tools;
      if (value("tool_choice")) body.tool_choice = value("tool_choice");
    }
    const isObject = (found) => typeof found === "object" && found !== null && !Array.isArray(found);
    if (value("format") === "json_schema") {
      const schema = this._json("schema", "JSON schema", isObject, "a JSON object");
      if (!schema) this._refuse(this.fields.get("schema"), "JSON schema: it is empty.");
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    } else if (value("format")) body.response_format = { type: value("format") };
    return { ...body, ...this._json("other", "Other fields", isObject, "a JSON object") };
  }

  _json(name, label, fits, what) {
    const input = this.fields.get(name);
    if (!input.value.trim()) return null;
    let found;
    try {
      found = JSON.parse(input.value);
    } catch (error) {
      this._refuse(input, `${label}: ${error.message}`);
    }
    if (!fits(found)) this._refuse(input, `${label}: this is not ${what}.`);
    return found;
  }

  _refuse(input, words) {
    const fold = input.closest("details");
    if (fold) fold.open = true;
    input.setAttribute("aria-invalid", "true");
    input.addEventListener("input", () => input.removeAttribute("aria-invalid"), { once: true });
    input.focus();
    throw new Error(words);
  }

  _example() {
    const tools = this.fields.get("tools");
    if (!tools.value.trim()) tools.value = JSON.stringify(EXAMPLE_TOOLS, null, 2);
    tools.focus();
    this._store();
  }

  _store() {
    try {
      const values = Object.fromEntries([...this.fields].map(([name, input]) => [name, input.value]));
      sessionStorage.setItem(STORED, JSON.stringify({ ...values, logprobs: this.logprobs.checked, top: this.tokens.value }));
    } catch {
      // storage is off
    }
  }

  _restore() {
    try {
      const stored = JSON.parse(sessionStorage.getItem(STORED) ?? "null");
      if (!stored) return;
      for (const [name, input] of this.fields) input.value = stored[name] ?? "";
      this.logprobs.checked = stored.logprobs === true;
      this.tokens.value = stored.top ?? 5;
      setText(this.tokensSaid, this.tokens.value);
    } catch {
      // storage is off
    }
  }
}
