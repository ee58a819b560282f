// The endpoints of the server, from its OpenAPI schema.

import { call, root } from "./api.js";
import { byId, make } from "./dom.js";
import { setUpTheme } from "./theme.js";

setUpTheme();
try {
  show(await (await call("openapi.json")).json());
} catch (error) {
  const hint = error.status === 401 ? " Open the playground, enter the key there, and come back in the same tab." : "";
  byId("notice").textContent = error.message + hint;
  byId("notice").hidden = false;
}

function show(schema) {
  byId("version").textContent = schema.info.version;
  const operations = Object.entries(schema.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ path, method: method.toUpperCase(), ...operation })),
  );
  const contents = operations.map((each) => make("li", {}, make("a", { href: `#${anchor(each)}` }, `${each.method} ${each.path}`)));
  byId("api").append(
    make("p", {}, "As OpenAI's API, with further fields. The base URL for its clients is ", make("code", {}, `${root}v1`),
      "; the schema for programs is ", make("a", { href: "openapi.json" }, "openapi.json"), "."),
    make("ul", { class: "contents" }, ...contents),
    ...operations.map((each) => section(each, schema)),
  );
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

function anchor({ method, path }) {
  return `${method}${path}`.replace(/\W+/g, "-");
}

function section(operation, schema) {
  const parts = [make("h2", {}, make("b", {}, operation.method), operation.path)];
  if (operation.description ?? operation.summary) parts.push(make("p", {}, operation.description ?? operation.summary));
  const body = resolved(operation.requestBody?.content?.["application/json"]?.schema, schema);
  const fields = (operation.parameters ?? []).map((field) => [field.name, field.schema, field.required]);
  for (const [name, field] of Object.entries(body?.properties ?? {})) fields.push([name, field, body.required?.includes(name)]);
  fields.sort(([, , one], [, , other]) => Number(!!other) - Number(!!one)); // what is required comes first
  if (fields.length) parts.push(table(fields, schema));
  return make("section", { id: anchor(operation), "aria-label": `${operation.method} ${operation.path}` }, ...parts);
}

function table(fields, schema) {
  const rows = fields.map(([name, field, required]) => {
    const known = resolved(field, schema) ?? {};
    const said = [required ? "Required." : "", known.description ?? ""].filter(Boolean).join(" ");
    return make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, typeOf(known, schema)), make("td", {}, said));
  });
  const head = ["Field", "Type", "Meaning"].map((text) => make("th", { scope: "col" }, text));
  return make("div", { class: "table" }, make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)));
}

function resolved(node, schema) {
  if (!node?.$ref) return node;
  return node.$ref.slice(2).split("/").reduce((at, name) => at?.[name], schema);
}

// A type in a word or two.
function typeOf(node, schema, depth = 0) {
  const known = resolved(node, schema) ?? {};
  const alternatives = known.anyOf ?? known.oneOf;
  if (alternatives) return [...new Set(alternatives.map((each) => typeOf(each, schema, depth)))].filter((name) => name !== "null").join(" | ");
  if (known.enum) return known.enum.map((value) => JSON.stringify(value)).join(" | ");
  if ("const" in known) return JSON.stringify(known.const);
  if (known.type === "array") return depth > 2 || !known.items ? "list" : `list of ${typeOf(known.items, schema, depth + 1)}`;
  return known.type ?? "any";
}
