// The live view: asks /engine/state twice a second while it can be seen, and shows what it gets.

import { call } from "./api.js";
import { BlockMap } from "./blockmap.js";
import { ownIds } from "./chat.js";
import { Colours } from "./colours.js";
import { byId, make } from "./dom.js";
import { Sparkline } from "./sparkline.js";

const INTERVAL = 500; // milliseconds between two states
const PATIENCE = 3000; // after a failure
const MAX_ROWS = 100;

export class EngineView {
  #shown = false;
  #timer = null;
  #asking = null;
  #core = 0;
  #before = null;
  #state = null;
  #colours = new Colours();

  // onRefused is called with the message when the server wants another key.
  constructor({ onRefused }) {
    this.onRefused = onRefused;
    this.map = new BlockMap(byId("map"), byId("readout"));
    this.output = new Sparkline(byId("s-output"), "Output tokens per second over the last minute");
    this.prompt = new Sparkline(byId("s-prompt"), "Prompt tokens per second over the last minute");
    this.first = new Sparkline(byId("s-first"), "Time to first token of the latest requests", { bars: true });
    this.table = new RequestTable(byId("requests"), (row) => this.map.highlight(row));
    document.addEventListener("visibilitychange", () => this.#restart());
    new ResizeObserver(() => this.redraw()).observe(byId("map").parentElement);
  }

  setShown(shown) {
    this.#shown = shown;
    this.#restart();
  }

  // Asks at once.
  poll() {
    this.#restart();
  }

  // After a change of size or theme.
  redraw() {
    this.#colours.refresh();
    if (this.#state) this.#showMap(this.#state);
  }

  #restart() {
    clearTimeout(this.#timer);
    this.#asking?.abort();
    this.#asking = null;
    if (this.#shown && !document.hidden) this.#ask();
  }

  async #ask() {
    const asking = (this.#asking = new AbortController());
    let pause = INTERVAL;
    try {
      const state = await (await call("engine/state", { signal: asking.signal })).json();
      if (asking.signal.aborted) return;
      byId("engine-notice").hidden = true;
      this.#show(state);
    } catch (error) {
      if (asking.signal.aborted) return;
      this.#complain(error);
      if (error.status === 401) return this.onRefused(error.message); // goes on with the next key
      pause = PATIENCE;
    }
    this.#timer = setTimeout(() => this.#ask(), pause);
  }

  #complain(error) {
    if (!("status" in error)) console.error(error);
    byId("engine-notice").textContent = error.message;
    byId("engine-notice").hidden = false;
  }

  #show(state) {
    this.#state = state;
    this.#core = Math.min(this.#core, state.cores.length - 1);
    this.#showFigures(state);
    this.#showCharts(state);
    this.#showCores(state.cores);
    this.#showMap(state);
    this.#showRequests(state.cores);
    this.#before = state;
  }

  #showFigures({ cores }) {
    const sum = (name) => total(cores, name);
    const held = (name) => cores.reduce((sum, core) => sum + core[name], 0);
    byId("f-running").textContent = held("num_running");
    byId("f-waiting").textContent = held("num_waiting");
    byId("f-usage").textContent = percent(held("num_used_blocks"), held("num_blocks"));
    byId("f-hits").textContent = percent(sum("prefix_cache_hits"), sum("prefix_cache_queries"));
    byId("f-preemptions").textContent = sum("num_preemptions");
  }

