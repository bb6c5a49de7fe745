// One batch: its layers, and for one of them who computed what and what moved where.

import { get } from "./api.js";
import { byId, bytes, count, emptyRow, make, ratio, seconds, setText } from "./dom.js";
import { colorsOf, drawStacks, startStacks } from "./stacks.js";

let batch = null;
let layers = [];
let plan = null;
let wanted = 0; // counts requests: an answer that comes late is dropped

export function startDetail() {
  const dialog = byId("detail");
  byId("detail-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("keydown", moveSelection);
  startStacks();
}

export async function openDetail(number) {
  batch = number;
  try {
    const detail = await get(`v1/balance/batches/${number}`);
    layers = detail.layers;
    showSummary(detail.summary);
    byId("layers").tBodies[0].replaceChildren(...layers.map(layerRow));
    if (!byId("detail").open) byId("detail").showModal();
    const worst = layers.reduce((a, b) => (b.imbalance_before > a.imbalance_before ? b : a));
    await select(worst.layer);
  } catch (error) {
    showSummary(null, error.message);
    if (!byId("detail").open) byId("detail").showModal();
  }
}

export function redrawDetail() {
  if (plan && byId("detail").open) drawStacks(plan);
}

function showSummary(summary, message) {
  setText("detail-title", `Batch ${batch}`);
  setText(
    "detail-summary",
    summary
      ? `${count(summary.tokens)} tokens, policy ${summary.policy}: imbalance ` +
          `${ratio(summary.imbalance.before.mean)} → ${ratio(summary.imbalance.after.mean)}, ` +
          `${count(summary.replicas)} replicas, ${bytes(summary.bytes_moved)} moved, ` +
          `${seconds(summary.avoided_seconds)} avoided`
      : message,
  );
}

function layerRow(layer) {
  const button = make("button", { type: "button", textContent: `${layer.layer}` });
  const row = make(
    "tr",
    { className: "open" },
    make("td", {}, button),
    make("td", { textContent: layer.decision === "planned" ? "planned" : layer.reason }),
    make("td", { className: "before", textContent: ratio(layer.imbalance_before) }),
    make("td", { className: "after", textContent: ratio(layer.imbalance_after) }),
    make("td", { textContent: bytes(layer.bytes_moved) }),
    make("td", { textContent: seconds(layer.avoided_seconds) }),
  );
  row.dataset.layer = layer.layer;
  row.addEventListener("click", () => select(layer.layer));
  return row;
}

function moveSelection(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step || !plan) return;
  event.preventDefault();
  const place = layers.findIndex((layer) => layer.layer === plan.summary.layer) + step;
  if (layers[place]) select(layers[place].layer);
}

async function select(layer) {
  wanted += 1;
  const mine = wanted;
  for (const row of byId("layers").tBodies[0].rows) {
    const chosen = Number(row.dataset.layer) === layer;
    row.setAttribute("aria-selected", String(chosen));
    if (chosen) {
      row.scrollIntoView({ block: "nearest" });
      row.querySelector("button").focus();
    }
  }
  const answer = await get(`v1/balance/batches/${batch}/layers/${layer}`);
  if (mine !== wanted) return;
  plan = answer;
  showPlan();
}

function showPlan() {
  const { summary } = plan;
  setText(
    "plan-title",
    `Layer ${summary.layer}: ${summary.decision}, ${summary.reason}` +
      ` (${ratio(summary.imbalance_before)} → ${ratio(summary.imbalance_after)})`,
  );
  const spent = Object.entries(summary.stage_seconds)
    .filter(([stage]) => stage !== "compute")
    .reduce((sum, [, time]) => sum + time, 0);
  setText(
    "plan-fine",
    `avoided ${seconds(summary.avoided_seconds)} of the busiest rank's time; ` +
      `stages of balancing took ${seconds(spent)} where they took longest; ${bytes(summary.bytes_moved)} moved`,
  );
  drawStacks(plan);
  const colors = colorsOf(plan);
  const copies = [...plan.replicas].sort((a, b) => b.assignments - a.assignments);
  byId("replicas").tBodies[0].replaceChildren(
    ...(copies.length ? copies.map((copy) => copyRow(copy, colors.get(copy.expert))) : [emptyRow(5, "No expert was replicated.")]),
  );
  byId("stages").tBodies[0].replaceChildren(...stageRows());
}

function copyRow(copy, color) {
  const swatch = make("i", { className: "swatch" });
  swatch.style.background = color;
  const cells = [
    `rank ${copy.home_rank}`,
    `rank ${copy.rank}, slot ${copy.slot}`,
    count(copy.assignments),
    bytes(copy.bytes),
  ];
  return make(
    "tr",
    {},
    make("td", {}, swatch, `${copy.expert}`),
    ...cells.map((text) => make("td", { textContent: text })),
  );
}

function stageRows() {
  return Object.entries(plan.summary.stage_seconds).map(([stage, time]) => {
    const slowest = plan.stage_seconds.findIndex((times) => times[stage] === time);
    const name = stage === "compute" ? "compute (engine)" : stage;
    return make(
      "tr",
      {},
      make("td", { textContent: name }),
      make("td", { textContent: slowest < 0 || !time ? "–" : `rank ${slowest}` }),
      make("td", { textContent: time ? seconds(time) : "–" }),
    );
  });
}
