// Requests to the coordinator: addresses, keys, errors in words, and server-sent events read with fetch(), because
// EventSource cannot send a key.

const ROOT = new URL("../", import.meta.url);
const STORED = "tandem-keys";

/** The two keys. They stay in this tab's memory, and in its sessionStorage if the user says so. */
class Keys {
  constructor() {
    this.client = "";
    this.admin = "";
    this.kept = false;
    try {
      const stored = JSON.parse(sessionStorage.getItem(STORED) ?? "null");
      if (stored) Object.assign(this, { client: stored.client ?? "", admin: stored.admin ?? "", kept: true });
    } catch {
      // storage is off
    }
  }

  set(client, admin, kept) {
    Object.assign(this, { client, admin, kept });
    try {
      if (kept) sessionStorage.setItem(STORED, JSON.stringify({ client, admin }));
      else sessionStorage.removeItem(STORED);
    } catch {
      // storage is off: the keys are kept in memory
    }
  }
}

export const keys = new Keys();

/** An answer with an error, or none at all (`status` 0). */
export class ApiError extends Error {
  constructor(status, message, { code = null, retryAfterMs = null } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfterMs });
  }

  /** Whether a key is missing or wrong. */
  get needsKey() {
    return this.status === 401 || (this.status === 403 && this.code === "insufficient_permissions");
  }
}

/** Return the address of a path of the API. */
export function address(path) {
  return new URL(path, ROOT);
}

/**
 * Send a request and return the response once its headers are there. Raises ApiError for a status that is no success, or
 * without an answer. `admin`: send the admin key where there is one. `given`: a key to send instead of the stored ones.
 */
export async function send(path, { body, admin = false, signal, given } = {}) {
  const key = given ?? (admin ? keys.admin || keys.client : keys.client || keys.admin);
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(address(path), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (key && /[^\x20-\x7e]/.test(key)) throw new ApiError(401, "A key has only printable ASCII characters.");
    throw new ApiError(0, "The coordinator does not answer.");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

/** Send a request and return the JSON of its response. */
export async function json(path, options) {
  const response = await send(path, options);
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The coordinator's answer ended early.");
  }
}

async function failure(response) {
  let found = {};
  try {
    found = (await response.json()).error ?? {};
  } catch {
    // a proxy's answer, or cut off
  }
  const wait = Number(response.headers.get("retry-after-ms") ?? NaN);
  const message = typeof found.message === "string" ? found.message : `The server answered with status ${response.status}.`;
  return new ApiError(response.status, message, { code: found.code ?? null, retryAfterMs: Number.isFinite(wait) ? wait : null });
}

const MAX_EVENT_CHARS = 32 << 20;

/** Yield the events of a text/event-stream response as {event, data}; data is text. Ends with the stream. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = "message";
  let data = [];
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      if (rest.length > MAX_EVENT_CHARS) throw new ApiError(0, "The coordinator sent an event that is too long.");
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { event, data: data.join("\n") };
          event = "message";
          data = [];
        } else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line.startsWith("event:")) event = line.slice(6).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
