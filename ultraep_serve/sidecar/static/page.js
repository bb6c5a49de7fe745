// The page: polls the sidecar while it is visible, and shows what it answers.

const POLL_MS = 2000;
const TOKEN_KEY = "ultraep-token";
const WHEN = ["before", "after"];
let pinned = null; // the layer that was chosen; null: the least balanced one
let layers = []; // of the last poll

// Elements, text and numbers

const byId = (id) => document.getElementById(id);

function setText(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const count = (value) => value.toLocaleString("en");
const ratio = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));

function seconds(value) {
  const size = Math.abs(value);
  if (size >= 100) return `${value.toFixed(0)} s`;
  if (size >= 1) return `${value.toFixed(2)} s`;
  if (size >= 1e-3) return `${(value * 1e3).toFixed(size >= 0.1 ? 0 : 1)} ms`;
  return `${(value * 1e6).toFixed(0)} µs`;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

function age(ns) {
  const passed = Math.max(0, Date.now() / 1e3 - ns / 1e9);
  if (passed < 100) return `${passed.toFixed(0)} s ago`;
  return passed < 6000 ? `${(passed / 60).toFixed(0)} min ago` : `${(passed / 3600).toFixed(0)} h ago`;
}

// Requests. Addresses are relative, so that a proxy may add a prefix.

async function poll() {
  if (document.hidden) return;
  try {
    const balance = await (await fetch("v1/balance")).json(); // without an engine only whether it is ready
    document.body.classList.remove("stale");
    showState(balance);
    showPolicy(balance);
    if (!balance.engine) return;
    layers = balance.layers;
    showBalance(balance);
    showBatch(balance.last_batch);
    showHistory(balance.history);
    showHeat();
    showRanks(balance);
    showProof(balance);
    await showPlan();
  } catch {
    document.body.classList.add("stale"); // old figures must not look like those of this moment
    byId("state").dataset.level = "bad";
    setText("state", "✖ NO CONNECTION");
  }
}

// State, policy

function stateOf({ ready, status, engine, policy }) {
  if (!ready) return ["bad", engine ? "✖ NOT READY" : "✖ NO ENGINE"];
  if (status === "unbalanced") return ["bad", engine ? "✖ SWITCHED ITSELF OFF" : "○ NOT BALANCED"];
  if (policy === "off") return ["warn", "○ OFF"];
  if (policy === "ideal") return ["bad", "▲ IDEAL: WRONG ANSWERS"];
  return ["good", "✔ BALANCING"];
}

function showState(balance) {
  const [level, text] = stateOf(balance);
  byId("state").dataset.level = level;
  setText("state", text);
  document.title = `${text.split(" ")[0]} ultraep`;
  const reasons = Object.entries(balance.reasons).map(([rank, why]) => (rank === "run" ? why : `rank ${rank}: ${why}`));
  setText("reason", reasons.length > 2 ? `${reasons[0]}; and ${reasons.length - 1} more` : reasons.join("; "));
  byId("reason").title = reasons.join("\n");
  if (!balance.engine) return setText("about", "");
  const { engine, mode, num_ranks: all, ranks, num_layers: moe, num_experts: experts, num_slots: slots } = balance;
  const here = ranks.length === all ? `${all} ranks` : `${ranks.length} ranks here, ${all} per stage`;
  setText("about", `${engine}, ${mode} parallel · ${here} · ${moe} MoE layers · ${experts} experts · ${slots} slots per rank`);
}

function showPolicy({ policies = [], policy }) {
  const buttons = policies.map((name) => {
    const button = make("button", { textContent: name });
    button.setAttribute("aria-pressed", String(name === policy));
    button.addEventListener("click", () => setPolicy(name));
    return button;
  });
  const focused = document.activeElement?.parentElement === byId("policies") ? document.activeElement.textContent : null;
  byId("policies").replaceChildren(...buttons);
  buttons.find((button) => button.textContent === focused)?.focus();
}

async function setPolicy(policy) {
  let text = `policy ${policy}, from the next batch on`;
  try {
    const answer = await fetch("v1/control/policy", {
      method: "POST",
      headers: { Authorization: `Bearer ${keepToken()}`, "Content-Type": "application/json" },
      body: JSON.stringify({ policy }),
    });
    if (!answer.ok) text = (await answer.json()).detail;
  } catch (error) {
    text = error.message;
  }
  setText("policy-message", text);
  poll();
}

// In sessionStorage: the token is forgotten when the tab is closed.
function keepToken() {
  const token = byId("token").value.trim();
  sessionStorage.setItem(TOKEN_KEY, token);
  return token;
}

// Figures

function showBalance({ imbalance, time_imbalance: time, floor, savings, policy, batches, ranks }) {
  const { before, after } = imbalance;
  setText("before", ratio(before.mean));
  setText("after", ratio(after.mean));
  const byTime = ranks.some((rank) => rank.assignments.speed < 1)
    ? `by time ${ratio(time.before.mean)} → ${ratio(time.after.mean)} · ` : "";
  const why = policy === "off" ? "not measured while the policy is off" : "no prefill batch yet";
  setText("imbalance-fine", before.mean === null ? why
    : `${byTime}p99 ${ratio(before.p99)} → ${ratio(after.p99)} · max ${ratio(before.max)} → ${ratio(after.max)} · floor ${ratio(floor)}`);
  const { saved_seconds: saved, spent_seconds: spent } = savings;
  const most = Math.max(saved, spent, 1e-9);
  for (const [name, value] of [["saved", saved], ["spent", spent]]) {
    byId(`${name}-bar`).style.width = `${(100 * value) / most}%`;
    setText(name, saved + spent > 0 ? seconds(value) : "–");
  }
  const times = spent > 0 ? (saved / spent).toFixed(1) : "∞";
  const verdict = saved < spent ? "▲ balancing costs more than it saves" : `saves ${times} times what it costs`;
  setText("savings-fine", saved + spent > 0 ? verdict : "");
  const skipped = Object.entries(batches.skipped).filter(([, number]) => number);
  const left = skipped.map(([reason, number]) => `${count(number)} ${reason.replace("_", " ")}`);
  setText("batches", [`${count(batches.planned)} planned`, ...left].join(" · "));
}

function showBatch(batch) {
  if (!batch) return;
  const { before, after } = batch.imbalance;
  setText("batch-before", ratio(before.mean));
  setText("batch-after", ratio(after.mean));
  setText("batch-age", `number ${batch.batch}, ${age(batch.time_ns)}`);
  setText("batch-fine", `${count(batch.tokens)} tokens · ${count(batch.replicas)} copies, ${count(batch.new_replicas)} new · ${bytes(batch.bytes_moved)} moved`);
}

function showRanks({ ranks, reasons }) {
  const cells = ranks.map((rank) => {
    const problem = reasons[rank.rank];
    const cell = make("span", { textContent: rank.rank });
    cell.dataset.level = problem ? (rank.state === "starting" ? "warn" : "bad") : "good";
    cell.setAttribute("role", "listitem");
    const { speed } = rank.assignments;
    cell.title = [`rank ${rank.rank}: ${problem ?? "ready"}`,
      rank.last_batch_age_seconds === null ? "" : `last batch ${seconds(rank.last_batch_age_seconds)} ago`,
      speed < 1 ? `speed ${ratio(speed)}` : "",
      rank.lost + rank.missed ? `${rank.lost + rank.missed} records lost` : ""].filter(Boolean).join(", ");
    return cell;
  });
  byId("ranks").replaceChildren(...cells);
  byId("ranks").classList.toggle("many", ranks.length > 24);
  const lost = ranks.reduce((sum, rank) => sum + rank.lost + rank.missed, 0);
  const slowest = ranks.reduce((a, b) => (b.assignments.speed < a.assignments.speed ? b : a));
  setText("ranks-count", [`${ranks.filter((rank) => rank.alive).length} of ${ranks.length} alive`,
    lost ? `▲ ${count(lost)} records lost` : "",
    slowest.assignments.speed < 1 ? `rank ${slowest.rank} at ${ratio(slowest.assignments.speed)} of the speed` : "",
  ].filter(Boolean).join(" · "));
}

function showProof({ self_check: checked, verification: verified }) {
  const texts = { passed: `self-check passed in ${seconds(checked.seconds)}`, off: "no self-check", failed: "▲ self-check failed" };
  const warned = checked.checks.filter((check) => check.warning).map((check) => `▲ ${check.name}: ${check.warning}`);
  setText("proof", `${texts[checked.result] ?? "self-check has not ended"} · ${verified.failures ? "✖ " : ""}` +
    `verified ${count(verified.layers)} layers, ${count(verified.failures)} failed`);
  byId("proof").dataset.level = verified.failures || checked.result === "failed" ? "bad" : "good";
  byId("proof").title = checked.checks.map((check) => `${check.name}, ${seconds(check.seconds)}: ${check.detail}`).join("\n");
  const parts = Object.entries(verified.by_check).map(([check, { layers, failures }]) =>
    `${check} ${count(layers)}${failures ? ` (✖ ${count(failures)})` : ""}`);
  setText("proof-fine", [...warned, parts.join(" · ")].join("; "));
}

// Imbalance over time

function showHistory(steps) {
  const { width, height } = byId("chart").getBoundingClientRect();
  if (width < 100 || height < 60 || !steps.length) return;
  const [left, right, top, bottom] = [34, width - 8, 8, height - 20];
  const most = Math.max(1.2, ...steps.map(({ imbalance }) => imbalance.before.max));
  const last = steps.at(-1).time_seconds;
  const first = last - 900;
  const x = (time) => left + ((time - first) / (last - first)) * (right - left);
  const y = (value) => bottom - ((value - 1) / (most - 1)) * (bottom - top);
  const line = (when, figure, style) => {
    const points = steps.map(({ time_seconds: time, imbalance }) => `${x(time).toFixed(1)},${y(imbalance[when][figure]).toFixed(1)}`);
    return draw("polyline", { class: style, points: points.join(" ") });
  };
  const grid = [];
  const step = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50].find((size) => (most - 1) / size <= 5) ?? 100;
  for (let value = 1; value <= most; value += step) {
    grid.push(draw("path", { class: "grid", d: `M${left} ${y(value)}H${right}` }));
    grid.push(draw("text", { x: left - 6, y: y(value) + 4, class: "end" }, value.toFixed(step < 0.1 ? 2 : 1)));
  }
  for (let time = Math.ceil(first / 180) * 180; time <= last; time += 180) {
    const clock = new Date(time * 1000).toTimeString().slice(0, 5);
    if (x(time) < right - 12) grid.push(draw("text", { x: x(time), y: height - 4, class: "middle" }, clock));
  }
  byId("chart").setAttribute("viewBox", `0 0 ${width} ${height}`);
  byId("chart").replaceChildren(...grid, line("before", "max", "before faint"), line("after", "max", "after faint"),
    line("before", "mean", "before"), line("after", "mean", "after"));
}

