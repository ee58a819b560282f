// Elements from plain data. Text only ever becomes text nodes: nothing here parses HTML.

export const byId = (id) => document.getElementById(id);

// make("a", { href: "#x", class: "quiet", onclick: f }, "text", node, ...)
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element[name] = value;
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}
