// Helpers of all files: elements, text, numbers, canvases, requests to the sidecar.

export const byId = (id) => document.getElementById(id);

export function setText(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function emptyRow(columns, text) {
  return make("tr", {}, make("td", { colSpan: columns, className: "empty", textContent: text }));
}

export const ratio = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));

// The time imbalance where ranks are not equally fast, else nothing.
export function byTime(summary) {
  const { imbalance, time_imbalance: time } = summary;
  const differs = (when) => Math.abs((time?.[when].mean ?? 1) - (imbalance[when].mean ?? 1)) >= 0.005;
  if (!time || !(differs("before") || differs("after"))) return "";
  return `by time ${ratio(time.before.mean)} → ${ratio(time.after.mean)}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 100) return `${value.toFixed(0)} s`;
  if (size >= 1) return `${value.toFixed(2)} s`;
  if (size >= 1e-3) return `${(value * 1e3).toFixed(size >= 0.1 ? 0 : 1)} ms`;
  return `${(value * 1e6).toFixed(0)} µs`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

export function age(ns, nowNs) {
  const passed = Math.max(0, (nowNs - ns) / 1e9);
  if (passed < 100) return `${passed.toFixed(0)} s`;
  if (passed < 6000) return `${(passed / 60).toFixed(0)} min`;
  return `${(passed / 3600).toFixed(0)} h`;
}

export const count = (value) => value.toLocaleString("en");

// A colour of the style sheet as the browser resolves it, for canvases.
const probe = make("i", { hidden: true });
export function color(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

// The canvas at its size on the page, in device pixels; null while it is not shown.
export function fitCanvas(canvas) {
  const scale = window.devicePixelRatio || 1;
  const { width, height } = canvas.getBoundingClientRect();
  if (width < 4 || height < 4) return null;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return { context, width, height };
}

const TOKEN_KEY = "ultraep-token";

// Addresses are relative, so that a proxy may add a prefix.
export async function get(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" } });
  if (!answer.ok) throw new Error(await problem(answer));
  return answer.json();
}

export async function post(path, body) {
  const answer = await fetch(path, {
    method: "POST",
    headers: { Authorization: `Bearer ${token()}`, "Content-Type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!answer.ok) throw new Error(await problem(answer));
  return answer.json();
}

// sessionStorage: the token is forgotten when the tab is closed.
export function token() {
  return sessionStorage.getItem(TOKEN_KEY) ?? "";
}

export function setToken(text) {
  sessionStorage.setItem(TOKEN_KEY, text.trim());
}

async function problem(answer) {
  try {
    const { detail } = await answer.json();
    return typeof detail === "string" ? detail : `refused (${answer.status})`;
  } catch {
    return `the sidecar answered ${answer.status}`;
  }
}
