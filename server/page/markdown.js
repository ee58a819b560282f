// A small part of Markdown as DOM nodes: code, headings, lists, quotes, tables, bold, italics. Whatever else a text
// holds, HTML and links included, is shown as it is.

import { make } from "./dom.js";

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/s;
const HEADING = /^(#{1,6})\s+(.*)$/s;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const ITALIC = /(?<![\w*])\*(?=[^\s*])([^*\n]+?)(?<=\S)\*(?![\w*])/y;

// The nodes that show a text, which may still be growing.
export function render(text) {
  const fragment = document.createDocumentFragment();
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  for (let at = 0; at < lines.length; ) at = block(fragment, lines, at);
  return fragment;
}

// A heading's text without the marks behind it.
function title(text) {
  let end = text.trimEnd().length;
  while (text[end - 1] === "#") end--;
  return text.slice(0, end).trimEnd();
}

// Appends the block that begins at a line; returns the line after it.
function block(parent, lines, at) {
  const line = lines[at];
  if (!line.trim()) return at + 1;
  const fence = FENCE.exec(line);
  if (fence) return code(parent, lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    parent.append(inline(make(`h${Math.min(6, heading[1].length + 2)}`), title(heading[2])));
    return at + 1;
  }
  if (RULE.test(line)) {
    parent.append(make("hr"));
    return at + 1;
  }
  if (ITEM.test(line)) return list(parent, lines, at);
  if (/^\s*>/.test(line)) return quote(parent, lines, at);
  if (line.includes("|") && isDivider(lines[at + 1] ?? "")) return table(parent, lines, at);
  return paragraph(parent, lines, at);
}

function code(parent, lines, at, [, mark, language]) {
  let end = at + 1;
  while (end < lines.length && !lines[end].trim().startsWith(mark)) end++;
  const text = lines.slice(at + 1, end).join("\n");
  const copy = make("button", { type: "button", class: "quiet copy", onclick: () => copyText(copy, text) }, "Copy");
  const head = make("div", { class: "code-head" }, make("span", {}, language || "text"), copy);
  parent.append(make("div", { class: "code" }, head, make("pre", { tabindex: "0" }, make("code", {}, text))));
  return end + 1;
}

export async function copyText(button, text) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = label), 1500);
}

// Items that are indented more than the first belong to the item before them.
function list(parent, lines, at) {
  const [, indent, bullet] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(bullet);
  const element = make(ordered ? "ol" : "ul", ordered ? { start: parseInt(bullet) } : {});
  parent.append(element);
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (item && item[1].length > indent.length + 1 && element.lastChild) {
      at = list(element.lastChild, lines, at);
    } else if (item && item[1].length >= indent.length && /\d/.test(item[2]) === ordered) {
      element.append(inline(make("li"), item[3]));
      at++;
    } else if (!item && lines[at].trim() && /^\s{2,}/.test(lines[at]) && !FENCE.test(lines[at])) {
      inline(element.lastChild, ` ${lines[at].trim()}`);
      at++;
    } else if (!lines[at].trim() && ITEM.exec(lines[at + 1] ?? "")?.[1].length >= indent.length) {
      at++;
    } else {
      break;
    }
  }
  return at;
}

function quote(parent, lines, at) {
  let end = at;
  while (end < lines.length && /^\s*>/.test(lines[end])) end++;
  const inner = lines.slice(at, end).map((line) => line.replace(/^\s*>\s?/, ""));
  const element = make("blockquote");
  const isQuote = (line) => line.trimStart().startsWith(">"); // one in another is shown as it is
  for (let i = 0; i < inner.length; ) i = isQuote(inner[i]) ? paragraph(element, inner, i) : block(element, inner, i);
  parent.append(element);
  return end;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
const isDivider = (line) => cells(line).every((cell) => /^:?-+:?$/.test(cell));

function table(parent, lines, at) {
  const row = (tag, line) => make("tr", {}, ...cells(line).map((cell) => inline(make(tag), cell)));
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const body = lines.slice(at + 2, end).map((line) => row("td", line));
  const element = make("table", {}, make("thead", {}, row("th", lines[at])), make("tbody", {}, ...body));
  parent.append(make("div", { class: "table" }, element));
  return end;
}

function paragraph(parent, lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && ![FENCE, ITEM, HEADING].some((kind) => kind.test(lines[end]))) end++;
  parent.append(inline(make("p"), lines.slice(at, end).join("\n")));
  return end;
}

// Appends a text with its code, bold and italics.
function inline(element, text) {
  const marks = /`+|\*/g;
  const endless = new Set(); // marks that nothing ends any more: that is found out once, not from each of them
  let from = 0;
  for (let mark; (mark = marks.exec(text)); ) {
    const span = mark[0] === "*" ? starred(text, mark.index, endless) : literal(text, mark, endless);
    if (!span) continue;
    element.append(text.slice(from, mark.index), span.node);
    from = marks.lastIndex = span.end;
  }
  element.append(text.slice(from));
  return element;
}

// Code, up to as many backticks.
function literal(text, { 0: mark, index }, endless) {
  if (endless.has(mark)) return null;
  const start = index + mark.length;
  const ends = /`+/g;
  ends.lastIndex = start;
  for (let end; (end = ends.exec(text)); ) {
    if (end[0] === mark) return { node: make("code", {}, text.slice(start, end.index)), end: ends.lastIndex };
  }
  endless.add(mark);
  return null;
}

// Bold or italic text that begins with the star at a place.
function starred(text, at, endless) {
  if (text[at + 1] === "*" && !endless.has("**") && /\S/.test(text[at + 2] ?? "")) {
    let end = text.indexOf("**", at + 3);
    while (end > 0 && /\s/.test(text[end - 1])) end = text.indexOf("**", end + 1);
    if (end > 0) return { node: inline(make("strong"), text.slice(at + 2, end)), end: end + 2 };
    endless.add("**");
  }
  ITALIC.lastIndex = at;
  const italic = ITALIC.exec(text);
  return italic && { node: inline(make("em"), italic[1]), end: at + italic[0].length };
}
