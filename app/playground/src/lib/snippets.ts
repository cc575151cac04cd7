/** A request as a person would send it: from a shell, or with OpenAI's client. */

import { SERVER, hasKey } from "../api/client";
import type { ApiRequest, Json } from "../api/types";

export interface Snippets {
  curl: string;
  python: string;
  /** A block of the library's, or why there is none. */
  trace: string | { missing: string };
}

const KEY = "NNSIGHT_ENGINE_KEY";

/** Returns a text as one word of a shell's. */
export function quoted(text: string): string {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

export function curlHead(path: string): string {
  const key = hasKey() ? ` -H "Authorization: Bearer $${KEY}"` : "";
  return `curl -s ${quoted(SERVER + path)}${key} -H 'Content-Type: application/json'`;
}

export function curl({ path, body }: ApiRequest): string {
  return `${curlHead(path)} -d ${quoted(JSON.stringify(body, null, 1))}`;
}

/** Returns JSON as Python writes it. */
export function literal(value: Json | undefined, indent = ""): string {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const items = Array.isArray(value)
    ? value.map((item) => literal(item, inner))
    : Object.entries(value)
        .filter(([, item]) => item !== undefined)
        .map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = `${open}${items.join(", ")}${close}`;
  if (line.length + indent.length <= 88 && !line.includes("\n")) return line;
  return `${open}\n${items.map((item) => `${inner}${item},\n`).join("")}${indent}${close}`;
}

export function client(): string {
  const key = hasKey() ? `os.environ["${KEY}"]` : '"none"';
  const imports = hasKey() ? "import os\n\n" : "";
  return `${imports}from openai import OpenAI\n\nclient = OpenAI(base_url=${JSON.stringify(`${SERVER}/v1`)}, api_key=${key})\n`;
}

/** Returns the call of OpenAI's client, assigned to `name`. */
export function call({ path, body }: ApiRequest, name = "answer"): string {
  const method = path === "/v1/chat/completions" ? "chat.completions" : "completions";
  const { interventions, preset, ...fields } = body;
  const lines = Object.entries(fields).map(([field, value]) => `    ${field}=${literal(value, "    ")},\n`);
  if (interventions !== undefined || preset !== undefined) {
    lines.push(`    extra_body=${literal({ preset, interventions }, "    ")},\n`);
  }
  return `${name} = client.${method}.create(\n${lines.join("")})\n`;
}

export function python(request: ApiRequest): string {
  const text = request.path === "/v1/chat/completions" ? "message.content" : "text";
  const results =
    request.body["interventions"] || request.body["preset"]
      ? 'print(answer.choices[0].model_extra["interventions"])\n'
      : "";
  return `${client()}\n${call(request)}print(answer.choices[0].${text})\n${results}`;
}
