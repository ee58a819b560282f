// The playground: a conversation, streamed from /v1/chat/completions.

import { ApiError, call, events } from "./api.js";
import { byId, make } from "./dom.js";
import { copyText, render } from "./markdown.js";
import { requestBody } from "./options.js";

const REFUSED = [401, 403];

// Ids of this page's own requests: the engine view marks them.
export const ownIds = new Set();

export class Chat {
  #turns = []; // {role, content, ...} as the API takes them
  #abort = null;
  #followed = true; // whether the thread scrolls with the answer

  // onRefused is called with the message when the server wants another key.
  constructor({ onRefused }) {
    this.onRefused = onRefused;
    this.thread = byId("thread");
    this.prompt = byId("prompt");
    byId("composer").addEventListener("submit", (event) => (event.preventDefault(), this.#submit()));
    byId("stop").addEventListener("click", () => this.stop());
    byId("new").addEventListener("click", () => this.clear());
    byId("examples").addEventListener("click", (event) => this.#take(event.target.closest("button")));
    this.prompt.addEventListener("input", () => this.#fit());
    this.prompt.addEventListener("keydown", (event) => this.#onKey(event));
    document.addEventListener("keydown", (event) => event.key === "Escape" && !document.querySelector("dialog[open]") && this.stop());
    this.thread.addEventListener("scroll", () => (this.#followed = this.#atEnd()), { passive: true });
  }

  stop() {
    this.#abort?.abort();
  }

  clear() {
    this.stop();
    this.#turns = [];
    this.thread.replaceChildren(byId("welcome") ?? this.welcome);
    this.prompt.focus();
  }

  #take(button) {
    if (!button) return;
    this.prompt.value = button.textContent;
    this.#submit();
  }

  #onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.#submit();
  }

  #fit() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight + 2}px`;
  }

  #submit() {
    const text = this.prompt.value;
    if (!text.trim() || this.#abort) return;
    this.prompt.value = "";
    this.#fit();
    this.#ask([{ role: "user", content: text }]);
  }

  // Adds turns and streams the answer. If nothing comes of it, they are taken back.
  async #ask(turns) {
    const asked = turns.map((turn) => this.#show(turn));
    const conversation = this.#turns;
    conversation.push(...turns);
    this.#followed = true;
    const answer = new Answer();
    this.thread.append(answer.element);
    this.#busy(new AbortController());
    let error = null;
    try {
      const { model, body } = requestBody(this.#turns);
      answer.model = model;
      await this.#stream(body, answer);
    } catch (caught) {
      error = caught.name === "AbortError" ? null : caught;
      answer.stopped = error === null;
    }
    answer.finish();
    this.#busy(null);
    if (conversation !== this.#turns) return; // another one was begun meanwhile
    if (answer.isEmpty) this.#takeBack(turns, asked, answer);
    else this.#keep(answer);
    if (error) this.#showError(error);
    this.#scroll();
    byId("said").textContent = error ? "" : answer.stopped ? "Stopped." : `Answered: ${answer.content}`;
  }

  async #stream(body, answer) {
    const response = await call("v1/chat/completions", { body, signal: this.#abort.signal });
    for await (const chunk of events(response)) {
      if (chunk.id) ownIds.add(chunk.id);
      answer.take(chunk, () => this.#scroll());
    }
  }

  #keep(answer) {
    this.#turns.push(answer.turn);
    if (answer.calls.length) answer.askForResults((results) => this.#ask(results));
    answer.addActions(() => this.#retry(answer));
  }

  #takeBack(turns, elements, answer) {
    this.#turns.splice(-turns.length);
    answer.element.remove();
    if (turns[0].role !== "user") return;
    for (const element of elements) element.remove();
    if (!this.prompt.value) this.prompt.value = turns[0].content;
    this.#fit();
  }

  // Asks again from the turns before an answer, which goes, with all that followed it.
  #retry(answer) {
    if (this.#abort) return;
    const at = this.#turns.indexOf(answer.turn);
    const begin = this.#turns.slice(0, at).findLastIndex((turn) => turn.role === "assistant") + 1;
    const again = this.#turns.slice(begin, at);
    this.#turns.length = begin;
    const elements = [...this.thread.children];
    const first = elements.findIndex((element) => element.turn === again[0]);
    for (const element of elements.slice(first)) element.remove();
    this.#ask(again);
  }

  #show(turn) {
    const welcome = byId("welcome");
    if (welcome) (this.welcome = welcome).remove();
    for (const old of this.thread.querySelectorAll(".error")) old.remove();
    const name = turn.role === "tool" ? "Tool result" : "You";
    const element = make("article", { class: `turn ${turn.role}`, "aria-label": name }, make("div", { class: "text" }, turn.content));
    element.turn = turn;
    this.thread.append(element);
    return element;
  }

  #showError(error) {
    const text = error instanceof ApiError ? error.message : `This page failed: ${error.message}`;
    this.thread.append(make("p", { class: "error", role: "alert" }, text));
    if (!(error instanceof ApiError)) console.error(error);
    if (REFUSED.includes(error.status)) this.onRefused(text);
  }

  #busy(abort) {
    const had = document.activeElement;
    this.#abort = abort;
    byId("send").hidden = abort !== null;
    byId("stop").hidden = abort === null;
    if (had === byId("stop") || had === byId("send")) this.prompt.focus();
  }

  #atEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.thread;
    return scrollHeight - scrollTop - clientHeight < 48;
  }

  #scroll() {
    if (this.#followed) this.thread.scrollTop = this.thread.scrollHeight;
  }
}

// One answer, as it grows: its text, reasoning and tool calls, and the line of figures under it.
class Answer {
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
