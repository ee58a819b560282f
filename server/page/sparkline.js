// A small chart without axes: the latest values as a line or as bars, from 0 to their largest.

const NAMESPACE = "http://www.w3.org/2000/svg";
const WIDTH = 120, HEIGHT = 32; // of the drawing; the page stretches it
const LENGTH = 120, BARS = 40;

export class Sparkline {
  values = [];

  constructor(svg, label, { bars = false } = {}) {
    this.bars = bars;
    this.label = label;
    this.svg = svg;
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", label);
    this.area = svg.appendChild(document.createElementNS(NAMESPACE, "path"));
    this.area.setAttribute("class", bars ? "bars" : "area");
    this.line = svg.appendChild(document.createElementNS(NAMESPACE, "path"));
    this.line.setAttribute("class", "line");
  }

  get last() {
    return this.values.at(-1);
  }

  push(...values) {
    this.values = [...this.values, ...values].slice(-(this.bars ? BARS : LENGTH));
    this.#draw();
  }

  #draw() {
    const { values } = this;
    const most = Math.max(...values) || 1;
    const high = (value) => (HEIGHT - 2 - ((HEIGHT - 4) * value) / most).toFixed(2);
    this.svg.setAttribute("aria-label", `${this.label}: at most ${most.toPrecision(3)}, now ${this.last.toPrecision(3)}`);
    if (this.bars) {
      const step = WIDTH / BARS;
      const begin = WIDTH - values.length * step;
      const bar = (value, i) => `M${(begin + i * step).toFixed(2)} ${HEIGHT}V${high(value)}h${(step * 0.7).toFixed(2)}V${HEIGHT}z`;
      this.area.setAttribute("d", values.map(bar).join(""));
      return;
    }
    const step = WIDTH / (LENGTH - 1);
    const begin = WIDTH - (values.length - 1) * step;
    const line = values.map((value, i) => `${(begin + i * step).toFixed(2)} ${high(value)}`).join("L");
    this.line.setAttribute("d", `M${line}`);
    this.area.setAttribute("d", `M${line}V${HEIGHT}H${begin.toFixed(2)}z`);
  }
}
