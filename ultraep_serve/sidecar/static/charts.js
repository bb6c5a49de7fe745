// Charts over time: imbalance, and seconds saved and spent.

import { byId, color, make } from "./common.js";

const SPANS = [
  { label: "5 min", seconds: 300, step: 2 },
  { label: "15 min", seconds: 900, step: 5 },
  { label: "1 h", seconds: 3600, step: 20 },
];
const charts = new Map(); // element id -> uPlot
let span = SPANS[0];
let last = null;

export const historyPath = () => `v1/balance/history?seconds=${span.seconds}&step=${span.step}`;

export function startCharts(changed) {
  const buttons = SPANS.map((choice) => {
    const button = make("button", { type: "button", textContent: choice.label });
    button.setAttribute("aria-pressed", String(choice === span));
    button.addEventListener("click", () => {
      span = choice;
      buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      changed();
    });
    return button;
  });
  byId("spans").append(...buttons);
  const resized = new ResizeObserver(() => charts.forEach((chart, id) => chart.setSize(sizeOf(id))));
  ["chart-imbalance", "chart-savings"].forEach((id) => resized.observe(byId(id)));
}

export function showHistory(history) {
  last = history;
  const step = history.step_seconds;
  const perSecond = (values) => values.map((value) => value / step);
  const whole = (values) => values.slice(0, -1); // the last step is still running
  const times = whole(history.time_seconds);
  draw("chart-imbalance", imbalanceOptions, [
    times,
    whole(history.before_mean),
    whole(history.after_mean),
    whole(history.before_max),
    whole(history.after_max),
    whole(history.time_after_mean).map((time, i) => (time === history.after_mean[i] ? null : time)),
  ]);
  const byTime = history.time_after_mean.some((time, i) => Math.abs(time - history.after_mean[i]) >= 0.005);
  byId("key-time").hidden = !byTime;
  draw("chart-savings", savingsOptions, [
    times,
    perSecond(whole(history.saved_seconds)),
    perSecond(whole(history.spent_seconds)),
  ]);
}

// A chart reads its colours from the style sheet when it is created.
export function redrawCharts() {
  charts.forEach((chart) => chart.destroy());
  charts.clear();
  if (last) showHistory(last);
}

function draw(id, options, data) {
  const size = sizeOf(id);
  if (size.width < 40 || size.height < 40) return;
  if (charts.has(id)) charts.get(id).setData(data);
  else charts.set(id, new uPlot({ ...size, ...options() }, data, byId(id)));
}

function sizeOf(id) {
  const box = byId(id).getBoundingClientRect();
  return { width: Math.floor(box.width), height: Math.floor(box.height) };
}

// Lines span steps without a prefill batch, so that sparse traffic stays readable.
const line = (label, name, dash, width = 2) => ({
  label,
  stroke: color(name),
  width,
  dash,
  spanGaps: true,
  points: { show: false },
});

function imbalanceOptions() {
  return {
    ...common((value) => value.toFixed(2)),
    scales: { y: { range: (chart, low, high) => [1 - 0.03 * ((high ?? 2) - 1), Math.max(1.2, high ?? 2) * 1.02] } },
    series: [
      {},
      line("before", "before"),
      line("after", "after", [7, 3]),
      line("before, max", "before", [1, 3], 1),
      line("after, max", "after", [1, 3], 1),
      line("after, by time", "after", undefined, 1),
    ],
  };
}

function savingsOptions() {
  return {
    ...common((value) => (value >= 1 ? value.toFixed(1) : String(Number(value.toPrecision(2))))),
    scales: { y: { range: (chart, low, high) => [0, Math.max(high ?? 0, 1e-3) * 1.05] } },
    series: [{}, { ...line("saved", "saved"), fill: faint("saved") }, line("spent", "spent", [7, 3])],
  };
}

function common(format) {
  const axis = {
    stroke: color("quiet"),
    font: "11px system-ui, sans-serif",
    grid: { stroke: color("line"), width: 1 },
    ticks: { show: false },
  };
  const clock = (chart, times) =>
    times.map((time) => new Date(time * 1000).toTimeString().slice(0, 5));
  return {
    padding: [6, 10, 0, 0],
    cursor: { drag: { x: false, y: false } },
    axes: [
      { ...axis, values: clock, size: 22, space: 50, incrs: [60, 120, 300, 600, 900, 1800] },
      { ...axis, values: (chart, values) => values.map(format), size: 44, space: 28 },
    ],
  };
}

const faint = (name) => color(name).replace("rgb(", "rgba(").replace(")", ", 0.13)");
