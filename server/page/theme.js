// Light, dark, or as the system has it.

import { byId } from "./dom.js";

const STORE = "jaxpaged-theme";
const THEMES = ["auto", "light", "dark"];

export function setUpTheme(onChange = () => {}) {
  const button = byId("theme-button");
  const apply = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    onChange();
  };
  let theme = localStorage.getItem(STORE) ?? "auto";
  apply(THEMES.includes(theme) ? theme : "auto");
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem(STORE, theme);
    apply(theme);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange);
}
