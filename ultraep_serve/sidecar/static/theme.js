// Light, dark, or as the system has it.

import { byId } from "./dom.js";

const KEY = "ultraep-theme";
const ORDER = ["auto", "light", "dark"];

export function startTheme(changed) {
  apply(localStorage.getItem(KEY) ?? "auto");
  byId("theme").addEventListener("click", () => {
    const next = ORDER[(ORDER.indexOf(current()) + 1) % ORDER.length];
    localStorage.setItem(KEY, next);
    apply(next);
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}

const current = () => document.documentElement.dataset.theme ?? "auto";

function apply(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
}
