// The header and the tiles: state, imbalance, time saved and spent, batches, ranks.

import { age, byId, byTime, bytes, count, make, ratio, seconds, setText } from "./common.js";

export function showOverview(overview) {
  showState(overview);
  showProof(overview);
  showImbalance(overview);
  showNow(overview);
  showSavings(overview);
  showBatches(overview);
  showRanks(overview);
}

function stateOf(overview) {
  if (overview.unbalanced) return ["warn", "○ NOT BALANCED"];
  if (overview.engine === null) return ["bad", "✖ NO ENGINE"];
  if (!overview.ready) return ["bad", "✖ NOT READY"];
  if (overview.switched_off) return ["bad", "✖ SWITCHED ITSELF OFF"];
  if (overview.policy === "off") return ["warn", "○ OFF"];
  if (overview.policy === "ideal") return ["bad", "▲ IDEAL: WRONG ANSWERS"];
  return ["good", "✔ BALANCING"];
}

function showState(overview) {
  const [level, text] = stateOf(overview);
  byId("state").dataset.level = level;
  setText("state", text);
  const reasons = Object.entries(overview.reasons);
  const all = reasons.map(([rank, why]) => `${rank === "run" ? "" : `rank ${rank}: `}${why}`);
  if (overview.unbalanced) all.push(`this server runs without balancing: ${overview.unbalanced}`);
  if (overview.switched_off) all.push(overview.switched_off);
  setText("reason", all.length > 2 ? `${all[0]}; and ${all.length - 1} more` : all.join("; "));
  byId("reason").title = all.join("\n");
  setText(
    "about",
    overview.engine === null
      ? ""
      : `${overview.engine}, ${overview.mode} parallel · policy ${overview.policy} · ` +
          `${ranksText(overview)} · ${overview.num_layers} MoE layers · ` +
          `${overview.num_experts} experts · ${overview.num_slots} slots per rank`,
  );
  document.title = `${text.split(" ")[0]} ultraep`;
}

function showProof(overview) {
  const { self_check: checked, verification: verified } = overview;
  const holder = byId("proof");
  if (!verified) {
    setText("proof", "");
    return;
  }
  const texts = {
    passed: `self-check passed in ${seconds(checked.seconds)}`,
    off: "no self-check",
    failed: "▲ self-check failed",
  };
  const bad = verified.failures > 0 || checked.result === "failed";
  holder.dataset.level = bad ? "bad" : "good";
  const counts = `verified ${count(verified.layers)} layers, ${count(verified.failures)} failed`;
  const warned = checked.checks.some((check) => check.warning) ? " with a warning" : "";
  const first = (texts[checked.result] ?? "self-check has not ended") + warned;
  setText("proof", `${first} · ${verified.failures ? "✖ " : ""}${counts}`);
  const parts = Object.entries(verified.by_check).map(
    ([check, { layers, failures }]) => `${check}: ${count(layers)} layers, ${count(failures)} failed`,
  );
  const checks = checked.checks.map((check) =>
    [`${check.name}, ${seconds(check.seconds)}: ${check.detail}`, check.warning].filter(Boolean).join("; "),
  );
  holder.title = ["At start", ...checks, "While serving", ...parts].join("\n");
}

function ranksText(overview) {
  const [here, all] = [overview.ranks.length, overview.num_ranks];
  return here === all ? `${all} ranks` : `${here} of ${all} ranks, the others on other hosts`;
}

function showImbalance(overview) {
  const imbalance = overview.phases.prefill?.imbalance;
  setText("before-mean", ratio(imbalance?.before.mean));
  setText("after-mean", ratio(imbalance?.after.mean));
  const known = imbalance && imbalance.before.mean !== null;
  const time = known ? byTime({ imbalance, time_imbalance: slowest(overview) && overview.time_imbalance }) : "";
  setText(
    "imbalance-fine",
    known
      ? `${time && `${time} · `}p99 ${ratio(imbalance.before.p99)} → ${ratio(imbalance.after.p99)} · max ` +
          `${ratio(imbalance.before.max)} → ${ratio(imbalance.after.max)} · ` +
          `floor ${ratio(overview.floor)}`
      : overview.policy === "off"
        ? "not measured while the policy is off"
        : "no prefill batch in the last minute",
  );
}

