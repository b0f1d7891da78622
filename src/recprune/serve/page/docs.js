// The routes of the service as openapi.json describes them, and a way to ask each of them.

import { describe, send, useKey } from "./service.js";
import { element } from "./words.js";

const REF = "#/components/schemas/";
const HUGE = 1e15; // beyond this, a limit only says that a number is one
const LIMITS = [
  ["minimum", "at least"], ["exclusiveMinimum", "more than"], ["maximum", "at most"],
  ["exclusiveMaximum", "less than"], ["minLength", "at least", "characters"],
  ["maxLength", "at most", "characters"], ["minItems", "at least", "entries"],
  ["maxItems", "at most", "entries"],
];
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 6 });

const code = (text) => element("code", "", text);
const json = (value) => JSON.stringify(value, null, 2);

// JSON laid out for people, every number as it was written.
function laidOut(text) {
  try {
    const asWritten = (_, value, context) =>
      typeof value === "number" && JSON.rawJSON ? JSON.rawJSON(context.source) : value;
    return json(JSON.parse(text, asWritten));
  } catch {
    return text;
  }
}

// Text in which what stands between back quotes is code.
function prose(tag, classes, text) {
  const parts = text.split("`").map((part, place) => (place % 2 ? code(part) : part));
  return element(tag, classes, ...parts);
}

function linkToShape(name) {
  const link = element("a", "", name);
  link.href = `#shape-${name}`;
  return link;
}

// A type in words and links, as a list of texts and elements.
function typeOf(schema) {
  if (schema.$ref) return [linkToShape(schema.$ref.replace(REF, ""))];
  if (schema.anyOf) {
    const choices = schema.anyOf.map(typeOf);
    const texts = choices.map((parts) => parts.map((part) => part.textContent ?? part).join(""));
    return choices.filter((_, place) => texts.indexOf(texts[place]) === place)
      .flatMap((choice, place) => (place ? [" or ", ...choice] : choice));
  }
  if (schema.enum) return schema.enum.flatMap((value, place) =>
    (place ? [", ", code(JSON.stringify(value))] : [code(JSON.stringify(value))]));
  if (schema.const !== undefined) return [code(JSON.stringify(schema.const))];
  if (schema.type === "array") {
    const entry = typeOf(schema.items ?? {});
    return schema.items?.anyOf ? ["list of (", ...entry, ")"] : ["list of ", ...entry];
  }
  if (schema.additionalProperties?.type)
    return ["object of ", ...typeOf(schema.additionalProperties)];
  return [schema.type ?? "anything"];
}

function limitsOf(schema) {
  const found = [schema, ...(schema.anyOf ?? [])].flatMap((part) => LIMITS
    .filter(([name]) => part[name] !== undefined && Math.abs(part[name]) < HUGE)
    .map(([name, words, unit = ""]) => `${words} ${whole.format(part[name])} ${unit}`.trim()));
  if (schema.default !== undefined && schema.default !== null)
    found.push(`default ${JSON.stringify(schema.default)}`);
  return [...new Set(found)].join(", ");
}

// A table of fields: [name, schema, whether it has to be there].
function fieldTable(fields) {
  const head = element("tr", "", ...["Name", "Type", "Meaning"].map((text) => {
    const cell = element("th", "", text);
    cell.scope = "col";
    return cell;
  }));
  const body = element("tbody");
  for (const [name, schema, needed] of fields) {
    const first = element("th", "", code(name));
    first.scope = "row";
    if (needed) first.append(" ", element("span", "needed", "required"));
    const type = element("td", "", ...typeOf(schema));
    const limits = limitsOf(schema);
    if (limits) type.append(element("div", "quiet small", limits));
    body.append(element("tr", "", first, type,
      element("td", "", prose("p", "", schema.description ?? ""))));
  }
  const table = element("table", "fields", element("thead", "", head), body);
  return element("div", "scroll", table);
}

const fieldsOf = (schema) => Object.entries(schema.properties ?? {})
  .map(([name, field]) => [name, field, (schema.required ?? []).includes(name)]);

function shapeSection(name, schema) {
  const section = element("section", "shape", element("h3", "", name));
  section.id = `shape-${name}`;
  if (schema.description) section.append(prose("p", "quiet", schema.description));
  section.append(fieldTable(fieldsOf(schema)));
  return section;
}

const schemaIn = (content) => content?.["application/json"]?.schema;

// What a shell would be typed to ask the same.
function asCurl(verb, path, body) {
  const address = new URL(path, document.baseURI);
  const words = ["curl", "-s", ...(verb === "GET" ? [] : ["-X", verb])];
  if (body) words.push("-H", "'content-type: application/json'", "-d",
    `'${JSON.stringify(body).replaceAll("'", "'\\''")}'`);
  return [...words, `'${address}'`].join(" ");
}