// Load by layer, the busiest rank first

function showHeat() {
  for (const when of WHEN) {
    const cells = layers.flatMap(({ layer, load_before: before, load_after: after }, row) => (when === "before" ? before : after).map((load, place) => {
      const cell = draw("rect", { x: place, y: row, width: 1, height: 1 });
      const end = load < 1 ? "cold" : "hot";
      cell.style.fill = `color-mix(in srgb, var(--${end}) ${Math.round(100 * Math.min(1, Math.abs(load - 1)) ** 0.8)}%, var(--even))`;
      cell.dataset.layer = layer;
      cell.dataset.text = `layer ${layer}, rank ${place + 1} of ${before.length} by load: ${ratio(before[place])} → ${ratio(after[place])}`;
      return cell;
    }));
    const svg = byId(`heat-${when}`);
    svg.setAttribute("viewBox", `0 0 ${layers[0]?.load_before.length ?? 1} ${layers.length || 1}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.replaceChildren(...cells);
  }
}

// The plan of one layer

async function showPlan() {
  if (!layers.length) return;
  const worst = layers.reduce((a, b) => (b.imbalance.before.mean > a.imbalance.before.mean ? b : a));
  const chosen = layers.some(({ layer }) => layer === pinned) ? pinned : worst.layer;
  const select = byId("layer");
  if (select.options.length !== layers.length)
    select.replaceChildren(...layers.map(({ layer }) => make("option", { value: layer, textContent: layer })));
  if (document.activeElement !== select) select.value = chosen;
  const answer = await fetch(`v1/balance/layers/${chosen}`);
  if (!answer.ok) return; // the engine has just ended: the next poll says so
  const { last } = await answer.json();
  const decision = last.decision === "planned" ? "planned" : `left alone, ${last.reason.replace("_", " ")}`;
  const spent = last.stage_seconds.map(({ compute, ...own }) => Object.values(own).reduce((sum, time) => sum + time, 0));
  setText("plan-fine", `${decision}: ${ratio(last.imbalance_before)} → ${ratio(last.imbalance_after)} · ` +
    `${seconds(last.avoided_seconds)} avoided · stages took ${seconds(Math.max(0, ...spent))} on the slowest rank`);
  showStacks(last);
  const copies = [...last.replicas].sort((a, b) => b.assignments - a.assignments).slice(0, 6)
    .map(({ expert, home_rank: from, rank, assignments }) => `expert ${expert}: rank ${from} → ${rank}, ${count(assignments)}`);
  const more = last.replicas.length - copies.length;
  setText("plan-replicas", copies.length ? `${copies.join(" · ")}${more > 0 ? ` · and ${more} more` : ""}` : "no expert was copied");
}

// Bars by rank of pieces { expert, load, isCopy }; expert null: all that were not copied.
function stacksOf({ ranks, expert_assignments: loads, replicas }, when) {
  const left = [...loads];
  if (when === "after") for (const { expert, assignments } of replicas) left[expert] -= assignments;
  const size = loads.length / ranks.length;
  const copied = [...new Set(replicas.map(({ expert }) => expert))];
  return ranks.map((rank, r) => {
    const pieces = copied.filter((expert) => Math.floor(expert / size) === r).map((expert) => ({ expert, load: left[expert], isCopy: false }));
    if (when === "after")
      for (const { expert, rank: at, assignments } of replicas) if (at === r) pieces.push({ expert, load: assignments, isCopy: true });
    const rest = rank[when] - pieces.reduce((sum, piece) => sum + piece.load, 0);
    return [...pieces, { expert: null, load: rest, isCopy: false }];
  });
}

function showStacks(plan) {
  const { ranks, replicas } = plan;
  const most = Math.max(1, ...ranks.flatMap(({ before, after }) => [before, after]));
  const mean = ranks.reduce((sum, { before }) => sum + before, 0) / ranks.length;
  const colors = new Map([...new Set(replicas.map(({ expert }) => expert))].map((expert, i) => [expert, i % 7]));
  for (const when of WHEN) {
    const svg = byId(`stack-${when}`);
    const { width, height } = svg.getBoundingClientRect();
    if (width < 60 || height < 40) return;
    const [left, bottom] = [46, height - 16];
    const [across, scale] = [(width - left) / ranks.length, (bottom - 4) / most];
    const parts = [draw("pattern", { id: `hatch-${when}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      draw("rect", { width: 2, height: 6, class: "hatch" }))];
    stacksOf(plan, when).forEach((pieces, rank) => {
      let y = bottom;
      for (const { expert, load, isCopy } of pieces) {
        if (load <= 0) continue;
        y -= load * scale;
        const box = { x: left + (rank + 0.1) * across, y, width: Math.max(1, across * 0.8), height: load * scale };
        const text = `rank ${rank}: ${count(load)} assignments${expert === null ? "" : ` of expert ${expert}${isCopy ? ", by a copy" : ""}`}`;
        parts.push(draw("rect", { ...box, class: expert === null ? "rest" : `expert-${colors.get(expert)}` }, draw("title", {}, text)));
        if (isCopy) parts.push(draw("rect", { ...box, fill: `url(#hatch-${when})`, "pointer-events": "none" }));
      }
      if (rank % Math.ceil(22 / across) === 0)
        parts.push(draw("text", { x: left + (rank + 0.5) * across, y: height - 3, class: "middle" }, rank));
    });
    const at = bottom - mean * scale;
    parts.push(draw("path", { class: "mean", d: `M${left} ${at}H${width}` }),
      draw("text", { x: left - 5, y: at + 4, class: "end" }, count(Math.round(mean))));
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("aria-label", `${when}: ${ranks.map((rank, i) => `rank ${i} ${rank[when]}`).join(", ")}`);
    svg.replaceChildren(...parts);
  }
}

function choose(layer) {
  pinned = Number(layer);
  byId("layer").value = layer;
  showPlan().catch(() => {}); // the next poll shows why
}

byId("token").value = sessionStorage.getItem(TOKEN_KEY) ?? "";
byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken();
  setText("policy-message", "token kept in this tab");
});
byId("layer").addEventListener("change", (event) => choose(event.target.value));
for (const when of WHEN) {
  const svg = byId(`heat-${when}`);
  svg.addEventListener("pointerover", (event) => setText("heat-value", event.target.dataset.text ?? ""));
  svg.addEventListener("pointerleave", () => setText("heat-value", ""));
  svg.addEventListener("click", (event) => event.target.dataset.layer && choose(event.target.dataset.layer));
}
document.addEventListener("visibilitychange", poll);
addEventListener("resize", poll);
setInterval(poll, POLL_MS);
poll();
