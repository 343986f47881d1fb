// The live stream /admin/events: connects, reconnects, and keeps what it says: the newest snapshot, the history of the
// charts, the workers with those that are lost, and the recent requests.

import { ApiError, events, json, keys, send } from "./api.js";

const RETRY_MS = [500, 1000, 2000, 3000, 5000];
const SILENCE_MS = 8000; // a snapshot comes every second
const HIDDEN_MS = 20_000; // a tab that nobody sees gives its stream back after this time
export const MAX_REQUESTS = 512;
export const HISTORY_S = 300;
const MAX_LOST = 64;
const LEFT_S = 6; // how long a worker that left on purpose stays visible
const LOST_S = 900;
const DETAILS_AT_ONCE = 3;

/** What a change of a worker means for its state. */
const STATES = { joined: "joining", back: "joining", draining: "draining", lost: "lost", dead: "lost", left: "left" };
const MAX_WORKER_EVENTS = 64;

export class Live extends EventTarget {
  constructor() {
    super();
    /** "connecting", "live", "key", "gone", "full", "absent" or "paused", with words and the time of the next attempt. */
    this.status = { state: "connecting", words: "", retryAt: null };
    this.system = null;
    this.history = [];
    this.workerEvents = []; // the latest first
    this.workers = new Map();
    this.requests = new Map();
    this.unknown = new Set(); // ids that the coordinator does not know
    this.offsetS = 0; // the coordinator's clock minus this one's
    this._attempt = 0;
    this._run = null;
    this._asked = new Set();
    this._asking = 0;
    this._queue = [];
    this._hiding = null;
    document.addEventListener("visibilitychange", () => this._onVisibility());
    window.addEventListener("pagehide", () => this._run?.abort());
    window.addEventListener("pageshow", (event) => event.persisted && this.restart());
  }

  /** Connect anew: at the start, with other keys, or because the user does not want to wait. */
  restart() {
    this._run?.abort();
    this._attempt = 0;
    this._run = new AbortController();
    this._loop(this._run.signal);
  }

  /** The coordinator's time in Unix seconds. */
  now() {
    return Date.now() / 1000 + this.offsetS;
  }

  /** Ask for the spans of a request, once per connection. They arrive as an event, as all changes do. */
  want(id) {
    if (this.status.state !== "live" || this._asked.has(id)) return;
    this._asked.add(id);
    this._queue.push(id);
    this._ask();
  }

  /** Ask for a request again, also if it was not known before. `id`: of its answer, or its x-request-id. */
  ask(id) {
    this._asked.delete(id);
    this.unknown.delete(id);
    this.want(id);
  }

  _onVisibility() {
    clearTimeout(this._hiding);
    if (document.hidden) {
      this._hiding = setTimeout(() => {
        this._run?.abort();
        this._say("paused", "Paused while this tab is hidden.");
      }, HIDDEN_MS);
    } else if (this.status.state === "paused") this.restart();
  }

  _say(state, words = "", retryAt = null) {
    this.status = { state, words, retryAt };
    this._emit("status");
  }

  _emit(kind, detail) {
    this.dispatchEvent(new CustomEvent(kind, { detail }));
  }

