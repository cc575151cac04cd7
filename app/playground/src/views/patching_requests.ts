/** The two requests of a patching map, and the programs that send them. */

import { SERVER } from "../api/client";
import type { ApiRequest, Operation } from "../api/types";
import { curlHead, literal, quoted, client, type Snippets } from "../lib/snippets";
import { FieldError } from "../lib/where";
import { rowOf, type Tensor } from "../lib/tensors";
import { typed } from "../lib/text";
import { authorized, head } from "../lib/traces";
import type { LEAVES } from "../state/page";

/** One choice is the corrupted prompt as it is; a server takes 1024 of them. */
const MAX_CELLS = 1023;

export interface Plan {
  model: string;
  clean: number[];
  corrupted: number[];
  answer: string;
  contrast: string;
  leaf: (typeof LEAVES)[number];
  layers: number[];
  positions: number[];
  /** Ids of the tokens that are followed: the answer's, and the contrast's if there is one. */
  targets: number[];
}

/** Returns the layers of a map: all of them, or every nth where one request could not have so many cells. */
export function layersFor(numLayers: number, numPositions: number): number[] {
  if (numPositions > MAX_CELLS) {
    throw new FieldError(
      `There are ${numPositions} tokens from the first difference on, and a map has ${MAX_CELLS} at most.`,
    );
  }
  let every = 1;
  while (Math.ceil(numLayers / every) * numPositions > MAX_CELLS) every += 1;
  return Array.from({ length: numLayers }, (_, layer) => layer).filter((layer) => layer % every === 0);
}

export function cells(plan: Plan): { layer: number; position: number; row: number; column: number }[] {
  return plan.layers.flatMap((layer, row) =>
    plan.positions.map((position, column) => ({ layer, position, row, column })),
  );
}

/** Reads the clean prompt's values, and how likely the answer is after it. */
export function firstRequest(plan: Plan): ApiRequest {
  const capture: Operation = {
    op: "capture",
    at: plan.layers.map((layer) => `layers.${layer}.${plan.leaf}`),
    where: { positions: plan.positions },
    name: "clean",
  };
  return body(plan, plan.clean, [capture, lens(plan)]);
}

/** Runs the corrupted prompt once as it is, and once for each cell with that value of the clean prompt's. */
export function secondRequest(plan: Plan, values: Tensor[]): ApiRequest {
  const patches: Operation[] = cells(plan).map(({ layer, position, row, column }, index) => ({
    op: "patch",
    at: `layers.${layer}.${plan.leaf}`,
    values: { ...rowOf(values[row]!, column) },
    where: { positions: [position] },
    prompts: [index + 1],
  }));
  const prompts = Array.from({ length: patches.length + 1 }, () => plan.corrupted);
  return body(plan, prompts, [...patches, lens(plan)]);
}

function body(plan: Plan, prompt: number[] | number[][], interventions: Operation[]): ApiRequest {
  return {
    path: "/v1/completions",
    body: { model: plan.model, prompt, max_tokens: 1, temperature: 0, interventions },
  };
}

function lens(plan: Plan): Operation {
  const targets = [plan.answer, ...(plan.contrast ? [plan.contrast] : [])].map(typed);
  return { op: "logit_lens", layers: [-1], top_k: 0, targets, where: { positions: [-1] }, name: "lens" };
}

