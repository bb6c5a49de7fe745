// Load of each rank in each layer, before and after balancing, as heat maps on canvases.

import { byId, color, setText, fitCanvas } from "./common.js";

const WHEN = ["before", "after"];
const canvasOf = (when) => byId(`heat-${when}`);
let data = null;
let at = null; // the selected cell: { row, rank }

export function startHeatmaps() {
  for (const when of WHEN) {
    const canvas = canvasOf(when);
    canvas.addEventListener("pointermove", (event) => point(cellAt(canvas, event)));
    canvas.addEventListener("pointerleave", () => point(null));
    canvas.addEventListener("keydown", (event) => move(event));
    canvas.addEventListener("blur", () => point(null));
  }
  new ResizeObserver(redrawHeatmaps).observe(byId("panel-heat"));
}

export function showHeatmap(heatmap) {
  data = heatmap;
  redrawHeatmaps();
}

export function redrawHeatmaps() {
  const colors = [color("cold"), color("even"), color("hot")].map(channels);
  drawScale(colors);
  if (data === null) return;
  for (const when of WHEN) drawMap(canvasOf(when), data[when], colors);
  showValue();
}

function drawMap(canvas, rows, colors) {
  const surface = fitCanvas(canvas);
  if (!surface || !rows.length) return;
  const { context, width, height } = surface;
  const cellWidth = width / rows[0].length;
  const cellHeight = height / rows.length;
  rows.forEach((row, y) =>
    row.forEach((load, x) => {
      context.fillStyle = shade(load, colors);
      // Rounded so that neighbouring cells touch at any size.
      const [left, top] = [Math.floor(x * cellWidth), Math.floor(y * cellHeight)];
      const [right, bottom] = [Math.ceil((x + 1) * cellWidth), Math.ceil((y + 1) * cellHeight)];
      context.fillRect(left, top, right - left, bottom - top);
    }),
  );
  if (at && at.row < rows.length && at.rank < rows[0].length) {
    context.strokeStyle = color("text");
    context.lineWidth = 2;
    context.strokeRect(at.rank * cellWidth, at.row * cellHeight, cellWidth, cellHeight);
  }
}

function drawScale(colors) {
  const canvas = byId("scale");
  const context = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x += 1) {
    context.fillStyle = shade((2 * x) / (canvas.width - 1), colors);
    context.fillRect(x, 0, 1, canvas.height);
  }
}

// Two hues, below and above the mean, that colour-blind people can distinguish.
function shade(load, [cold, even, hot]) {
  const distance = Math.min(1, Math.abs(load - 1)) ** 0.8;
  const end = load < 1 ? cold : hot;
  const mixed = even.map((channel, i) => Math.round(channel + distance * (end[i] - channel)));
  return `rgb(${mixed.join(",")})`;
}

const channels = (text) => text.match(/[\d.]+/g).slice(0, 3).map(Number);

function cellAt(canvas, event) {
  if (!data?.layers.length) return null;
  const box = canvas.getBoundingClientRect();
  const row = ((event.clientY - box.top) / box.height) * data.layers.length;
  const rank = ((event.clientX - box.left) / box.width) * data.before[0].length;
  return inside(Math.floor(row), Math.floor(rank));
}

function move(event) {
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const step = steps[event.key];
  if (!step || !data?.layers.length) return;
  event.preventDefault();
  point(at ? inside(at.row + step[0], at.rank + step[1]) : { row: 0, rank: 0 });
}

function inside(row, rank) {
  const clamp = (value, cells) => Math.max(0, Math.min(cells - 1, value));
  return { row: clamp(row, data.layers.length), rank: clamp(rank, data.before[0].length) };
}

function point(cell) {
  if (cell?.row === at?.row && cell?.rank === at?.rank) return;
  at = cell;
  redrawHeatmaps();
}

function showValue() {
  const cell = at && data.before[at.row]?.[at.rank] !== undefined ? at : null;
  setText(
    "heat-value",
    cell
      ? `layer ${data.layers[cell.row]}, rank ${cell.rank}: ` +
          `${data.before[cell.row][cell.rank].toFixed(2)} → ${data.after[cell.row][cell.rank].toFixed(2)}`
      : data.layers.length
        ? `${data.layers.length} layers down, ${data.before[0].length} ranks across; point or use arrow keys`
        : "no prefill batch yet",
  );
}
