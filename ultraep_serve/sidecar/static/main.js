// Starts the page, which polls while it is visible.

import { batchesPath, redrawDetail, showBatches, startBatches } from "./batches.js";
import { historyPath, redrawCharts, showHistory, startCharts } from "./charts.js";
import { byId, get, setText } from "./common.js";
import { redrawHeatmaps, showHeatmap, startHeatmaps } from "./heatmap.js";
import { showOverview } from "./overview.js";
import { loadPolicy, startPolicy } from "./policy.js";

const REFRESH_MS = 2000;
const STALE_MS = 5000;
const OVERVIEW_MS = 1000;
const THEME_KEY = "ultraep-theme";
const THEMES = ["auto", "light", "dark"];
let updatedAt = 0;
let refreshing = false;
let running = false; // whether there is an engine

async function look() {
  if (document.hidden) return;
  try {
    const overview = await get("v1/overview");
    const isNew = !running && overview.engine !== null;
    updatedAt = Date.now();
    running = overview.engine !== null;
    showOverview(overview);
    if (isNew) refresh();
  } finally {
    showLink();
  }
}

// Stale figures must not look like live ones.
function showLink() {
  const live = Date.now() - updatedAt < STALE_MS;
  byId("link").dataset.live = live ? "yes" : "no";
  document.body.classList.toggle("stale", !live && updatedAt > 0);
  setText("link", live ? "live" : updatedAt ? `no data since ${new Date(updatedAt).toTimeString().slice(0, 8)}` : "no data yet");
  if (!live) {
    byId("state").dataset.level = "bad";
    setText("state", "✖ NO CONNECTION");
  }
}

async function refresh() {
  if (refreshing || !running || document.hidden) return;
  refreshing = true;
  const views = [
    [historyPath(), showHistory],
    ["v1/balance/heatmap", showHeatmap],
    [batchesPath(), showBatches],
  ];
  await Promise.allSettled([
    loadPolicy(),
    ...views.map(async ([path, show]) => show(await get(path))),
  ]);
  refreshing = false;
}

function redraw() {
  redrawCharts();
  redrawHeatmaps();
  redrawDetail();
}

function startTheme() {
  applyTheme(localStorage.getItem(THEME_KEY) ?? "auto");
  byId("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
    localStorage.setItem(THEME_KEY, next);
    applyTheme(next);
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

const theme = () => document.documentElement.dataset.theme ?? "auto";

function applyTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  byId("theme").textContent = `Theme: ${name}`;
}

startTheme();
startCharts(refresh);
startHeatmaps();
startBatches(refresh);
startPolicy(refresh);
setInterval(look, OVERVIEW_MS);
look();
setInterval(refresh, REFRESH_MS);
setInterval(showLink, 1000);
document.addEventListener("visibilitychange", refresh);