/** Python that has the answer of the first request in `first`, and makes `interventions` and `prompts`. */
function building(plan: Plan): string {
  return `files = {}


def data_of(tensor):
    """Return a tensor's bytes, which are in the answer or, if they are many, in a safetensors file."""
    if "data" in tensor:
        return base64.b64decode(tensor["data"])
    if tensor["url"] not in files:
        request = urllib.request.Request(${literal(SERVER)} + tensor["url"]${authorized()})
        files[tensor["url"]] = urllib.request.urlopen(request).read()
    file = files[tensor["url"]]
    start = 8 + int.from_bytes(file[:8], "little")
    begin, end = json.loads(file[8:start])[tensor["key"]]["data_offsets"]
    return file[start + begin : start + end]


layers, positions = ${literal(plan.layers)}, ${literal(plan.positions)}
points = first["results"]["clean"]["points"]
interventions = []
for row, layer in enumerate(layers):
    tensor = points[f"layers.{layer}.${plan.leaf}"]
    data = data_of(tensor)
    size = len(data) // len(positions)
    for column, position in enumerate(positions):
        value = base64.b64encode(data[column * size : (column + 1) * size]).decode()
        interventions.append({
            "op": "patch",
            "at": f"layers.{layer}.${plan.leaf}",
            "values": {"dtype": tensor["dtype"], "shape": [1, tensor["shape"][-1]], "data": value, "encoding": "base64"},
            "where": {"positions": [position]},
            "prompts": [1 + row * len(positions) + column],
        })
interventions.append(${literal(lens(plan))})  # behind the patches: it is to read what they leave
prompts = [${literal(plan.corrupted)}] * (1 + len(layers) * len(positions))
`;
}

export function programs(plan: Plan): Snippets {
  return { curl: shell(plan), python: python(plan), trace: block(plan) };
}

function shell(plan: Plan): string {
  const script = `import base64, json, os, sys, urllib.request

first = json.load(sys.stdin)["choices"][0]["interventions"]
${building(plan)}print(json.dumps({"model": ${literal(plan.model)}, "prompt": prompts, "max_tokens": 1, "temperature": 0,
                  "interventions": interventions}))`;
  const request = firstRequest(plan);
  return [
    `${curlHead(request.path)} -d ${quoted(JSON.stringify(request.body))} |`,
    `  python3 -c ${quoted(script)} |`,
    `  ${curlHead(request.path)} -d @-`,
  ].join("\n");
}

function python(plan: Plan): string {
  const { interventions, prompt, ...rest } = firstRequest(plan).body;
  const common = Object.entries(rest).map(([name, value]) => `${name}=${literal(value)}`);
  const against = plan.contrast ? ' - targets[1]["logprob"]' : "";
  return `import base64
import json
import urllib.request
${client()}
answer = client.completions.create(
    ${common.join(", ")},
    prompt=${literal(prompt, "    ")},
    extra_body=${literal({ interventions }, "    ")},
)
first = answer.choices[0].model_extra["interventions"]
${building(plan)}
answer = client.completions.create(
    ${common.join(", ")},
    prompt=prompts,
    extra_body={"interventions": interventions},
)


def score(choice):
    (row,) = choice["results"]["lens"]["layers"].values()
    targets = row[0]["targets"]
    return targets[0]["logprob"]${against}


clean = score(first)
corrupted, *patched = [score(choice.model_extra["interventions"]) for choice in answer.choices]
for row, layer in enumerate(layers):
    scores = patched[row * len(positions) : (row + 1) * len(positions)]
    print(layer, [round((one - corrupted) / (clean - corrupted), 2) for one in scores])
`;
}

function block(plan: Plan): string {
  const point = `model.points[f"layers.{layer}.${plan.leaf}"]`;
  const [wanted, against] = plan.targets;
  const score = against === undefined ? `said[${wanted}]` : `said[${wanted}] - said[${against}]`;
  return `${head(plan.model).join("\n")}
clean, corrupted = ${literal(plan.clean)}, ${literal(plan.corrupted)}
layers, positions = ${literal(plan.layers)}, ${literal(plan.positions)}

with model.trace(clean):
    values = save({})
    for layer in layers:
        values[layer] = ${point}
    said = model.logits.output[0].float().log_softmax(-1)
    best = (${score}).save()

with model.trace(corrupted):
    said = model.logits.output[0].float().log_softmax(-1)
    worst = (${score}).save()

for layer in layers:
    row = []
    for position, value in zip(positions, values[layer][positions]):
        with model.trace(corrupted):
            hidden = ${point}
            hidden[position] = value
            said = model.logits.output[0].float().log_softmax(-1)
            found = (${score}).save()
        row.append(round(((found - worst) / (best - worst)).item(), 2))
    print(layer, row)
`;
}
