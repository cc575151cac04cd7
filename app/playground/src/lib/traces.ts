/** A view's request as a block of the library's, `with model.trace(…)`, which runs on the same server. */

import { SERVER, hasKey } from "../api/client";
import type { ApiRequest, Capabilities, Json, JsonObject, Operation, Vector } from "../api/types";
import { literal } from "./snippets";
import { named } from "./names";

export type Trace = string | { missing: string };

/** Operations that a block has no counterpart of. */
const WITHOUT_WORDS = new Set(["feature", "features", "detect", "flag", "stop"]);

/** What a block reads, as lines of Python. */
export interface Reading {
  /** Before the steps. */
  before?: string[];
  /** At the layers below, where `hidden` is the value after `layer`, as the steering left it. */
  layers?: number[];
  each?: string[];
  /** When a step is over. */
  last?: string[];
  /** When the block is over, and the answer printed. */
  after?: string[];
  /** Vectors that the lines name. */
  vectors?: Vector[];
  /** A variable that the whole is run with each value of: `scale` of an operation may name it. */
  over?: { name: string; values: number[] };
}

/** A steering of a request, at the layers that it names. */
interface Steering {
  layers: number[];
  where: JsonObject | undefined;
  lines: string[];
}

/** Returns a block that steers and reads as a request does. */
export function trace(
  request: ApiRequest,
  capabilities: Capabilities,
  vectors: Vector[],
  reading: Reading = {},
): Trace {
  const operations = (request.body["interventions"] ?? []) as Operation[];
  if (operations.some((operation) => WITHOUT_WORDS.has(operation.op) || operation["when"] !== undefined)) {
    return { missing: "A trace cannot use features, detectors or conditions: copy curl or Python." };
  }
  const steers = operations.filter((operation) => operation.op === "steer");
  if (steers.some((steer) => JSON.stringify(steer["where"] ?? "").includes('"tokens"'))) {
    return { missing: "A trace cannot select positions by token: name positions instead." };
  }
  const used = steers.map((steer) =>
    named(String((steer["vector"] as JsonObject)["name"]), vectors, capabilities.model),
  );
  if (used.some((vector) => vector === undefined))
    return { missing: "The vector is no longer on this server." };
  const numLayers = capabilities.sizes.num_layers;
  const steerings = steers.map((steer, index) =>
    steeringOf(steer, variable(used[index]!, vectors), numLayers),
  );
  const known = [
    ...new Map([...used, ...(reading.vectors ?? [])].map((vector) => [vector!.id, vector!])).values(),
  ];
  const usesTorch = steerings.some((steering) => steering.where !== undefined);
  const lines = [
    `with model.trace(prompt${sampling(request)}) as tracer:`,
    ...indented([...(reading.before ?? []), ...steps(steerings, reading), "answer = tracer.result.save()"]),
    reading.over ? `print(${reading.over.name}, answer.outputs[0].text)` : "print(answer.outputs[0].text)",
    ...(reading.after ?? []),
  ];
  const program = reading.over
    ? [`for ${reading.over.name} in ${literal(reading.over.values)}:`, ...indented(lines)]
    : lines;
  const isChat = request.body["messages"] !== undefined;
  return [
    ...head(capabilities.model, {
      usesHttp: isChat || known.length > 0,
      usesVectors: known.length > 0,
      usesTorch,
    }),
    ...known.map(
      (vector) =>
        `${variable(vector!, vectors)} = load(httpx.get(f"{URL}/v1/vectors/${vector!.id}/content"${authorized()}).content)`,
    ),
    ...prompt(request),
    "",
    ...program,
    "",
  ].join("\n");
}

/** Returns what a variable is called that holds a vector's rows, by point: each of `vectors` has its own. */
export function variable(vector: Vector, vectors: Vector[]): string {
  const nameOf = (each: Vector) =>
    `${each.name.replace(/[^a-z0-9]/g, "_").replace(/^(\d)/, "_$1")}_${each.version}`;
  const name = nameOf(vector);
  const alike = vectors.filter((each) => nameOf(each) === name);
  const index = alike.findIndex((each) => each.id === vector.id);
  return index > 0 ? `${name}_no${index + 1}` : name;
}

/** Returns the lines before a block: imports, the key, the model. */
export function head(
  model: string,
  uses: { usesHttp?: boolean; usesVectors?: boolean; usesTorch?: boolean } = {},
): string[] {
  const imports = [
    hasKey() ? "import os" : "",
    uses.usesHttp ? "import httpx" : "",
    uses.usesTorch ? "import torch" : "",
    uses.usesVectors ? "from safetensors.torch import load" : "",
    hasKey() ? "from nnsight_engine import CONFIG, VLLM, save" : "from nnsight_engine import VLLM, save",
  ];
  return [
    ...imports.filter(Boolean),
    "",
    ...(hasKey() ? ['CONFIG.set_default_api_key(os.environ["NNSIGHT_ENGINE_KEY"])'] : []),
    `URL = ${JSON.stringify(SERVER)}`,
    `model = VLLM(${JSON.stringify(model)}, remote=URL)`,
  ];
}

