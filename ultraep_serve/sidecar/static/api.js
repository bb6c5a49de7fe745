// Requests to the sidecar. Addresses are relative, so that a proxy may add a prefix.

const KEY = "ultraep-token";

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

// The token stays in this tab: sessionStorage is gone when the tab is closed.
export function token() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setToken(text) {
  sessionStorage.setItem(KEY, text.trim());
}

async function problem(answer) {
  try {
    const { detail } = await answer.json();
    return typeof detail === "string" ? detail : `refused (${answer.status})`;
  } catch {
    return `the sidecar answered ${answer.status}`;
  }
}