function showNow(overview) {
  const batch = overview.last_batch;
  setText("now-before", ratio(batch?.imbalance.before.mean));
  setText("now-after", ratio(batch?.imbalance.after.mean));
  setText(
    "now-batch",
    batch ? `batch ${batch.batch}, ${age(batch.time_ns, overview.time_ns)} ago` : "no batch yet",
  );
  setText(
    "now-fine",
    batch ? `${count(batch.tokens)} tokens · ${count(batch.replicas)} replicas · ${bytes(batch.bytes_moved)}` : "",
  );
}

function showSavings(overview) {
  const { saved_seconds: saved = 0, spent_seconds: spent = 0 } = overview.savings ?? {};
  const most = Math.max(saved, spent, 1e-9);
  byId("bar-saved").style.width = `${(100 * saved) / most}%`;
  byId("bar-spent").style.width = `${(100 * spent) / most}%`;
  const known = overview.savings && saved + spent > 0;
  setText("saved", known ? seconds(saved) : "–");
  setText("spent", known ? seconds(spent) : "–");
  let text = "";
  if (known && saved < spent) text = "▲ balancing costs more than it saves";
  else if (known) text = `saves ${spent > 0 ? (saved / spent).toFixed(1) : "∞"} times what it costs`;
  setText("savings-fine", text);
}

function showBatches(overview) {
  const phases = overview.phases;
  setText("prefill", phases.prefill ? count(phases.prefill.batches) : "–");
  setText("decode", phases.decode ? count(phases.decode.batches) : "–");
  const skipped = Object.entries(overview.batches?.skipped ?? {})
    .filter(([reason, number]) => number && reason !== "small")
    .map(([reason, number]) => `${count(number)} ${reason.replace("_", " ")}`);
  const planned = overview.batches ? [`${count(overview.batches.planned)} planned`] : [];
  setText("batches-fine", [...planned, ...skipped].join(" · "));
}

// The slowest rank of those that are not as fast as the fastest.
function slowest(overview) {
  const speed = Math.min(1, ...(overview.speeds ?? []));
  return speed < 1 ? { rank: overview.speeds.indexOf(speed), speed } : null;
}

function showRanks(overview) {
  const holder = byId("ranks");
  const ranks = overview.ranks;
  holder.classList.toggle("many", ranks.length > 24);
  while (holder.children.length > ranks.length) holder.lastChild.remove();
  while (holder.children.length < ranks.length) {
    const cell = make("span", { className: "rank" });
    cell.setAttribute("role", "listitem");
    holder.append(cell);
  }
  const speeds = overview.speeds ?? [];
  ranks.forEach((rank, i) => showRank(holder.children[i], rank, speeds[rank.rank % speeds.length]));
  const slow = slowest(overview);
  const alive = ranks.filter((rank) => rank.alive).length;
  const lost = ranks.reduce((sum, rank) => sum + rank.lost + rank.missed, 0);
  setText(
    "ranks-count",
    ranks.length
      ? `${alive} of ${ranks.length} alive${lost ? ` · ▲ ${count(lost)} records lost` : ""}` +
          (slow ? ` · rank ${slow.rank} at ${ratio(slow.speed)} of the speed` : "")
      : "none known",
  );
}

function showRank(cell, rank, speed = 1) {
  const level = rank.problem ? (rank.state === "starting" ? "warn" : "bad") : "good";
  cell.dataset.level = level;
  const text = `${rank.rank}`;
  if (cell.textContent !== text) cell.textContent = text;
  const batch = rank.last_batch_age_seconds;
  cell.title =
    `rank ${rank.rank}: ${rank.problem || "ready"}` +
    (batch === null ? "" : `, last batch ${seconds(batch)} ago`) +
    (speed < 1 ? `, speed ${ratio(speed)}` : "") +
    (rank.lost + rank.missed ? `, ${rank.lost + rank.missed} records lost` : "");
  cell.setAttribute("aria-label", cell.title);
}
