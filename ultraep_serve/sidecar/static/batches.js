// The list of batches; a row opens its batch.

import { age, byId, bytes, count, emptyRow, make, ratio, seconds } from "./dom.js";
import { openDetail } from "./detail.js";

const PAGE = 25;
const pages = [null]; // the `before` of every page up to the one shown; null: the newest
let nextBefore = null;

export const batchesPath = () => {
  const before = pages[pages.length - 1];
  return `v1/balance/batches?limit=${PAGE}${before === null ? "" : `&before=${before}`}`;
};

export function startBatches(changed) {
  byId("older").addEventListener("click", () => {
    if (nextBefore !== null) pages.push(nextBefore);
    changed();
  });
  byId("newer").addEventListener("click", () => {
    if (pages.length > 1) pages.pop();
    changed();
  });
}

export function showBatches(list) {
  nextBefore = list.next_before;
  byId("older").disabled = nextBefore === null;
  byId("newer").disabled = pages.length === 1;
  const body = byId("batches").tBodies[0];
  const focused = document.activeElement?.dataset?.batch;
  const now = Date.now() * 1e6;
  const worst = Math.max(...list.batches.map((batch) => batch.imbalance.before.mean ?? 1));
  const rows = list.batches.map((batch) => row(batch, now, worst));
  body.replaceChildren(...(rows.length ? rows : [emptyRow(8, "No prefill batch has been weighed yet.")]));
  if (focused) body.querySelector(`[data-batch="${focused}"]`)?.focus();
}

function row(batch, now, worst) {
  const button = make("button", { type: "button", textContent: `${batch.batch}` });
  button.dataset.batch = batch.batch;
  button.setAttribute("aria-label", `open batch ${batch.batch}`);
  const { before, after } = batch.imbalance;
  const element = make(
    "tr",
    { className: "open" },
    make("td", {}, button, batch.policy === "quota" ? "" : ` ${batch.policy}`),
    cell(age(batch.time_ns, now)),
    cell(count(batch.tokens)),
    meter(before, "before", worst),
    meter(after, "after", worst),
    cell(count(batch.replicas)),
    cell(bytes(batch.bytes_moved)),
    cell(seconds(batch.avoided_seconds)),
  );
  element.addEventListener("click", () => openDetail(batch.batch));
  return element;
}

function meter(spread, when, worst) {
  const fill = make("i");
  fill.style.width = `${Math.max(0, Math.min(100, (100 * ((spread.mean ?? 1) - 1)) / Math.max(0.1, worst - 1)))}%`;
  const bar = make("span", { className: "meter", ariaHidden: "true" }, fill);
  return make("td", { className: when, title: `worst layer ${ratio(spread.max)}` }, ratio(spread.mean), bar);
}

const cell = (text) => make("td", { textContent: text });
