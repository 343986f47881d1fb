"use strict";
// Sets the chosen theme before anything is drawn. Without a choice the style sheet follows the browser's.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("tandem-theme");
  } catch {
    // storage is off: nothing was chosen
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
