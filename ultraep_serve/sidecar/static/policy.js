// The policy in force, and the buttons that change it.

import { byId, get, make, post, setText, setToken, token } from "./common.js";

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
    await change(chosen.dataset.policy);
    changed();
  });
}

export async function loadPolicy() {
  config = await get("v1/config");
  const buttons = config.policies.map((name) => choice(name, name === config.policy));
  const holder = byId("policies");
  const focused = document.activeElement?.parentElement === holder ? document.activeElement.textContent : null;
  holder.replaceChildren(...buttons);
  buttons.find((button) => button.textContent === focused)?.focus();
  for (const button of buttons) button.disabled = !config.control_open || config.policy === null;
  setText(
    "policy-note",
    config.control_open ? "from the next batch on, on all ranks" : "control is closed: the sidecar has no token",
  );
}

function choice(policy, pressed) {
  const button = make("button", { type: "button", textContent: policy });
  button.dataset.policy = policy;
  button.setAttribute("aria-pressed", String(pressed));
  return button;
}

async function change(policy) {
  setToken(byId("token").value);
  try {
    await post("v1/control/policy", { policy });
    showMessage(`policy ${policy}, from the next batch on`);
  } catch (error) {
    showMessage(error.message, "bad");
  }
}

function showMessage(text, level = "good") {
  byId("policy-message").dataset.level = level;
  setText("policy-message", text);
}
