// Bars of one layer: assignments per rank, stacked by expert, before and after.

import { byId, color, count, setText, sharp } from "./dom.js";

// Okabe and Ito's palette, made for colour-blind readers.
const PALETTE = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"];
const STAGES = ["before", "after"];
const drawn = {}; // stage -> pieces with their places

export function startStacks() {
  for (const stage of STAGES) {
    const canvas = byId(`stack-${stage}`);
    canvas.addEventListener("pointermove", (event) => tell(stage, canvas, event));
    canvas.addEventListener("pointerleave", () => setText("stack-value", ""));
  }
}

// Of every replicated expert.
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
  for (const stage of STAGES) {
    const stacks = stage === "before" ? stacksBefore(plan) : stacksAfter(plan);
    drawn[stage] = draw(byId(`stack-${stage}`), stacks, colors, most, mean);
    byId(`stack-${stage}`).setAttribute(
      "aria-label",
      `${stage}: ${plan.ranks.map((rank, i) => `rank ${i} ${rank[stage]}`).join(", ")}`,
    );
  }
}

// Per rank the pieces { expert, load, copy }; one piece without expert where experts are unknown.
function stacksBefore(plan) {
  const masters = plan.expert_assignments.length / plan.ranks.length;
  return plan.ranks.map((rank, r) => {
    const mine = plan.expert_assignments.slice(r * masters, (r + 1) * masters);
    const pieces = mine.map((load, e) => ({ expert: r * masters + e, load, copy: false }));
    return complete(pieces, rank.before);
  });
}

function stacksAfter(plan) {
  const left = [...plan.expert_assignments];
  for (const copy of plan.replicas) left[copy.expert] -= copy.assignments;
  const masters = left.length / plan.ranks.length;
  return plan.ranks.map((rank, r) => {
    const home = left
      .slice(r * masters, (r + 1) * masters)
      .map((load, e) => ({ expert: r * masters + e, load, copy: false }));
    const copies = plan.replicas
      .filter((copy) => copy.rank === r)
      .map((copy) => ({ expert: copy.expert, load: copy.assignments, copy: true }));
    return complete([...home, ...copies], rank.after);
  });
}

function complete(pieces, total) {
  const known = pieces.reduce((sum, piece) => sum + piece.load, 0);
  if (known !== total) return [{ expert: null, load: total, copy: false }];
  return pieces.filter((piece) => piece.load > 0);
}

function draw(canvas, stacks, colors, most, mean) {
  const surface = sharp(canvas);
  if (!surface) return [];
  const { context, width, height } = surface;
  const [left, bottom] = [56, 15];
  const across = (width - left) / stacks.length;
  const scale = (height - bottom - 4) / most;
  const places = [];
  const rest = [color("rest"), color("rest-2")];
  stacks.forEach((stack, rank) => {
    const [x, wide] = [left + rank * across + across * 0.1, Math.max(1, across * 0.8)];
    let y = height - bottom;
    // Replicated experts lie at the bottom, where they are compared most easily.
    const order = [...stack].sort((a, b) => colors.has(b.expert) - colors.has(a.expert) || b.load - a.load);
    order.forEach((piece, i) => {
      const high = piece.load * scale;
      y -= high;
      context.fillStyle = colors.get(piece.expert) ?? rest[i % 2];
      context.fillRect(x, y, wide, high);
      if (piece.copy) hatch(context, x, y, wide, high);
      places.push({ x, y, wide, high, rank, ...piece });
    });
  });
  drawAxis(context, { width, height, left, bottom, across, scale, mean, ranks: stacks.length });
  return places;
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

function tell(stage, canvas, event) {
  const box = canvas.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const hit = (drawn[stage] ?? []).find(
    (piece) => x >= piece.x && x <= piece.x + piece.wide && y >= piece.y && y <= piece.y + piece.high,
  );
  setText(
    "stack-value",
    hit
      ? `${stage}, rank ${hit.rank}: ${count(hit.load)} assignments` +
          (hit.expert === null ? "" : ` of expert ${hit.expert}${hit.copy ? ", computed by a replica" : ""}`)
      : "",
  );
}
