// The page: its views, the address, the state of the connection, keys and theme.

import { ChatView } from "./chat.js";
import { onKeys, openKeys } from "./dialogs.js";
import { h, setAttribute, setText, toast } from "./dom.js";
import { live } from "./live.js";
import { RequestsView } from "./requests.js";
import { SystemView } from "./system.js";

const NAMES = ["chat", "system", "requests"];
const THEMES = ["auto", "light", "dark"];
const sections = Object.fromEntries(NAMES.map((name) => [name, document.getElementById(`${name}-view`)]));
const views = { chat: new ChatView(sections.chat, () => drawLink()), system: new SystemView(sections.system), requests: new RequestsView(sections.requests) };
const banner = document.getElementById("banner");
const link = document.getElementById("link");

// -- views and the address -------------------------------------------------------------------------------------------

function route() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  if (name === "view") {
    document.getElementById("view").focus();
    return;
  }
  const shown = NAMES.includes(name) ? name : "chat";
  let id = null;
  try {
    id = rest.length ? decodeURIComponent(rest.join("/")) : null;
  } catch {
    // a broken address: no request
  }
  for (const each of NAMES) {
    sections[each].hidden = each !== shown;
    views[each].show(each === shown, each === shown ? id : null);
    setAttribute(document.querySelector(`nav a[href="#${each}"]`), "aria-current", each === shown ? "page" : null);
  }
  document.body.dataset.view = shown;
  drawLink();
  document.title = `${shown[0].toUpperCase()}${shown.slice(1)} · Tandem`;
}

addEventListener("hashchange", route);

// -- the connection --------------------------------------------------------------------------------------------------

function drawLink() {
  const { state, words } = live.status;
  const known = [...live.workers.values()].filter((each) => each.state !== "left");
  const workers = known.filter((each) => !each.lost);
  const ready = workers.filter((each) => each.state === "ready").length;
  const all = ready === known.length ? "" : ` of ${known.length}`;
  const chats = state === "key" && document.body.dataset.view === "chat" && views.chat.open;
  const shown = chats ? "chat only" : {
    live: live.system ? `${ready}${all} worker${(all ? known.length : ready) === 1 ? "" : "s"}` : "live",
    connecting: "connecting",
    key: "key needed",
    gone: "no connection",
    full: "too many pages",
    absent: "no live data",
    refused: "refused",
    paused: "paused",
  }[state];
  setText(link, shown);
  link.title = chats ? "The chat needs no other key. The system and the requests need the admin key." : words || (state === "live" ? "Live data from the coordinator" : "");
  setAttribute(link, "data-state", state === "live" && live.system && !ready ? "empty" : state === "live" && all ? "fewer" : chats ? "chat" : state);
  drawBanner(state, words, workers.length);
}

let waiting = null;

function drawBanner(state, words, workers) {
  clearInterval(waiting);
  const lost = state === "gone" || state === "full";
  const none = state === "live" && live.system && !workers;
  banner.hidden = !lost && !none;
  setAttribute(banner, "data-tone", lost ? "bad" : "warn");
  if (lost) {
    const rest = h("span");
    const tick = () => setText(rest, ` Next try in ${Math.max(0, Math.ceil((live.status.retryAt - Date.now()) / 1000))} s.`);
    tick();
    waiting = setInterval(tick, 500);
    rest.setAttribute("aria-hidden", "true"); // else it would be read each second
    banner.replaceChildren(h("b", {}, state === "full" ? "Too many pages are open." : "The coordinator is gone."), ` ${words}`, rest, h("button", { type: "button", class: "small", onclick: () => live.restart() }, "Try now"));
  } else if (none) {
    const text = "No workers have joined: requests are refused until a prefill and a decode worker, or a colocated one, are there. Start one with ";
    if (banner.dataset.shown !== "none") banner.replaceChildren(h("b", {}, "There are no workers."), ` ${text}`, h("code", {}, "tandem decode MODEL --coordinator HOST:PORT"), ".");
  }
  banner.dataset.shown = none ? "none" : state;
}

let before = "connecting";
live.addEventListener("status", () => {
  drawLink();
  const { state } = live.status;
  if (state === "live" && before !== "live") views.chat.load();
  if (state === "live" && before === "gone") toast("Connected again.");
  before = state === "connecting" ? before : state;
});
live.addEventListener("system", drawLink);
live.addEventListener("trouble", ({ detail }) => toast(detail, "bad"));

onKeys(() => {
  views.chat.load();
  live.restart();
});
document.getElementById("keys-button").addEventListener("click", () => openKeys(live.status.state === "key" && views.chat.open ? "admin" : "client"));

// -- theme -----------------------------------------------------------------------------------------------------------

const themeButton = document.getElementById("theme-button");

function drawTheme() {
  const chosen = document.documentElement.dataset.theme ?? "auto";
  setText(themeButton.querySelector("span"), `${chosen[0].toUpperCase()}${chosen.slice(1)}`);
  themeButton.setAttribute("aria-label", `Theme: ${chosen}. Press for the next one.`);
}

themeButton.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % THEMES.length];
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("tandem-theme", next);
  } catch {
    // storage is off: the choice ends with the page
  }
  drawTheme();
});

drawTheme();
route();
live.restart();