/** Returns the layers that points of the residual stream name. */
export function layersOf(at: Json, numLayers: number): number[] {
  const points = Array.isArray(at) ? at : [at];
  return points.flatMap((point) => {
    const selection = String(point).split(".")[1]!;
    const all = [...Array(numLayers).keys()];
    if (selection === "*") return all;
    if (!selection.includes(":")) return [resolved(Number(selection), numLayers)];
    const [start, stop] = selection.split(":");
    return all.slice(start ? Number(start) : 0, stop ? Number(stop) : undefined);
  });
}

/** Returns the argument that gives the key, if any, to what asks over HTTP; `os` is imported then. */
export function authorized(): string {
  return hasKey() ? ', headers={"Authorization": f"Bearer {os.environ[\'NNSIGHT_ENGINE_KEY\']}"}' : "";
}

function indented(lines: string[]): string[] {
  return lines.map((line) => `    ${line}`);
}

function sampling({ body }: ApiRequest): string {
  return ["max_tokens", "temperature", "top_p", "seed"]
    .filter((name) => body[name] !== undefined)
    .map((name) => `, ${name}=${literal(body[name])}`)
    .join("");
}

/** Returns the lines that make the prompt; a conversation is rendered by the server. */
function prompt({ body }: ApiRequest): string[] {
  if (body["messages"] === undefined) return [`prompt = ${literal(body["prompt"])}`];
  return [
    `messages = ${literal(body["messages"])}`,
    `tokens = httpx.post(f"{URL}/v1/tokenize", json={"messages": messages}${authorized()}).json()["tokens"]`,
    'prompt = [token["id"] for token in tokens]',
  ];
}

/** Returns the loop over steps: layers in the model's order, each steered and then read. */
function steps(steerings: Steering[], reading: Reading): string[] {
  const layers = [...new Set([...steerings.flatMap((each) => each.layers), ...(reading.layers ?? [])])];
  layers.sort((one, other) => one - other);
  if (!layers.length) return [];
  const only = (wanted: number[], lines: string[]) =>
    layers.every((layer) => wanted.includes(layer))
      ? lines
      : [`if layer in ${literal(wanted)}:`, ...indented(lines)];
  const counts = steerings.some((each) => each.where !== undefined);
  const inside = [
    "hidden = model.layers[layer].output",
    ...(counts ? [`if layer == ${layers[0]}:`, ...indented(POSITIONS)] : []),
    ...steerings.flatMap((each) => only(each.layers, each.lines)),
    ...(reading.layers ? only(reading.layers, reading.each ?? []) : []),
  ];
  return [
    ...(counts ? ["start = prompt_length = 0"] : []),
    "for step in tracer.iter[:]:",
    ...indented([`for layer in ${literal(layers)}:`, ...indented(inside), ...(reading.last ?? [])]),
  ];
}

const POSITIONS = [
  "here = torch.arange(start, start + hidden.shape[0])",
  "start += len(here)",
  "prompt_length = prompt_length or len(here)",
];

function steeringOf(steer: Operation, name: string, numLayers: number): Steering {
  const where = steer["where"] as JsonObject | undefined;
  const row = (steer["vector"] as JsonObject)["layer"];
  const point =
    row === undefined
      ? '[f"layers.{layer}.output"]'
      : `["layers.${resolved(Number(row), numLayers)}.output"]`;
  const rows = where ? "rows" : ":";
  const scale = String(steer["scale"]);
  const change: Record<string, string[]> = {
    add: [`x += ${scale} * v`],
    norm_match: [`x += ${scale} * x.norm(dim=-1, keepdim=True) * v / v.norm()`],
    project_out: ["u = v / v.norm()", `x -= ${scale} * (x @ u)[:, None] * u`],
    clamp: ["u = v / v.norm()", `x += (${scale} - (x @ u)[:, None]) * u`],
    replace: [`x[:] = ${scale} * v`],
  };
  const lines = [
    ...(where ? [`rows = ${namedBy(where)}`] : []),
    `x = hidden[${rows}].float()`,
    `v = ${name}${point}.to(x.device)`,
    ...change[String(steer["mode"])]!,
    `hidden[${rows}] = x.to(hidden.dtype)`,
  ];
  return { layers: layersOf(steer["at"]!, numLayers), where, lines };
}

/** Returns which of `here`, the positions of this step, a where-clause names. */
function namedBy(where: JsonObject): string {
  const { exclude, ...clause } = where;
  return `${condition(clause)}${exclude === undefined ? "" : ` & ~(${condition(exclude as JsonObject)})`}`;
}

function condition(where: JsonObject): string {
  const found: string[] = [];
  if (where["phase"] === "prompt") found.push("(here < prompt_length)");
  if (where["phase"] === "generated") found.push("(here >= prompt_length)");
  const place = (position: number) => (position < 0 ? `prompt_length - ${-position}` : String(position));
  const positions = where["positions"] as number[] | undefined;
  if (positions) found.push(`torch.isin(here, torch.tensor([${positions.map(place).join(", ")}]))`);
  const range = where["range"] as [number, number | null] | undefined;
  if (range) {
    found.push(`(here >= ${place(range[0])})`);
    if (range[1] !== null) found.push(`(here < ${place(range[1])})`);
  }
  return found.join(" & ") || "(here >= 0)";
}

function resolved(layer: number, numLayers: number): number {
  return layer < 0 ? layer + numLayers : layer;
}
