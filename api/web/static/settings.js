// What the reader chose: sampling, speculation, theme, key; and the dialogs that ask for it.
//
// Settings hold for all conversations and are kept in localStorage, the key only until the tab is
// closed. Knows the names of a request's fields; no socket, no conversation.

const PLACE = "specserve.settings", KEY = "specserve.key", THEME = "specserve.theme";
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"];
const THEMES = ["system", "light", "dark"];
const MOST_SEED = 2 ** 48;

const read = (storage, name) => { try { return globalThis[storage].getItem(name); } catch { return null; } };
const write = (storage, name, value) => { try { globalThis[storage].setItem(name, value); } catch { /* not kept */ } };

let held = {};
try { held = JSON.parse(read("localStorage", PLACE)) ?? {}; } catch { held = {}; }
let heldKey = read("sessionStorage", KEY) ?? "";

addEventListener("storage", (event) => {
  if (event.key === PLACE) try { held = JSON.parse(event.newValue) ?? {}; } catch { /* keep ours */ }
  if (event.key === THEME) showTheme();
});

export const settings = () => held;
export const key = () => heldKey;
export const setting = (name, value) => { held = { ...held, [name]: value }; write("localStorage", PLACE, JSON.stringify(held)); };

// The part of a request that settings decide. Always with a seed: then an answer that was lost can
// be had again, word for word.
export function asked() {
  const sampling = { seed: held.seed ?? Math.floor(Math.random() * MOST_SEED) };
  for (const name of SAMPLING) if (held[name] !== undefined) sampling[name] = held[name];
  const request = { sampling, speculation: { mode: held.speculation ?? "auto" } };
  if (held.max_tokens !== undefined) request.max_tokens = held.max_tokens;
  if (held.model) request.model = held.model;
  return request;
}

// Opens a dialog; the value of the button that closed it, "" if it was left otherwise.
export function open(dialog) {
  return new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true });
    for (const leave of dialog.querySelectorAll("[data-close]")) leave.onclick = () => dialog.close("");
    dialog.onclick = (event) => { if (event.target === dialog) dialog.close(""); };
    dialog.showModal();
  });
}

// Asks for settings and a conversation's system prompt; the prompt, or null if nothing changed.
export async function askSettings(system, models) {
  const dialog = document.getElementById("settings"), form = document.getElementById("settings-form");
  const fields = form.elements, numbers = [...SAMPLING, "max_tokens", "seed"];
  const fill = (values) => {
    for (const name of numbers) fields[name].value = values[name] ?? "";
    fields.speculation.value = values.speculation ?? "auto";
  };
  fill(held);
  fields.system.value = system;
  document.getElementById("model-field").hidden = models.length < 2;
  fields.model.replaceChildren(...models.map((name) => new Option(name, name)));
  if (models.includes(held.model)) fields.model.value = held.model;
  document.getElementById("settings-reset").onclick = () => fill({});
  if ((await open(dialog)) !== "save") return null;
  const chosen = { speculation: fields.speculation.value };
  for (const name of numbers) if (fields[name].value !== "") chosen[name] = fields[name].valueAsNumber;
  if (models.length > 1) chosen.model = fields.model.value;
  held = { ...(held.sources === undefined ? {} : { sources: held.sources }), ...chosen };
  write("localStorage", PLACE, JSON.stringify(held));
  return fields.system.value.trim();
}

// Asks for a key; whether one was given.
export async function askKey(wrong) {
  const dialog = document.getElementById("key"), form = document.getElementById("key-form");
  if (dialog.open) return false;
  document.getElementById("key-said").textContent = wrong
    ? "This key is not known here. Try another one."
    : "It is kept until this tab is closed and sent to this server only.";
  form.reset();
  if ((await open(dialog)) !== "use") return false;
  heldKey = form.elements.key.value.trim();
  form.reset();
  write("sessionStorage", KEY, heldKey);
  return heldKey !== "";
}

export async function askTitle(title) {
  const dialog = document.getElementById("rename"), field = dialog.querySelector("input");
  field.value = title;
  const answer = open(dialog);
  field.select();
  return (await answer) === "save" ? field.value.trim() : "";
}

export async function askRemove(title) {
  const dialog = document.getElementById("remove");
  document.getElementById("remove-name").textContent = title;
  return (await open(dialog)) === "delete";
}

export function showTheme() {
  const wanted = read("localStorage", THEME) ?? "system";
  if (wanted === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = wanted;
  document.getElementById("theme-name").textContent = `Theme: ${wanted}`;
}

export function nextTheme() {
  const wanted = read("localStorage", THEME) ?? "system";
  write("localStorage", THEME, THEMES[(THEMES.indexOf(wanted) + 1) % THEMES.length]);
  showTheme();
}
