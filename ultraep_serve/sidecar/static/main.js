// Starts the page: overviews are pushed, the rest is asked for every few seconds while it is seen.

import { get } from "./api.js";
import { batchesPath, showBatches, startBatches } from "./batches.js";
import { historyPath, redrawCharts, showHistory, startCharts } from "./charts.js";
import { redrawDetail, startDetail } from "./detail.js";
import { byId, setText } from "./dom.js";
import { showOverview } from "./glance.js";
import { redrawHeatmaps, showHeatmap, startHeatmaps } from "./heatmap.js";
import { loadPolicy, showComparison, startPolicy } from "./policy.js";
import { startTheme } from "./theme.js";

const REFRESH_MS = 2000;
const STALE_MS = 5000;
let heardAt = 0;
let refreshing = false;
let running = false; // whether there is an engine to ask about

function listen() {
  const events = new EventSource("v1/events?seconds=60");
  events.addEventListener("overview", (event) => {
    const overview = JSON.parse(event.data);
    const begins = !running && overview.engine !== null;
    heardAt = Date.now();
    running = overview.engine !== null;
    showOverview(overview);
    showLink();
    if (begins) refresh();
  });
  events.addEventListener("error", showLink); // the browser tries again by itself
}

// An old picture must not pass for a live one.
function showLink() {
  const live = Date.now() - heardAt < STALE_MS;
  byId("link").dataset.live = live ? "yes" : "no";
  document.body.classList.toggle("stale", !live && heardAt > 0);
  setText("link", live ? "live" : heardAt ? `no data since ${new Date(heardAt).toTimeString().slice(0, 8)}` : "no data yet");
  if (!live) {
    byId("state").dataset.level = "bad";
    setText("state", "✖ SIDECAR SILENT");
  }
}

async function refresh() {
  if (refreshing || !running || document.hidden) return;
  refreshing = true;
  const parts = [
    [historyPath(), showHistory],
    ["v1/balance/heatmap", showHeatmap],
    [batchesPath(), showBatches],
    ["v1/balance/policies", showComparison],
  ];
  await Promise.allSettled([
    loadPolicy(),
    ...parts.map(async ([path, show]) => show(await get(path))),
  ]);
  refreshing = false;
}

function redraw() {
  redrawCharts();
  redrawHeatmaps();
  redrawDetail();
}

startTheme(redraw);
startCharts(refresh);
startHeatmaps();
startBatches(refresh);
startDetail();
startPolicy(refresh);
listen();
setInterval(refresh, REFRESH_MS);
setInterval(showLink, 1000);
document.addEventListener("visibilitychange", refresh);
