// The playground: a conversation, streamed from /v1/chat/completions.

import { Answer } from "./answer.js";
import { ApiError, call, events } from "./api.js";
import { byId, make } from "./dom.js";
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