function labelled(text, input) {
  const label = element("label", "title", text);
  label.htmlFor = input.id;
  return [label, input];
}

// A form that asks the route, and shows what comes back.
function tryIt(verb, path, parameters, example) {
  const form = element("form");
  const name = `${verb}${path}`.replace(/\W+/g, "-");
  const inputs = parameters.map((parameter) => {
    const input = element("input");
    input.id = `${name}-${parameter.name}`;
    input.type = "text";
    input.required = parameter.required;
    input.value = parameter.schema.examples?.[0] ?? "";
    form.append(...labelled(parameter.name, input));
    return [parameter, input];
  });
  let body = null;
  if (example !== undefined) {
    body = element("textarea");
    body.id = `${name}-body`;
    body.spellcheck = false;
    body.rows = Math.min(20, json(example).split("\n").length);
    body.value = json(example);
    form.append(...labelled("Body", body));
  }
  const button = element("button", "minor", "Send");
  const answer = element("pre");
  answer.hidden = true;
  answer.tabIndex = 0;
  answer.setAttribute("role", "status");
  form.append(button, answer);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    let asked = path.slice(1);
    const query = new URLSearchParams();
    for (const [parameter, input] of inputs) {
      if (parameter.in === "path")
        asked = asked.replace(`{${parameter.name}}`, encodeURIComponent(input.value));
      else if (input.value) query.set(parameter.name, input.value);
    }
    button.disabled = true;
    try {
      const found = await send(verb, query.size ? `${asked}?${query}` : asked, body?.value);
      answer.textContent = `${found.status}\n${laidOut(found.text)}`;
    } catch (error) {
      answer.textContent = error.message;
    }
    answer.hidden = false;
    button.disabled = false;
  });
  return element("details", "try", element("summary", "", "Try it"), form);
}

function routeSection(schemas, verb, path, route) {
  const id = `${verb}-${path}`.replace(/\W+/g, "-").replace(/-$/, "");
  const title = element("h2", "", element("span", "verb", verb), code(path));
  const section = element("section", "route", title, prose("p", "lead", route.description ?? ""));
  section.id = id;
  if (route.security) section.append(element("p", "quiet small", "Needs an API key."));
  const parameters = route.parameters ?? [];
  if (parameters.length)
    section.append(element("h3", "", "Parameters"), fieldTable(parameters.map((one) =>
      [one.name, { ...one.schema, description: one.description ?? `in the ${one.in}` },
        one.required])));
  const asked = schemaIn(route.requestBody?.content)?.$ref?.replace(REF, "");
  const examples = schemas[asked]?.examples ?? [];
  if (asked)
    section.append(element("h3", "", "Body: ", linkToShape(asked)),
      fieldTable(fieldsOf(schemas[asked])));
  const answered = schemaIn(route.responses["200"]?.content);
  const type = Object.keys(route.responses["200"]?.content ?? {})[0];
  section.append(element("h3", "", "Answer: ", ...(answered ? typeOf(answered) : [type])));
  if (examples.length)
    section.append(element("details", "", element("summary", "", "Examples"),
      ...examples.map((example) => element("pre", "", asCurl(verb, path.slice(1), example)))));
  section.append(tryIt(verb, path, parameters, asked ? examples[0] ?? {} : undefined));
  const link = element("a", "", code(path));
  link.href = `#${id}`;
  const line = element("li", "", element("span", "verb", verb), link,
    prose("span", "quiet", (route.description ?? "").split(/(?<=\.) /)[0]));
  return [line, section];
}

async function start() {
  const described = await describe();
  const schemas = described.components.schemas;
  document.getElementById("about").replaceWith(prose("p", "lead", described.info.description));
  const lines = element("ul");
  const routes = document.getElementById("routes");
  let keys = false;
  for (const [path, verbs] of Object.entries(described.paths))
    for (const [verb, route] of Object.entries(verbs)) {
      const [line, section] = routeSection(schemas, verb.toUpperCase(), path, route);
      lines.append(line);
      routes.append(section);
      keys ||= Boolean(route.security);
    }
  document.getElementById("contents").append(lines);
  const shapes = document.getElementById("shapes");
  for (const name of Object.keys(schemas).sort()) shapes.append(shapeSection(name, schemas[name]));
  const key = document.getElementById("key");
  document.getElementById("by-key").hidden = !keys;
  key.addEventListener("input", () => useKey(key.value));
  document.getElementById(location.hash.slice(1))?.scrollIntoView(); // it was not there before
}

start().catch((error) => {
  const problem = document.getElementById("problem");
  problem.replaceChildren(element("b", "", error.title ?? "Something went wrong"), ` ${error.message}`);
  problem.hidden = false;
});
