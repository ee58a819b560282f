// A colour for each live request, as far as can be from those of the others, and the theme's own.

const GOLDEN_ANGLE = 137.508;
const PLACES = { shared: "swatch-shared", cached: "swatch-cached", free: "swatch-free" };

export class Colours {
  #hues = new Map();
  #next = 0;

  constructor() {
    this.refresh();
  }

  // Reads the theme's colours from the legend.
  refresh() {
    for (const [name, id] of Object.entries(PLACES)) {
      this[name] = getComputedStyle(document.getElementById(id)).backgroundColor;
    }
    this.line = getComputedStyle(document.getElementById(PLACES.cached)).borderTopColor;
    this.dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const { theme } = document.documentElement.dataset;
    if (theme) this.dark = theme === "dark";
  }

  of(key) {
    if (!this.#hues.has(key)) this.#hues.set(key, (24 + this.#next++ * GOLDEN_ANGLE) % 360);
    const hue = this.#hues.get(key).toFixed(1);
    return this.dark ? `oklch(0.74 0.13 ${hue})` : `oklch(0.68 0.15 ${hue})`;
  }

  // Forgets all requests but these.
  keep(keys) {
    const live = new Set(keys);
    for (const key of this.#hues.keys()) if (!live.has(key)) this.#hues.delete(key);
  }
}