  #showCharts(state) {
    const before = this.#before;
    if (before && state.time > before.time && state.cores.length === before.cores.length) {
      const rate = (name) => Math.max(0, total(state.cores, name) - total(before.cores, name)) / (state.time - before.time);
      this.output.push(rate("num_generated_tokens"));
      this.prompt.push(rate("num_prompt_tokens"));
      byId("c-output").textContent = whole(this.output.last);
      byId("c-prompt").textContent = whole(this.prompt.last);
    }
    const { count, recent } = state.first_tokens;
    const known = before?.first_tokens.count ?? 0;
    const fresh = Math.min(recent.length, count < known ? count : count - known);
    if (fresh) this.first.push(...recent.slice(-fresh));
    if (this.first.values.length) byId("c-first").textContent = seconds(this.first.last);
  }

  #showCores(cores) {
    const group = byId("cores");
    group.hidden = cores.length < 2;
    if (group.hidden) return;
    if (group.children.length !== cores.length) {
      group.replaceChildren(...cores.map((_, i) => make("button", { type: "button", onclick: () => this.#choose(i) })));
    }
    cores.forEach((core, i) => {
      group.children[i].textContent = `Core ${i}: ${percent(core.num_used_blocks, core.num_blocks)}`;
      group.children[i].setAttribute("aria-pressed", String(i === this.#core));
    });
  }

  #choose(core) {
    this.#core = core;
    this.#showCores(this.#state.cores);
    this.#showMap(this.#state);
  }

  #showMap({ cores }) {
    const core = cores[this.#core];
    const { num_blocks: blocks, block_size: size } = core;
    byId("map-count").textContent = `${blocks.toLocaleString("en")} × ${size} tokens`;
    this.#colours.keep(cores.flatMap((each, i) => each.requests.map((request) => keyOf(i, request))));
    const requests = core.requests.map((request) => ({
      key: keyOf(this.#core, request),
      name: shortId(request),
      colour: this.#colours.of(keyOf(this.#core, request)),
    }));
    this.map.show(core, requests, this.#colours);
  }

  #showRequests(cores) {
    const rows = cores.flatMap((core, i) => core.requests.map((request) => ({ request, core: i })));
    const live = cores.reduce((count, core) => count + core.num_running + core.num_waiting, 0);
    byId("request-count").textContent = live || "";
    byId("idle").hidden = live > 0 && live <= MAX_ROWS;
    byId("idle").textContent = live ? `and ${live - Math.min(rows.length, MAX_ROWS)} more` : "No requests.";
    this.table.show(rows.slice(0, MAX_ROWS), this.#colours);
  }
}

// Rows stay the same elements, so that what is pointed at or focused stays so.
class RequestTable {
  #rows = new Map();

  constructor(body, onPoint) {
    this.body = body;
    this.onPoint = onPoint;
  }

  show(entries, colours) {
    const rows = new Map();
    for (const { request, core } of entries) {
      const key = keyOf(core, request);
      const row = this.#rows.get(key) ?? this.#make(key, request);
      row.swatch.style.background = request.num_blocks ? colours.of(key) : "none";
      row.mark.hidden = ![...ownIds].some((id) => request.request_id.startsWith(id));
      const cells = [stateOf(request), request.num_prompt_tokens, request.num_output_tokens, request.num_blocks, age(request.age)];
      cells.forEach((text, i) => (row.cells[i].textContent = text));
      row.element.classList.toggle("waiting", request.status === "waiting");
      rows.set(key, row);
    }
    const elements = [...rows.values()].map((row) => row.element);
    const current = [...this.body.children];
    if (elements.length !== current.length || elements.some((element, i) => element !== current[i])) {
      this.body.replaceChildren(...elements);
    }
    this.#rows = rows;
  }

  #make(key, request) {
    const swatch = make("i", { class: "swatch" });
    const cells = ["", "n", "n", "n", "n"].map((kind) => make("td", { class: kind }));
    const mark = make("em", { hidden: true }, "this page");
    const name = make("th", { scope: "row", title: request.request_id }, swatch, shortId(request), mark);
    const element = make("tr", { tabindex: "0" }, name, ...cells);
    for (const type of ["pointerenter", "focus"]) element.addEventListener(type, () => this.onPoint(key));
    for (const type of ["pointerleave", "blur"]) element.addEventListener(type, () => this.onPoint(null));
    return { element, swatch, mark, cells };
  }
}

const keyOf = (core, { request_id: id, index }) => `${core}/${id}/${index}`;

// The id as its client knows it, or a number where ids are hidden; of several samples, which one.
function shortId({ request_id: id, index }) {
  const name = id.replace(/(?<=.)#\d+$/, "").replace(/^(chatcmpl|cmpl|embd)-/, "");
  return index ? `${name} [${index}]` : name;
}

function stateOf({ status, num_computed_tokens: computed, num_prompt_tokens: prompt, num_output_tokens: output, num_preemptions: lost }) {
  if (status === "waiting") return lost ? "preempted" : "waiting";
  return output || computed >= prompt ? "decode" : `prompt ${percent(computed, prompt)}`;
}

const total = (cores, name) => cores.reduce((sum, { stats }) => sum + stats[name], 0);
const percent = (part, all) => (all ? `${((100 * part) / all).toFixed(part && part < all / 10 ? 1 : 0)}%` : "–");
const whole = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`);
const age = (value) => (value < 60 ? `${value.toFixed(1)} s` : `${Math.floor(value / 60)} m ${Math.floor(value % 60)} s`);
