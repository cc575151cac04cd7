/**
 * Steering with the official `openai` client, which knows nothing of it: two answers stream side by side.
 *
 * The field `interventions` is part of the request like any other. First `capture` reads the residual stream
 * at the last token of cheerful and of gloomy sentences; the difference of the two means is a direction. Then
 * the same prompt is written on from twice at once, without that direction and with it, added by `steer`.
 *
 *     npm ci && node steer.mjs --base-url http://127.0.0.1:8000 --scale=0.3
 *
 * Needs a running server (`make serve`) and Node.js 20 or newer. Where the server has keys, give one in
 * NNSIGHT_ENGINE_KEY. Expect the two texts to part within a few words; a negative scale makes the second
 * gloomy.
 *
 * The method is the difference of means, as in "Steering Llama 2 via Contrastive Activation Addition"
 * (Rimsky et al., 2023); ../steer_sentiment.py does the same in Python.
 */

import process from "node:process";
import { parseArgs } from "node:util";

import OpenAI from "openai";

const CHEERFUL = [
  "I love this, it is wonderful and I am so happy.",
  "What a beautiful day, everything is perfect!",
  "The food was delicious and the people were kind.",
  "She smiled, full of joy and hope.",
];
const GLOOMY = [
  "I hate this, it is horrible and I am so angry.",
  "What an awful day, everything is ruined!",
  "The food was disgusting and the people were rude.",
  "She cried, full of pain and fear.",
];

/** Return the mean over sentences of the residual stream at their last token. */
async function captureMean(client, model, sentences, point) {
  const answer = await client.completions.create({
    model,
    prompt: sentences,
    max_tokens: 1,
    interventions: [
      {
        op: "capture",
        at: point,
        reduce: "last",
        dtype: "float32",
        where: { phase: "prompt" },
        name: "state",
      },
    ],
  });
  const results = answer.choices.map((choice) => choice.interventions.results.state);
  // One point was asked for, which the server names by the layer counted from 0.
  const states = results.map((result) => floats(Object.values(result.points)[0].data));
  return states[0].map((_, index) => states.reduce((sum, state) => sum + state[index], 0) / states.length);
}

/** Return the numbers of a tensor in an answer: base64 of float32, lowest byte first. */
function floats(data) {
  const bytes = Buffer.from(data, "base64");
  return Array.from({ length: bytes.length / 4 }, (_, index) => bytes.readFloatLE(4 * index));
}

/** Return the difference of two vectors, of length 1. */
function directionFrom(negative, positive) {
  const difference = positive.map((value, index) => value - negative[index]);
  const length = Math.hypot(...difference);
  return difference.map((value) => value / length);
}

/** Write on from a prompt; `show` is called with the text so far, as it comes. */
async function write(client, request, interventions, show) {
  let text = "";
  for await (const event of await client.completions.create({ ...request, stream: true, interventions })) {
    text += event.choices[0]?.text ?? "";
    show(text);
  }
  return text;
}

/** Show both texts, one line each: over and over on a terminal, once at the end elsewhere. */
class SideBySide {
  #texts = { baseline: "", steered: "" };
  #shown = false;

  update(name, text) {
    this.#texts[name] = text;
    if (process.stdout.isTTY) this.#print(process.stdout.columns);
  }

  finish() {
    if (!process.stdout.isTTY) this.#print();
  }

  #print(columns = Infinity) {
    if (this.#shown) process.stdout.write("\x1b[2A\x1b[J");
    this.#shown = true;
    for (const [name, text] of Object.entries(this.#texts)) {
      const line = `${name}: ${text.replaceAll(/\s+/g, " ").trim()}`;
      console.log(line.length < columns ? line : `${line.slice(0, columns - 2)}…`);
    }
  }
}

async function main() {
  const { values } = parseArgs({
    options: {
      "base-url": { type: "string", default: "http://127.0.0.1:8000" },
      prompt: { type: "string", default: "When I woke up this morning I felt" },
      layer: { type: "string", default: "15" },
      scale: { type: "string", default: "0.3" },
      "max-tokens": { type: "string", default: "24" },
    },
  });
  const client = new OpenAI({
    baseURL: `${values["base-url"].replace(/\/+$/, "")}/v1`,
    apiKey: process.env.NNSIGHT_ENGINE_KEY || "no key",
  });
  const model = (await client.models.list()).data[0].id;
  const point = `layers.${Number(values.layer)}.output`;
  const [gloomy, cheerful] = await Promise.all(
    [GLOOMY, CHEERFUL].map((sentences) => captureMean(client, model, sentences, point)),
  );
  const vector = directionFrom(gloomy, cheerful);
  const steer = { op: "steer", at: point, vector, mode: "norm_match", scale: Number(values.scale) };
  const request = { model, prompt: values.prompt, max_tokens: Number(values["max-tokens"]), temperature: 0 };
  console.log(`${values.prompt} …`);
  const view = new SideBySide();
  await Promise.all([
    write(client, request, [], (text) => view.update("baseline", text)),
    write(client, request, [steer], (text) => view.update("steered", text)),
  ]);
  view.finish();
}

try {
  await main();
} catch (error) {
  const isAlone = error instanceof OpenAI.APIConnectionError;
  const hint = isAlone ? " Is a server running there? `make serve` starts one." : "";
  console.error(`steer: ${error.message}${hint}`);
  process.exitCode = 1;
}