  async _loop(signal) {
    if (this.status.state !== "gone") this._say("connecting");
    while (!signal.aborted) {
      let error;
      try {
        await this._listen(signal);
        error = new ApiError(0, "The coordinator closed the connection.");
      } catch (caught) {
        error = caught;
      }
      if (signal.aborted) return;
      if (!(error instanceof ApiError)) {
        if (error.name !== "AbortError" && !(error instanceof TypeError)) console.error(error);
        error = new ApiError(0, "The connection to the coordinator broke.");
      }
      if (error.needsKey) {
        this._say("key", keys.admin || keys.client ? error.message : "");
        return;
      }
      const usual = RETRY_MS[Math.min(this._attempt++, RETRY_MS.length - 1)];
      const wait = Math.max(usual, Math.min(error.retryAfterMs ?? 0, 30_000));
      const state = { 429: "full", 404: "absent", 403: "refused" }[error.status] ?? "gone";
      this._say(state, error.message, Date.now() + wait);
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, wait);
        signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
      });
    }
  }

  async _listen(signal) {
    const silence = new AbortController();
    let watch = setTimeout(() => silence.abort(), SILENCE_MS);
    try {
      const response = await send("admin/events", { admin: true, signal: AbortSignal.any([signal, silence.signal]) });
      this._attempt = 0;
      this._asked.clear();
      this._say("live");
      this._load(signal);
      for await (const { event, data } of events(response)) {
        clearTimeout(watch);
        watch = setTimeout(() => silence.abort(), SILENCE_MS);
        this._take(event, JSON.parse(data));
      }
    } catch (error) {
      if (silence.signal.aborted && !signal.aborted) {
        throw new ApiError(0, `The coordinator has said nothing for ${SILENCE_MS / 1000} s.`);
      }
      throw error;
    } finally {
      clearTimeout(watch);
    }
  }

  async _load(signal) {
    try {
      const { requests } = await json("admin/requests?limit=200", { admin: true, signal });
      for (const each of requests.toReversed()) {
        const known = this.requests.get(each.id);
        if (known?.spans && (known.total_ms !== null || each.total_ms === null)) continue;
        this._asked.delete(each.id);
        this._keep(each);
      }
      this._emit("requests");
    } catch (error) {
      if (error.name !== "AbortError") this._emit("trouble", error.message);
    }
  }

  async _ask() {
    while (this._queue.length && this._asking < DETAILS_AT_ONCE) {
      const id = this._queue.shift();
      this._asking += 1;
      json(`admin/requests/${encodeURIComponent(id)}`, { admin: true, signal: this._run?.signal })
        .then((found) => {
          this._keep(found);
          this._emit("requests", found.id);
        })
        .catch((error) => {
          const known = this.requests.get(id);
          if (error.status === 404 && known) Object.assign(known, { spans: [], forgotten: true });
          else if (error.status === 404) this.unknown.add(id);
          if (error.name !== "AbortError") this._emit("requests", id);
        })
        .finally(() => {
          this._asking -= 1;
          this._ask();
        });
    }
  }

  _keep(request) {
    this.unknown.delete(request.id);
    this.requests.set(request.id, request);
    if (this.requests.size <= MAX_REQUESTS) return;
    let oldest = request;
    for (const each of this.requests.values()) if (each.arrived < oldest.arrived) oldest = each;
    this.requests.delete(oldest.id);
    this._asked.delete(oldest.id);
  }

  _take(event, data) {
    if (event === "system") this._takeSystem(data);
    else if (event === "request") {
      this._keep(data);
      this._emit("requests", data.id);
    } else if (event === "worker") this._takeWorker(data);
  }

  _takeSystem(system) {
    this.offsetS = system.t - Date.now() / 1000;
    if (system.history) this.history = system.history.slice();
    if (system.worker_events) this.workerEvents = system.worker_events.toReversed();
    if (system.row) this.history.push(system.row);
    const from = system.t - HISTORY_S;
    while (this.history.length && this.history[0].t < from) this.history.shift();
    this.system = system;
    const present = new Set();
    for (const row of system.workers) {
      const name = row.id;
      present.add(name);
      const known = this.workers.get(name);
      // a snapshot made just before a worker was lost may still show it
      const stale = known?.lost && known.row?.incarnation === row.incarnation && system.t - known.since < 1;
      if (!stale) this.workers.set(name, { name, role: row.role, row, state: row.state, lost: false, why: "", since: known?.since ?? system.t });
    }
    for (const each of system.absent ?? []) {
      if (present.has(each.id)) continue;
      const known = this.workers.get(each.id);
      const since = system.t - each.for_s;
      this.workers.set(each.id, {
        name: each.id,
        role: known?.role ?? null,
        row: known?.row ?? null,
        state: each.why === "drained" ? "left" : "lost",
        lost: true,
        why: each.why,
        since,
        restartAt: each.restart_in_s === null ? null : system.t + each.restart_in_s,
      });
      present.add(each.id);
    }
    for (const [name, worker] of this.workers) {
      if (present.has(name)) continue;
      if (!worker.lost) Object.assign(worker, { state: worker.state === "draining" ? "left" : "lost", lost: true, since: system.t });
      const shown = worker.state === "lost" ? LOST_S : LEFT_S;
      if (system.t - worker.since > shown || this.workers.size > MAX_LOST + system.workers.length) this.workers.delete(name);
    }
    this._emit("system");
  }

  _takeWorker(change) {
    const { name, role, why, t } = change;
    const state = STATES[change.state] ?? change.state;
    const known = this.workers.get(name) ?? { name, role, row: null };
    this.workers.set(name, { ...known, role, state, lost: state === "lost" || state === "left", why: why ?? "", since: t, restartAt: null });
    this.workerEvents.unshift(change);
    this.workerEvents.length = Math.min(this.workerEvents.length, MAX_WORKER_EVENTS);
    if (this.system) this._emit("system");
  }
}

export const live = new Live();
