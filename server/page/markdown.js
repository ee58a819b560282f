// A small part of Markdown as DOM nodes: code, headings, lists, quotes, tables, bold, italics. Whatever else a text
// holds, HTML and links included, is shown as it is.

import { make } from "./dom.js";

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = /(`+)(?!`)(.+?)(?<!`)\1(?!`)|\*\*(?=\S)(.+?)(?<=\S)\*\*|(?<![\w*])\*(?=[^\s*])([^*\n]+?)(?<=\S)\*(?![\w*])/gs;

// The nodes that show a text, which may still be growing.
export function render(text) {
  const fragment = document.createDocumentFragment();
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  for (let at = 0; at < lines.length; ) at = block(fragment, lines, at);
  return fragment;
}

// Appends the block that begins at a line; returns the line after it.
function block(parent, lines, at) {
  const line = lines[at];
  if (!line.trim()) return at + 1;
  const fence = FENCE.exec(line);
  if (fence) return code(parent, lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    parent.append(inline(make(`h${Math.min(6, heading[1].length + 2)}`), heading[2]));
    return at + 1;
  }
  if (RULE.test(line)) {
    parent.append(make("hr"));
    return at + 1;
  }
  if (ITEM.test(line)) return list(parent, lines, at);
  if (/^\s*>/.test(line)) return quote(parent, lines, at);
  if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) return table(parent, lines, at);
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
  for (let i = 0; i < inner.length; ) i = inner[i].startsWith(">") ? paragraph(element, inner, i) : block(element, inner, i);
  parent.append(element);
  return end;
}

function table(parent, lines, at) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
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

function inline(element, text) {
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, , literal, bold, italic] = match;
    element.append(text.slice(from, match.index));
    if (literal !== undefined) element.append(make("code", {}, literal));
    else if (bold !== undefined) element.append(inline(make("strong"), bold));
    else element.append(inline(make("em"), italic));
    from = match.index + whole.length;
  }
  element.append(text.slice(from));
  return element;
}
