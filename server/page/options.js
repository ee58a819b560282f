// The options of the playground: their fields, and the request that they make. They last as long as the tab.

import { ApiError, call } from "./api.js";
import { byId, make } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const KEPT = [...NUMBERS, "system", "stop-strings", "tools"];
const STORE = "jaxpaged-options";

export function setUpOptions() {
  const button = byId("options-button");
  button.addEventListener("click", () => {
    byId("options").hidden = !byId("options").hidden;
    button.setAttribute("aria-expanded", String(!byId("options").hidden));
  });
  const kept = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
  for (const id of KEPT) byId(id).value = kept[id] ?? "";
  byId("options").addEventListener("input", () => {
    sessionStorage.setItem(STORE, JSON.stringify(Object.fromEntries(KEPT.map((id) => [id, byId(id).value]))));
  });
}

// Fills the choice of models with what the server serves.
export async function loadModels() {
  const { data } = await (await call("v1/models")).json();
  const select = byId("model");
  const chosen = select.value;
  select.replaceChildren(...data.map(({ id }) => make("option", { value: id }, id)));
  if (data.some(({ id }) => id === chosen)) select.value = chosen;
  byId("served").textContent = data[0]?.id ?? "";
  byId("served").title = data[0]?.root ?? "";
}

// The model and the body of a request for these turns. What is left empty is the server's to choose.
export function requestBody(turns) {
  const model = byId("model").value;
  const body = {
    ...(model && { model }),
    messages: turns,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  const system = byId("system").value;
  if (system.trim()) body.messages = [{ role: "system", content: system }, ...turns];
  for (const id of NUMBERS) {
    const field = byId(id);
    if (field.validity.badInput) throw new ApiError(`${id} is not a number.`);
    if (field.value !== "") body[id] = Number(field.value);
  }
  const stop = byId("stop-strings").value.split("\n").filter((line) => line !== "");
  if (stop.length) body.stop = stop;
  const tools = byId("tools").value.trim();
  if (tools) body.tools = parsedTools(tools);
  return { model, body };
}

function parsedTools(text) {
  try {
    const tools = JSON.parse(text);
    return Array.isArray(tools) ? tools : [tools];
  } catch (error) {
    throw new ApiError(`The tools are not JSON: ${error.message}`);
  }
}
