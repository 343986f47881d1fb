// DOM nodes and number formats. Text reaches the page through text nodes alone: nothing that a model, a client or a
// worker writes can become markup.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element. Properties that begin with "on" are listeners, "style" is an object; null and false are left out. */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** Make an SVG element. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Set the text of a node, only if it is another one. */
export function setText(node, text) {
  const shown = text === null || text === undefined ? "" : String(text);
  if (node.textContent !== shown) node.textContent = shown;
}

/** Set an attribute, only if it has another value; null removes it. */
export function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/**
 * Make the children of `parent` those of `items`, in order, and keep the nodes of items that stay. `known` maps keys to
 * parts: objects with a `node` and a method `update(item)`; `make(item)` makes one.
 */
export function keyed(parent, known, items, keyOf, make) {
  const wanted = new Set();
  let next = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    wanted.add(key);
    let part = known.get(key);
    if (part === undefined) known.set(key, (part = make(item)));
    part.update(item);
    if (part.node === next) next = next.nextSibling;
    else parent.insertBefore(part.node, next);
  }
  for (const [key, part] of known) {
    if (wanted.has(key)) continue;
    part.node.remove();
    known.delete(key);
  }
}

// -- formats ---------------------------------------------------------------------------------------------------------

const known = (value) => typeof value === "number" && Number.isFinite(value);
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const NONE = "–";

/** Format milliseconds with three digits that matter: 0.42 ms, 12.3 ms, 3.21 s, 2 m 05 s. */
export function milliseconds(value) {
  if (!known(value)) return NONE;
  if (value >= 99_995) {
    const seconds = Math.round(value / 1000);
    return `${Math.floor(seconds / 60)} m ${String(seconds % 60).padStart(2, "0")} s`;
  }
  return value >= 999.5 ? `${digits(value / 1000)} s` : `${digits(value)} ms`;
}

/** Format a number with three digits that matter. */
export function digits(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 9.995) return value.toFixed(2);
  if (size < 99.95) return value.toFixed(1);
  return whole.format(value);
}

/** Format a whole number with separators. */
export function count(value) {
  return known(value) ? whole.format(value) : NONE;
}

/** Format bytes: 900 B, 12.3 kB, 4.56 MB. */
export function bytes(value) {
  if (!known(value)) return NONE;
  let left = value;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (left < 999.5 || unit === "GB") return `${unit === "B" ? whole.format(left) : digits(left)} ${unit}`;
    left /= 1000;
  }
  return NONE;
}

/** Format a time of day from Unix seconds. */
export function clock(seconds) {
  return known(seconds) ? new Date(seconds * 1000).toLocaleTimeString("en-GB") : NONE;
}

/** Return "1 token" or "3 tokens". */
export function many(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

// -- short messages --------------------------------------------------------------------------------------------------

/** Show a message for some seconds; screen readers read it. */
export function toast(text, kind = "info") {
  const node = h("p", { class: `toast ${kind}` }, text);
  document.getElementById("toasts").append(node);
  setTimeout(() => node.remove(), kind === "bad" ? 10_000 : 5000);
}

/** Copy text, and say so. */
export async function copy(text, what) {
  let done;
  try {
    await navigator.clipboard.writeText(text);
    done = true;
  } catch {
    done = copyOldWay(text); // the former exists only on https and on this machine
  }
  toast(done ? `${what} copied` : "The browser does not allow this page to copy.", done ? "info" : "bad");
}

function copyOldWay(text) {
  const before = document.activeElement;
  const area = h("textarea", { class: "skip", "aria-hidden": "true", value: text });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus();
  return done;
}
