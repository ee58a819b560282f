// One answer, as it grows: its text, reasoning and tool calls, and the line of figures under it.

import { make } from "./dom.js";
import { copyText, render } from "./markdown.js";

export class Answer {
  content = "";
  reasoning = "";
  calls = [];
  stopped = false;
  model = "";
  #finish = null;
  #usage = null;
  #asked = performance.now();
  #first = null;
  #last = null;
  #drawing = null;

  constructor() {
    this.thoughts = make("div", { class: "text" });
    this.folded = make("details", { class: "reasoning", hidden: true }, make("summary", {}, "Reasoning"), this.thoughts);
    this.text = make("div", { class: "text" });
    this.tools = make("div", { class: "calls" });
    this.figures = make("span", {}, "waiting for the first token…");
    this.foot = make("footer", {}, this.figures);
    this.element = make("article", { class: "turn assistant", "aria-label": "Answer", "aria-busy": "true" },
      this.folded, this.text, this.tools, this.foot);
  }

  get isEmpty() {
    return !this.content && !this.reasoning && !this.calls.length && this.#finish === null;
  }

  // The message that this is in the next request; always the same object.
  get turn() {
    if (!this.element.turn) {
      this.element.turn = { role: "assistant", content: this.content };
      if (this.calls.length) this.element.turn.tool_calls = this.calls;
    }
    return this.element.turn;
  }

  take(chunk, drawn) {
    this.#usage = chunk.usage ?? this.#usage;
    const choice = chunk.choices?.[0];
    if (choice) {
      const { content, tool_calls: calls, ...rest } = choice.delta;
      const reasoning = rest.reasoning_content ?? rest.reasoning;
      if (content || reasoning || calls?.length) this.#count();
      this.content += content ?? "";
      this.reasoning += reasoning ?? "";
      for (const call of calls ?? []) this.#addCall(call);
      if (choice.finish_reason) this.#finish = choice.finish_reason;
    }
    this.#drawSoon(drawn);
  }

  finish() {
    clearTimeout(this.#drawing?.timer);
    this.#draw();
    this.element.removeAttribute("aria-busy");
  }

  addActions(retry) {
    const copy = make("button", { type: "button", class: "quiet", onclick: () => copyText(copy, this.content) }, "Copy");
    this.foot.append(make("span", { class: "acts" }, copy, make("button", { type: "button", class: "quiet", onclick: retry }, "Retry")));
  }

  // A field for the result of each call; `send` gets the turns that answer them.
  askForResults(send) {
    const fields = this.calls.map((call, i) => {
      const field = make("textarea", { rows: "1", placeholder: "Result", "aria-label": `Result of ${call.function.name}` });
      this.tools.children[i].append(field);
      return field;
    });
    const button = make("button", { type: "button" }, "Send results");
    button.onclick = () => {
      button.remove();
      for (const field of fields) field.remove();
      send(this.calls.map((call, i) => ({ role: "tool", tool_call_id: call.id, content: fields[i].value })));
    };
    this.tools.append(button);
  }

  #count() {
    this.#last = performance.now();
    this.#first ??= this.#last;
  }

  #addCall({ index = 0, id, function: { name, arguments: given } = {} }) {
    const call = (this.calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (id) call.id = id;
    if (name) call.function.name += name;
    if (given) call.function.arguments += given;
  }

  // Long answers are drawn less often: no more than a quarter of the time is spent here.
  #drawSoon(drawn) {
    if (this.#drawing) return;
    const pause = Math.max(16, 3 * (this.drawSeconds ?? 0));
    this.#drawing = { timer: setTimeout(() => ((this.#drawing = null), this.#draw(), drawn()), pause) };
  }

  #draw() {
    const begin = performance.now();
    this.text.replaceChildren(render(this.content));
    this.folded.hidden = !this.reasoning;
    this.thoughts.textContent = this.reasoning;
    this.tools.replaceChildren(...this.calls.map(callCard));
    this.figures.textContent = this.#figures().join(" · ");
    this.drawSeconds = performance.now() - begin;
  }

  #figures() {
    if (this.#first === null && this.#finish === null && !this.stopped) return ["waiting for the first token…"];
    const parts = [];
    const { prompt_tokens: prompt, completion_tokens: tokens, prompt_tokens_details: details } = this.#usage ?? {};
    if (this.#first !== null) parts.push(`first token ${milliseconds(this.#first - this.#asked)}`);
    const seconds = (this.#last - this.#first) / 1000;
    if (tokens > 1 && seconds > 0) parts.push(`${rate((tokens - 1) / seconds)} tokens/s`);
    const cached = details?.cached_tokens ? ` (${details.cached_tokens} cached)` : "";
    if (this.#usage) parts.push(`${prompt} in${cached}`, `${tokens} out`);
    if (this.stopped) parts.push("stopped");
    else if (this.#finish) parts.push(`finish ${this.#finish}`);
    return parts;
  }
}

function callCard(call) {
  const { name, arguments: given } = call.function;
  return make("div", { class: "call" }, make("div", {}, "calls ", make("b", {}, name)), make("pre", { tabindex: "0" }, pretty(given)));
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // not complete yet
  }
}

const milliseconds = (value) => (value < 10_000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`);
const rate = (value) => value.toFixed(value < 100 ? 1 : 0);
