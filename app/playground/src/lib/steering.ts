/** From what the page says of steering to operations of the API. */

import type { Json, JsonObject, Operation } from "../api/types";
import type { SteerState, WhereState } from "../state/page";
import { typed } from "./text";

/** Something in a field that cannot be sent; the message is a sentence. */
export class FieldError extends Error {}

/** Returns the where-clause, or nothing where it names every position. */
export function whereOf(where: WhereState): JsonObject | undefined {
  const clause: JsonObject = {
    phase: where.phase === "all" ? undefined : where.phase,
    positions: integers(where.positions, "Positions"),
    range: rangeOf(where.range),
    tokens: tokensOf(where.tokens),
    exclude: given({
      positions: integers(where.exceptPositions, "Except positions"),
      tokens: tokensOf(where.exceptTokens),
    }),
  };
  return given(clause);
}

/** Returns the operations of the steering that is switched on, each with a strength. */
export function steerOps(steering: SteerState[], strengths?: Map<number, Json>): Operation[] {
  return steering.flatMap((steer, index) => {
    if (!steer.on || !steer.vector) return [];
    const row = steer.row.trim();
    if (row && !/^-?\d+$/.test(row))
      throw new FieldError(`The vector's row is a layer's number, got “${row}”.`);
    return [
      {
        op: "steer",
        at: pointsOf(steer.layers),
        vector: { name: steer.vector, ...(row ? { layer: Number(row) } : {}) },
        mode: steer.mode,
        scale: strengths?.get(index) ?? steer.scale,
        ...given({ where: whereOf(steer.where) }),
      },
    ];
  });
}

/** Returns the places in the model: `12`, `8:20`, `*`, or several with commas. */
export function pointsOf(layers: string): string | string[] {
  const parts = layers.split(",").map((part) => part.trim());
  for (const part of parts) {
    if (!/^(-?\d+|\*|-?\d*:-?\d*)$/.test(part)) {
      throw new FieldError(
        `Layers are numbers such as 12, ranges such as 8:20, or * for all; got “${part}”.`,
      );
    }
  }
  const points = parts.map((part) => `layers.${part}.output`);
  return points.length === 1 ? points[0]! : points;
}

function integers(text: string, field: string): number[] | undefined {
  if (!text.trim()) return undefined;
  return text.split(",").map((part) => {
    if (!/^\s*-?\d+\s*$/.test(part)) {
      throw new FieldError(`${field}: whole numbers with commas between them, got “${part.trim()}”.`);
    }
    return Number(part);
  });
}

function rangeOf(text: string): Json[] | undefined {
  if (!text.trim()) return undefined;
  const found = /^\s*(-?\d*)\s*:\s*(-?\d*)\s*$/.exec(text);
  if (!found) throw new FieldError(`A range is start:stop, such as 3:9 or -4:, got “${text.trim()}”.`);
  return [found[1] ? Number(found[1]) : 0, found[2] ? Number(found[2]) : null];
}

/** Returns tokens: texts with commas between them, as they are shown or with blanks, or ids as `#7042`. */
function tokensOf(text: string): (string | number)[] | undefined {
  if (!text) return undefined;
  return text.split(",").map(typed);
}

function given(fields: JsonObject): JsonObject | undefined {
  const found = Object.entries(fields).filter(([, value]) => value !== undefined);
  return found.length ? Object.fromEntries(found) : undefined;
}
