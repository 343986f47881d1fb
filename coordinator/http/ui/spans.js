// What the spans of a request say: their order on the page, their tones, and the request's story in words. No DOM.

import { bytes, count, many, milliseconds } from "./dom.js";

export const TONES = [
  ["queue", "queue"],
  ["tokenize", "tokenize"],
  ["prefill", "prefill"],
  ["transfer", "transfer, exposed"],
  ["hidden", "transfer, hidden"],
  ["decode", "decode"],
  ["stall", "stall"],
  ["loss", "retry, migration"],
];

const NAMES = { tokenize: "tokenize", queue: "queue", place: "place", prefill: "prefill", prefill_chunk: "chunk", transfer: "transfer", decode: "decode", stall: "stall", retry: "retry", migration: "migration" };

export function nameOf(span) {
  return NAMES[span.name] ?? span.name;
}

export function toneOf(span) {
  return span.name === "retry" || span.name === "migration" ? "loss" : span.name === "prefill_chunk" ? "prefill" : span.name;
}

/** The end of a span in milliseconds; that of a running one is `nowMs`. */
export function endOf(span, nowMs) {
  return span.end_ms ?? Math.max(span.start_ms, nowMs);
}

/** The length of a request in milliseconds: its total, or until now while it runs. */
export function lengthOf(request, nowS) {
  if (request.total_ms !== null && request.total_ms !== undefined) return Math.max(request.total_ms, 0.001);
  if (isOver(request)) return Math.max(0.001, ...(request.spans ?? []).map(({ end_ms: end }) => end ?? 0));
  return Math.max((nowS - request.arrived) * 1000, 0.001);
}

export function isOver(request) {
  return ["done", "aborted", "failed"].includes(request.state);
}

/**
 * The bars of one line: {span, tone, start, end, inside}; chunks and placements have none, a transfer has two. `inside`:
 * whether the bar lies in the time of another one: of a new attempt, or of the prefill that hides a transfer.
 */
export function barsOf(request, nowMs) {
  const bars = [];
  for (const span of request.spans ?? []) {
    if (span.name === "prefill_chunk" || span.name === "place") continue;
    const end = endOf(span, nowMs);
    const parent = request.spans[span.parent ?? -1];
    const inside = parent !== undefined && toneOf(parent) === "loss";
    if (span.name === "transfer") {
      const exposed = Math.min(span.detail?.exposed_ms ?? end - span.start_ms, end - span.start_ms);
      if (end - exposed > span.start_ms) bars.push({ span, tone: "hidden", start: span.start_ms, end: end - exposed, inside: true });
      if (exposed > 0) bars.push({ span, tone: "transfer", start: end - exposed, end });
    } else bars.push({ span, tone: toneOf(span), start: span.start_ms, end, inside });
  }
  return bars;
}

/** The rows of the full waterfall: {span, depth, chunks, stalls}, in order; chunks and stalls lie on their parent's row. */
export function rowsOf(request) {
  const spans = request.spans ?? [];
  const rows = [];
  const byIndex = new Map();
  spans.forEach((span, index) => {
    const parent = span.parent === null || span.parent === undefined ? null : byIndex.get(span.parent);
    if (parent && span.name === "prefill_chunk") parent.chunks.push(span);
    else if (parent && span.name === "stall") parent.stalls.push(span);
    else {
      const row = { span, index, depth: parent ? parent.depth + 1 : 0, chunks: [], stalls: [] };
      byIndex.set(index, row);
      rows.push(row);
    }
  });
  return rows;
}

/** The workers that a request was on, in order: ["prefill-0", "decode-1", "decode-0"]. */
export function workersOf(request) {
  const names = [];
  for (const { worker, name, detail } of request.spans ?? []) {
    if (name === "place") continue;
    for (const each of name === "transfer" ? [worker, detail?.to] : name === "decode" || name === "prefill" ? [worker] : []) {
      if (each && names.at(-1) !== each) names.push(each);
    }
  }
  return names;
}

/** What happened to a request, as sentences. */
export function storyOf(request) {
  const story = [];
  const attempts = (request.spans ?? []).reduce((most, { attempt }) => Math.max(most, attempt ?? 0), 0) + 1;
  for (const span of request.spans ?? []) {
    const took = span.end_ms === null ? "so far" : milliseconds(span.end_ms - span.start_ms);
    const detail = span.detail ?? {};
    switch (span.name) {
      case "tokenize":
        story.push(`Read and tokenized in ${took}${detail.grammar_ms ? `, of which its grammar took ${milliseconds(detail.grammar_ms)}` : ""}.`);
        break;
      case "queue":
        story.push(`Waited ${took}${detail.why ? `: ${detail.why}` : ""}.`);
        break;
      case "place":
        story.push(`Placed on ${[...new Set([detail.prefill, detail.decode].filter(Boolean))].join(" → ")}${detail.why ? `: ${detail.why}` : ""}.`);
        break;
      case "prefill": {
        const cached = detail.cached_tokens ? `, ${many(detail.cached_tokens, "token")} from the prefix cache` : "";
        story.push(`Prompt on ${span.worker} in ${took}${detail.chunks > 1 ? `, ${many(detail.chunks, "chunk")}` : ""}${cached}.`);
        break;
      }
      case "transfer":
        story.push(`KV to ${detail.to ?? "decode"}${detail.link ? ` over ${detail.link}` : ""}: ${bytes(detail.bytes)} in ${took}, of which ${milliseconds(detail.exposed_ms)} exposed.`);
        break;
      case "decode":
        story.push(`${detail.tokens === undefined ? "Decoded" : many(detail.tokens, "token")} on ${span.worker} in ${took}.`);
        break;
      case "stall":
        story.push(`No token for ${milliseconds(detail.gap_ms)} on ${span.worker ?? "the worker"}.`);
        break;
      case "retry":
      case "migration":
        story.push(`${span.name === "retry" ? "Tried again" : "Moved"}${detail.from ? ` from ${detail.from}` : ""} after ${took}${detail.why ? `: ${detail.why}` : ""}.`);
        break;
    }
  }
  if (attempts > 1) story.push(`${count(attempts)} attempts in all.`);
  if (request.error) story.push(`Failed: ${request.error}`);
  return story;
}

/** Return round values from 0 to `length`, about four of them. */
export function ticksOf(length) {
  const rough = length / 4;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * unit).find((each) => each >= rough * 0.999);
  const ticks = [];
  for (let at = 0; at <= length * 1.0001 && ticks.length < 12; at += step) ticks.push(at);
  return ticks;
}
