// The policy in force, the forms that change it, and the comparison of policies.

import { byId, count, emptyRow, get, make, post, ratio, seconds, setText, setToken, token } from "./common.js";

let config = null;

export function startPolicy(changed) {
  byId("token").value = token();
  byId("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setToken(byId("token").value);
    showMessage("token kept in this tab");
  });
  byId("policies").addEventListener("click", async (event) => {
    const chosen = event.target.closest("button");
    if (!chosen) return;
    await change(...request(chosen.dataset));
    changed();
  });
  byId("threshold-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const limit = Number(byId("threshold").value);
    await change("v1/control/threshold", { max_imbalance: limit }, `threshold ${limit}`);
    changed();
  });
}

export async function loadPolicy() {
  config = await get("v1/config");
  const buttons = config.policies.map((name) => choice(name, { policy: name }, name === config.policy));
  const paused = config.paused_policy;
  buttons.push(
    paused
      ? choice(`resume ${paused}`, { action: "resume" }, false)
      : choice("pause", { action: "pause" }, false),
  );
  const holder = byId("policies");
  const focused = document.activeElement?.parentElement === holder ? document.activeElement.textContent : null;
  holder.replaceChildren(...buttons);
  buttons.find((button) => button.textContent === focused)?.focus();
  for (const button of buttons) button.disabled = !config.control_open || config.policy === null;
  const threshold = byId("threshold");
  if (document.activeElement !== threshold)
    threshold.value = config.max_imbalance ?? config.config?.max_imbalance ?? "";
  byId("threshold-form").lastElementChild.disabled = buttons[0].disabled;
  setText("policy-note", note(config));
}

function note({ control_open: open, lease }) {
  if (lease) return `lent to ${lease.holder}; in ${count(Math.ceil(lease.seconds_left))} s at most ${lease.policy_after}, unless renewed`;
  return open ? "from the next batch on, on all ranks" : "control is closed: the sidecar has no token";
}

function choice(text, dataset, pressed) {
  const button = make("button", { type: "button", textContent: text });
  Object.assign(button.dataset, dataset);
  button.setAttribute("aria-pressed", String(pressed));
  return button;
}

function request({ policy, action }) {
  return policy
    ? ["v1/control/policy", { policy }, `policy ${policy}`]
    : [`v1/control/${action}`, undefined, action];
}

async function change(path, body, words) {
  setToken(byId("token").value);
  try {
    const { lease_seconds: lent } = await post(path, body);
    showMessage(`${words}, from the next batch on${lent ? `, for ${count(lent)} s` : ""}`);
  } catch (error) {
    showMessage(error.message, "bad");
  }
}

function showMessage(text, level = "good") {
  byId("policy-message").dataset.level = level;
  setText("policy-message", text);
}

export function showComparison(comparison) {
  const rows = comparison.policies.map((figures) =>
    comparisonRow(figures.policy, figures, figures.imbalance.after, figures.savings.net_seconds, "after"),
  );
  if (rows.length) rows.unshift(baselineRow(comparison.policies));
  byId("comparison").tBodies[0].replaceChildren(...(rows.length ? rows : [emptyRow(6, "No records yet.")]));
}

// Routing alone, over the batches of all policies.
function baselineRow(policies) {
  const layers = policies.reduce((sum, figures) => sum + figures.layers, 0);
  const mean = policies.reduce((sum, f) => sum + f.layers * f.imbalance.before.mean, 0) / layers;
  const p99 = Math.max(...policies.map((figures) => figures.imbalance.before.p99));
  const batches = policies.reduce((sum, figures) => sum + figures.batches, 0);
  return comparisonRow("off (as routed)", { batches, compute_microseconds_per_token: null }, { mean, p99 }, null, "before");
}

function comparisonRow(name, figures, spread, net, when) {
  const compute = figures.compute_microseconds_per_token;
  return make(
    "tr",
    {},
    make("td", { textContent: name }),
    make("td", { textContent: count(figures.batches) }),
    make("td", { className: when, textContent: ratio(spread.mean) }),
    make("td", { textContent: ratio(spread.p99) }),
    make("td", { textContent: compute === null ? "–" : compute.toFixed(2) }),
    make("td", { textContent: net === null ? "–" : seconds(net) }),
  );
}
