// The OpenAPI document as a page: endpoints, their parameters, and the meaning of every figure.

import { byId, get, make } from "./common.js";

const code = (text) => make("code", { textContent: text });
const heading = (text) => make("h2", { textContent: text });

function describeType(schema) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    return make("a", { href: `#${name}`, textContent: name });
  }
  if (schema.anyOf) return join(schema.anyOf.map(describeType), " or ");
  if (schema.type === "array") return join(["list of ", describeType(schema.items ?? {})]);
  if (schema.additionalProperties?.$ref || schema.additionalProperties?.type)
    return join(["map to ", describeType(schema.additionalProperties)]);
  return schema.enum ? schema.enum.join(", ") : (schema.type ?? "any");
}

function join(parts, between = "") {
  const span = make("span");
  parts.forEach((part, i) => span.append(i ? between : "", part));
  return span;
}

function table(rows) {
  const cells = (row) => row.map((cell) => make("td", {}, cell));
  return make("table", {}, make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells(row)))));
}

function endpoint(path, method, operation) {
  const change = method === "get" ? "" : " change";
  const section = make(
    "section",
    {},
    make("h3", {}, make("span", { className: `method${change}`, textContent: method.toUpperCase() }), code(path)),
    make("p", { textContent: operation.description ?? operation.summary ?? "" }),
    operation.security ? make("p", { className: "fine", textContent: "Needs the control token." }) : "",
  );
  const parameters = (operation.parameters ?? []).filter((parameter) => parameter.in !== "header");
  const body = operation.requestBody?.content["application/json"]?.schema;
  const answer = operation.responses["200"]?.content?.["application/json"]?.schema;
  const rows = parameters.map((parameter) => [
    code(parameter.name),
    describeType(parameter.schema),
    parameter.description ?? "",
  ]);
  if (body) rows.push(["body", describeType(body), ""]);
  if (answer && Object.keys(answer).length) rows.push(["answer", describeType(answer), ""]);
  if (rows.length) section.append(table(rows));
  return section;
}

function model(name, schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([field, property]) => [
    code(field),
    describeType(property),
    property.description ?? "",
  ]);
  return make(
    "section",
    { id: name },
    make("h3", { textContent: name }),
    make("p", { textContent: schema.description ?? "" }),
    table(rows),
  );
}

const api = await get("openapi.json");
const endpoints = Object.entries(api.paths).flatMap(([path, methods]) =>
  Object.entries(methods).map(([method, operation]) => endpoint(path, method, operation)),
);
const models = Object.entries(api.components.schemas)
  .filter(([, schema]) => schema.properties)
  .map(([name, schema]) => model(name, schema));
byId("docs").append(
  make("section", {}, make("p", { textContent: api.info.description.replace(/[*`]/g, "").trim() })),
  heading("Endpoints"),
  ...endpoints,
  heading("Answers"),
  ...models,
);
