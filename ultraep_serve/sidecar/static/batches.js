// The list of batches; a dialog shows one batch: its layers, and the plan of one of them.

import { age, byId, byTime, bytes, count, emptyRow, get, make, ratio, seconds, setText } from "./common.js";
import { colorsOf, drawStacks, startStacks } from "./stacks.js";

const PAGE = 25;
const pages = [null]; // the `before` of every page up to the one shown; null: the newest
let nextBefore = null;

export const batchesPath = () => {
  const before = pages[pages.length - 1];
  return `v1/balance/batches?limit=${PAGE}${before === null ? "" : `&before=${before}`}`;
};

let batch = null; // the one in the dialog
let layers = [];
let plan = null;
let requests = 0; // a late answer to an earlier request is dropped

export function startBatches(changed) {
  byId("older").addEventListener("click", () => {
    if (nextBefore !== null) pages.push(nextBefore);
    changed();
  });
  byId("newer").addEventListener("click", () => {
    if (pages.length > 1) pages.pop();
    changed();
  });
  const dialog = byId("detail");
  byId("detail-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("keydown", moveSelection);
  startStacks();
}

export function showBatches(list) {
  nextBefore = list.next_before;
  byId("older").disabled = nextBefore === null;
  byId("newer").disabled = pages.length === 1;
  const body = byId("batches").tBodies[0];
  const focused = document.activeElement?.dataset?.batch;
  const now = Date.now() * 1e6;
  const worst = Math.max(...list.batches.map((batch) => batch.imbalance.before.mean ?? 1));
  const rows = list.batches.map((summary) => batchRow(summary, now, worst));
  body.replaceChildren(...(rows.length ? rows : [emptyRow(8, "No prefill batch yet.")]));
  if (focused) body.querySelector(`[data-batch="${focused}"]`)?.focus();
}

function batchRow(summary, now, worst) {
  const button = make("button", { type: "button", textContent: `${summary.batch}` });
  button.dataset.batch = summary.batch;
  button.setAttribute("aria-label", `open batch ${summary.batch}`);
  const { before, after } = summary.imbalance;
  const element = make(
    "tr",
    { className: "open" },
    make("td", {}, button, summary.policy === "quota" ? "" : ` ${summary.policy}`),
    cell(age(summary.time_ns, now)),
    cell(count(summary.tokens)),
    meter(before, "before", worst, byTime(summary)),
    meter(after, "after", worst, byTime(summary)),
    cell(count(summary.replicas)),
    cell(bytes(summary.bytes_moved)),
    cell(seconds(summary.avoided_seconds)),
  );
  element.addEventListener("click", () => openDetail(summary.batch));
  return element;
}

function meter(spread, when, worst, time) {
  const fill = make("i");
  fill.style.width = `${Math.max(0, Math.min(100, (100 * ((spread.mean ?? 1) - 1)) / Math.max(0.1, worst - 1)))}%`;
  const bar = make("span", { className: "meter", ariaHidden: "true" }, fill);
  return make("td", { className: when, title: `highest of a layer: ${ratio(spread.max)}${time && `; ${time}`}` }, ratio(spread.mean), bar);
}

const cell = (text) => make("td", { textContent: text });

async function openDetail(number) {
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
          `${byTime(summary) && `${byTime(summary)}, `}${count(summary.replicas)} replicas, ${bytes(summary.bytes_moved)} moved, ` +
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
  const index = layers.findIndex((layer) => layer.layer === plan.summary.layer) + step;
  if (layers[index]) select(layers[index].layer);
}

async function select(layer) {
  requests += 1;
  const mine = requests;
  for (const row of byId("layers").tBodies[0].rows) {
    const chosen = Number(row.dataset.layer) === layer;
    row.setAttribute("aria-selected", String(chosen));
    if (chosen) {
      row.scrollIntoView({ block: "nearest" });
      row.querySelector("button").focus();
    }
  }
  const answer = await get(`v1/balance/batches/${batch}/layers/${layer}`);
  if (mine !== requests) return;
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
  const speeds = plan.ranks.map((rank) => rank.speed);
  const unequal = speeds.some((speed) => speed < 1);
  setText(
    "plan-fine",
    (unequal
      ? `By time ${ratio(summary.time_imbalance_before)} → ${ratio(summary.time_imbalance_after)}, ` +
        `speeds ${speeds.map(ratio).join(", ")}; `
      : "") +
    `${seconds(summary.avoided_seconds)} avoided; stages of balancing took ${seconds(spent)} ` +
      `on their slowest ranks; ${bytes(summary.bytes_moved)} moved`,
  );
  drawStacks(plan);
  const colors = colorsOf(plan);
  const rows = [...plan.replicas]
    .sort((a, b) => b.assignments - a.assignments)
    .map((replica) => replicaRow(replica, colors.get(replica.expert)));
  byId("replicas").tBodies[0].replaceChildren(...(rows.length ? rows : [emptyRow(5, "No expert was replicated.")]));
  byId("stages").tBodies[0].replaceChildren(...stageRows());
}

function replicaRow(replica, color) {
  const swatch = make("i", { className: "swatch" });
  swatch.style.background = color;
  const cells = [
    `rank ${replica.home_rank}`,
    `rank ${replica.rank}, slot ${replica.slot}`,
    count(replica.assignments),
    bytes(replica.bytes),
  ];
  return make(
    "tr",
    {},
    make("td", {}, swatch, `${replica.expert}`),
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
