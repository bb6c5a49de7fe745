// Bars of one layer: assignments per rank, stacked by expert, before and after balancing.

import { byId, color, count, setText, fitCanvas } from "./common.js";

// Okabe and Ito's palette, made for colour-blind readers.
const PALETTE = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"];
const WHEN = ["before", "after"];
const drawn = {}; // when -> pieces with their positions

export function startStacks() {
  for (const when of WHEN) {
    const canvas = byId(`stack-${when}`);
    canvas.addEventListener("pointermove", (event) => showValue(when, canvas, event));
    canvas.addEventListener("pointerleave", () => setText("stack-value", ""));
  }
}

// The colour of every replicated expert.
export function colorsOf(plan) {
  const colors = new Map();
  for (const { expert } of plan.replicas) {
    if (!colors.has(expert)) colors.set(expert, PALETTE[colors.size % PALETTE.length]);
  }
  return colors;
}

export function drawStacks(plan) {
  const most = Math.max(1, ...plan.ranks.map((rank) => Math.max(rank.before, rank.after)));
  const mean = plan.ranks.reduce((sum, rank) => sum + rank.before, 0) / plan.ranks.length;
  const colors = colorsOf(plan);
  for (const when of WHEN) {
    const stacks = when === "before" ? stacksBefore(plan) : stacksAfter(plan);
    drawn[when] = draw(byId(`stack-${when}`), stacks, colors, most, mean);
    byId(`stack-${when}`).setAttribute(
      "aria-label",
      `${when}: ${plan.ranks.map((rank, i) => `rank ${i} ${rank[when]}`).join(", ")}`,
    );
  }
}

// Per rank the pieces { expert, load, isReplica }; a single one where experts are unknown.
function stacksBefore(plan) {
  return plan.ranks.map((rank, r) => complete(masters(plan, plan.expert_assignments, r), rank.before));
}

function stacksAfter(plan) {
  const left = [...plan.expert_assignments];
  for (const { expert, assignments } of plan.replicas) left[expert] -= assignments;
  return plan.ranks.map((rank, r) => {
    const replicas = plan.replicas
      .filter((replica) => replica.rank === r)
      .map(({ expert, assignments }) => ({ expert, load: assignments, isReplica: true }));
    return complete([...masters(plan, left, r), ...replicas], rank.after);
  });
}

function masters(plan, loads, rank) {
  const number = loads.length / plan.ranks.length;
  return loads
    .slice(rank * number, (rank + 1) * number)
    .map((load, i) => ({ expert: rank * number + i, load, isReplica: false }));
}

function complete(pieces, total) {
  const known = pieces.reduce((sum, piece) => sum + piece.load, 0);
  if (known !== total) return [{ expert: null, load: total, isReplica: false }];
  return pieces.filter((piece) => piece.load > 0);
}

function draw(canvas, stacks, colors, most, mean) {
  const surface = fitCanvas(canvas);
  if (!surface) return [];
  const { context, width, height } = surface;
  const [left, bottom] = [56, 15];
  const across = (width - left) / stacks.length;
  const scale = (height - bottom - 4) / most;
  const placed = [];
  const rest = [color("rest"), color("rest-2")];
  stacks.forEach((stack, rank) => {
    const [x, wide] = [left + rank * across + across * 0.1, Math.max(1, across * 0.8)];
    let y = height - bottom;
    // Replicated experts are at the bottom, where they are easiest to compare.
    const order = [...stack].sort((a, b) => colors.has(b.expert) - colors.has(a.expert) || b.load - a.load);
    order.forEach((piece, i) => {
      const high = piece.load * scale;
      y -= high;
      context.fillStyle = colors.get(piece.expert) ?? rest[i % 2];
      context.fillRect(x, y, wide, high);
      if (piece.isReplica) hatch(context, x, y, wide, high);
      placed.push({ x, y, wide, high, rank, ...piece });
    });
  });
  drawAxis(context, { width, height, left, bottom, across, scale, mean, ranks: stacks.length });
  return placed;
}

function hatch(context, x, y, wide, high) {
  context.save();
  context.beginPath();
  context.rect(x, y, wide, high);
  context.clip();
  context.strokeStyle = color("panel");
  context.lineWidth = 1.2;
  context.beginPath();
  for (let offset = -high; offset < wide; offset += 6) {
    context.moveTo(x + offset, y + high);
    context.lineTo(x + offset + high, y);
  }
  context.stroke();
  context.restore();
}

function drawAxis(context, { width, height, left, bottom, across, scale, mean, ranks }) {
  context.fillStyle = color("quiet");
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  const every = Math.ceil(24 / across);
  for (let rank = 0; rank < ranks; rank += every) {
    context.fillText(`${rank}`, left + (rank + 0.5) * across, height - 3);
  }
  const y = height - bottom - mean * scale;
  context.textAlign = "right";
  context.fillText("rank", left - 5, height - 3);
  context.fillText("mean", left - 5, y - 1);
  context.fillText(count(Math.round(mean)), left - 5, y + 11);
  context.strokeStyle = color("text");
  context.setLineDash([4, 3]);
  context.beginPath();
  context.moveTo(left, y);
  context.lineTo(width, y);
  context.stroke();
  context.setLineDash([]);
}

function showValue(when, canvas, event) {
  const box = canvas.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const hit = (drawn[when] ?? []).find(
    (piece) => x >= piece.x && x <= piece.x + piece.wide && y >= piece.y && y <= piece.y + piece.high,
  );
  setText(
    "stack-value",
    hit
      ? `${when}, rank ${hit.rank}: ${count(hit.load)} assignments` +
          (hit.expert === null ? "" : ` of expert ${hit.expert}${hit.isReplica ? ", computed by a replica" : ""}`)
      : "",
  );
}
