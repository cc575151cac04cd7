/** What is read beside a text as it streams: detectors' scores, and where conditions held. */

import type { Answer, Operation } from "../api/types";

export interface Watched {
  /** Texts of the tokens of the prompt and the answer. */
  tokens: string[];
  promptLength: number;
  /** By detector, then by position. */
  scores: Map<string, Map<number, number | null>>;
  /** By position: stops, flags and conditional steering. */
  held: Map<number, string[]>;
}

export function watchedFrom(prompt: string[]): Watched {
  return { tokens: prompt, promptLength: prompt.length, scores: new Map(), held: new Map() };
}

/** Returns the operations that read detectors' scores. */
export function watchOps(detectors: string[]): Operation[] {
  return detectors.map((detector) => ({ op: "detect", detector, name: `score of ${detector}` }));
}

/** Returns what was watched, and what a piece of the answer of these operations has beside it. */
export function extended(
  watched: Watched,
  answer: Answer,
  tokens: string[],
  operations: Operation[],
): Watched {
  const told = answer.choices[0]?.interventions;
  const scores = new Map(watched.scores);
  const held = new Map(watched.held);
  const hold = (positions: number[], what: string) =>
    positions.forEach((position) => held.set(position, [...(held.get(position) ?? []), what]));
  for (const [name, result] of Object.entries(told?.results ?? {})) {
    const detector = operations.find((operation) => operation["name"] === name)?.["detector"];
    if (result.type === "detect" && typeof detector === "string") {
      const values = new Map(scores.get(detector));
      result.positions.forEach((position, index) => values.set(position, result.scores[index]!));
      scores.set(detector, values);
    } else if (result.type === "flag" || result.type === "stop") {
      hold(result.positions, name);
    }
  }
  const applied = told?.applied ?? [];
  const numOfPreset = applied.length - operations.length; // a preset's come first
  applied.forEach(({ op, positions, decides }, index) => {
    if (decides && op !== "flag" && op !== "stop") {
      hold(positions, described(op, operations[index - numOfPreset]));
    }
  });
  return { ...watched, tokens: [...watched.tokens, ...tokens], scores, held };
}

function described(op: string, operation: Operation | undefined): string {
  const vector = operation?.["vector"] as { name: string } | undefined;
  if (vector) return `steering by ${vector.name}`;
  const changes = operation?.["changes"] as { feature: number }[] | undefined;
  if (changes) return `change of feature ${changes.map(({ feature }) => feature).join(", ")}`;
  return op;
}
