// What a view shows instead of data: a key is needed, the coordinator is gone, or it has no such data.

import { h } from "./dom.js";
import { openKeys } from "./dialogs.js";
import { live } from "./live.js";

/** Show in `place` the notice for the state of the live stream; nothing if it is live or `have` is true. `what`: what would
 * be shown. A notice that stays the same keeps its node, and thereby the focus. */
export function showNotice(place, what, have) {
  const found = have ? null : notice(what);
  if ((found?.textContent ?? "") !== place.textContent) place.replaceChildren(...(found ? [found] : []));
}

function notice(what) {
  const { state, words } = live.status;
  switch (state) {
    case "live":
      return null;
    case "connecting":
      return box("Connecting…", "Waiting for the first data.");
    case "key":
      return box(words ? "The key does not open this" : "A key is needed", `${words} To see ${what}, enter the admin key of this server, or its API key if it has no admin key.`.trim(), h("button", { class: "primary", type: "button", onclick: () => openKeys("admin") }, "Enter the key"));
    case "refused":
      return box("The server refuses this page", words);
    case "absent":
      return box("No live data", `This server has no stream of events: ${words}`);
    case "full":
      return box("Too many pages are open", `${words} This page tries again by itself.`);
    case "paused":
      return box("Paused", words);
    default:
      return box("The coordinator does not answer", `${words} This page connects again by itself as soon as it is back.`, h("button", { type: "button", onclick: () => live.restart() }, "Try now"));
  }
}

function box(title, words, button = null) {
  return h("div", { class: "notice" }, h("h2", {}, title), h("p", {}, words), button);
}
