/** From the fields of a where-clause to the API's. */

import type { Json, JsonObject } from "../api/types";
import type { WhereState } from "../state/page";
import { typed } from "./text";

/** Something in a field that cannot be sent; the message is a sentence. */
export class FieldError extends Error {}

/** Returns what a field's reader says of it, or nothing. */
export function problemOf(read: () => unknown): string {
  try {
    read();
    return "";
  } catch (error) {
    if (error instanceof FieldError) return error.message;
    throw error;
  }
}

/** Returns the where-clause, or nothing where it names every position. */
export function whereOf(where: WhereState): JsonObject | undefined {
  const clause: JsonObject = {
    phase: where.phase === "all" ? undefined : where.phase,
    positions: integers(where.positions, "Positions"),
    range: rangeOf(where.range),
    tokens: tokensOf(where.tokens),
    exclude: given({
      positions: integers(where.exceptPositions, "Exclude positions"),
      tokens: tokensOf(where.exceptTokens),
    }),
  };
  return given(clause);
}

export function integers(text: string, field: string): number[] | undefined {
  if (!text.trim()) return undefined;
  return text.split(",").map((part) => {
    if (!/^\s*-?\d+\s*$/.test(part)) {
      throw new FieldError(`${field}: comma-separated whole numbers, got “${part.trim()}”.`);
    }
    return Number(part);
  });
}

export function rangeOf(text: string): Json[] | undefined {
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

/** Returns the fields that have a value, or nothing where none has. */
export function given(fields: JsonObject): JsonObject | undefined {
  const found = Object.entries(fields).filter(([, value]) => value !== undefined);
  return found.length ? Object.fromEntries(found) : undefined;
}
