// The page: its views, its theme, the key; and it makes the parts know each other.

import { apiKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { EngineView } from "./engine.js";
import { loadModels, setUpOptions } from "./options.js";
import { setUpTheme } from "./theme.js";

const WIDE = matchMedia("(min-width: 1100px)");
const VIEWS = ["chat", "both", "engine"];

const engine = new EngineView({ onRefused: askForKey });
new Chat({ onRefused: askForKey });
setUpTheme(() => engine.redraw());
setUpOptions();
setUpKey();
setUpViews();
showModels();

function setUpViews() {
  const show = () => {
    const named = location.hash.slice(1);
    let view = VIEWS.includes(named) ? named : WIDE.matches ? "both" : "chat";
    if (view === "both" && !WIDE.matches) view = "chat";
    byId("main").dataset.view = view;
    for (const link of document.querySelectorAll("[data-view][href]")) {
      if (link.dataset.view === view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    engine.setShown(view !== "chat");
  };
  addEventListener("hashchange", show);
  WIDE.addEventListener("change", show);
  show();
}

function setUpKey() {
  const dialog = byId("key-dialog");
  byId("key-button").addEventListener("click", () => askForKey());
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-form").addEventListener("submit", () => {
    apiKey.set(byId("key").value.trim());
    showModels();
    engine.poll();
  });
}

// Opens the dialog, with the server's complaint if there is one.
function askForKey(message) {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  byId("key-message").textContent =
    message ?? "Sent with every request of this page. It is kept in this tab only, and forgotten with it.";
  byId("key").value = apiKey.get();
  dialog.showModal();
}

async function showModels() {
  try {
    await loadModels();
  } catch (error) {
    if (error.status === 401) askForKey(error.message);
    else byId("served").textContent = error.message;
  }
}
