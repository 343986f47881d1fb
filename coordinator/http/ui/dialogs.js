// Modal dialogs: a frame for all, the keys, and the two admin actions.

import { json, keys, send } from "./api.js";
import { h, setText, toast } from "./dom.js";
import { live } from "./live.js";

/**
 * Show a modal dialog with a form. `submit` runs when the form is sent, and its errors are shown; the dialog closes when
 * it is done, unless it returns false. Escape closes it, which aborts what runs.
 */
export function openDialog({ title, content, action, tone = "primary", submit }) {
  const abort = new AbortController();
  const problem = h("p", { class: "problem", role: "alert" });
  const go = h("button", { class: tone, type: "submit" }, action);
  const cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const form = h("form", { novalidate: true }, h("h2", { id: "dialog-title" }, title), content, problem, h("footer", {}, cancel, go));
  const dialog = h("dialog", { "aria-labelledby": "dialog-title", onclose: () => (abort.abort(), dialog.remove()) }, form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const wrong = [...form.elements].find((each) => !each.checkValidity());
    if (wrong) {
      setText(problem, `${wrong.labels?.[0]?.textContent ?? "A field"}: ${wrong.validationMessage}`);
      wrong.focus();
      return;
    }
    setText(problem, "");
    go.disabled = true;
    go.setAttribute("aria-busy", "true");
    try {
      if ((await submit(abort.signal)) !== false) dialog.close();
    } catch (error) {
      if (error.name !== "AbortError") setText(problem, error.needsKey ? `${error.message} Enter the admin key under Keys.` : error.message);
    } finally {
      go.disabled = false;
      go.removeAttribute("aria-busy");
    }
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

// -- keys ------------------------------------------------------------------------------------------------------------

let waitingForKey = () => {};

/** Call `callback` when keys have changed. */
export function onKeys(callback) {
  waitingForKey = callback;
}

/** Ask for the keys; they are tried before they are taken. `focus`: "client" or "admin". */
export function openKeys(focus = "client") {
  const field = (id, label, help, value) => {
    const said = h("span", { class: "said", id: `${id}-said` });
    const input = h("input", {
      id, type: "password", autocomplete: "off", spellcheck: "false", "aria-describedby": `${id}-help ${id}-said`, value,
    });
    const node = h("div", { class: "field" }, h("label", { for: id }, label), input, said, h("small", { id: `${id}-help` }, help));
    return { input, said, node };
  };
  const client = field("client-key", "API key", "For the chat: --api-key or a line of --api-key-file.", keys.client);
  const admin = field("admin-key", "Admin key", "For the system, the requests, draining and scaling: --admin-api-key. Without one, the API key opens them too.", keys.admin);
  const kept = h("input", { type: "checkbox", id: "keep-keys" });
  kept.checked = keys.kept;
  const dialog = openDialog({
    title: "Keys",
    content: [
      client.node,
      admin.node,
      h("label", { class: "check", for: "keep-keys" }, kept, " Keep until this tab is closed (else until it is reloaded)"),
    ],
    action: "Use these keys",
    async submit(signal) {
      const tried = await Promise.all([
        attempt(client, "v1/models", client.input.value.trim(), signal),
        attempt(admin, "admin/workers", admin.input.value.trim(), signal),
      ]);
      if (tried.includes(false)) return false;
      keys.set(client.input.value.trim(), admin.input.value.trim(), kept.checked);
      toast("The keys are in use.");
      waitingForKey();
      return true;
    },
  });
  (focus === "admin" ? admin : client).input.focus();
  return dialog;
}

async function attempt({ input, said }, path, key, signal) {
  setText(said, "");
  input.removeAttribute("aria-invalid");
  if (!key) return true;
  try {
    await json(path, { given: key, signal });
    return true;
  } catch (error) {
    if (error.name === "AbortError" || !error.needsKey) throw error;
    setText(said, error.status === 403 ? "This is a client's key: it does not open /admin." : "The server refuses this key.");
    input.setAttribute("aria-invalid", "true");
    input.focus();
    return false;
  }
}

// -- admin actions ---------------------------------------------------------------------------------------------------

/** Ask how to drain a worker, and do it. */
export function openDrain(name) {
  const seconds = h("input", { id: "drain-timeout", type: "number", min: 0, max: 86400, step: "any", placeholder: "as configured" });
  openDialog({
    title: `Drain ${name}?`,
    content: [
      h("p", {}, "It takes no new requests and exits when its running ones are done. Streams that still run after the time below continue on another worker. tandem up starts a new worker in its place."),
      h("div", { class: "field" }, h("label", { for: "drain-timeout" }, "Time for running requests (seconds)"), seconds),
    ],
    action: "Drain",
    tone: "danger",
    async submit(signal) {
      const body = { worker: name };
      if (seconds.value !== "") body.timeout = Number(seconds.value);
      await send("admin/drain", { body, admin: true, signal });
      toast(`${name} is draining.`);
    },
  });
}

/** Ask for the new sizes of the pools, and scale them. */
export function openScale(sizes) {
  const field = (role, least) => {
    const id = `scale-${role}`;
    const input = h("input", { id, type: "number", min: least, max: 4096, step: 1, required: true, value: sizes[role] });
    return { input, node: h("div", { class: "field" }, h("label", { for: id }, `${role} workers`), input) };
  };
  const prefill = field("prefill", 0);
  const decode = field("decode", 1);
  const dialog = openDialog({
    title: "Scale the pools",
    content: [
      h("div", { class: "row" }, prefill.node, decode.node),
      h("p", { class: "muted" }, "Workers that leave finish their requests, or hand them to others. The answer comes when the pools have these sizes."),
    ],
    action: "Scale",
    async submit(signal) {
      const body = { prefill: Number(prefill.input.value), decode: Number(decode.input.value) };
      const done = await json("admin/scale", { body, admin: true, signal });
      toast(`The pools have ${done.prefill} prefill and ${done.decode} decode workers.`);
    },
  });
  dialog.querySelector("input").focus();
  return dialog;
}

/** Sizes of the pools: workers that are there or expected back. */
export function poolSizes() {
  const sizes = { prefill: 0, decode: 0 };
  for (const { role, state } of live.workers.values()) if (role in sizes && state !== "left") sizes[role] += 1;
  return sizes;
}
