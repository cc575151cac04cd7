/** The page's state in the address, behind the `#`, which browsers send to nobody. */

import {
  CHANGES,
  ENDS,
  JOINS,
  LEAVES,
  MARK,
  MARKS,
  MEASURES,
  MODES,
  PHASES,
  REDUCTIONS,
  ROLES,
  SCORES,
  SIDES,
  SLIDER,
  SPANS,
  START,
  STEER,
  TEST,
  VIEWS,
  type PageState,
} from "./page";

const PREFIX = "#s=";
const MAX_ITEMS = 64;

/** What stands in a list, by the field's name: lists are empty where the page starts. */
const ITEMS: Record<string, unknown> = {
  steering: STEER,
  messages: START.messages[0],
  sliders: SLIDER,
  marks: MARK,
  tests: TEST,
  watched: "",
};

/** Fields that have one of some words. */
const WORDS: Record<string, readonly string[]> = {
  view: VIEWS,
  kind: ["plain", "chat"],
  mode: MODES,
  phase: PHASES,
  role: ROLES,
  leaf: LEAVES,
  join: JOINS,
  score: SCORES,
  side: SIDES,
  over: SPANS,
  reduce: REDUCTIONS,
  until: ENDS,
  op: MARKS,
  change: CHANGES,
  measure: MEASURES,
};

/** Returns the fragment of a state: what differs from the page's start. */
export function encode(state: PageState): string {
  const text = JSON.stringify(changes(state, START) ?? {});
  const binary = Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte)).join("");
  return PREFIX + btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** Returns the state of a fragment, however it came about: what does not fit is as at the start. */
export function decode(fragment: string): PageState {
  if (!fragment.startsWith(PREFIX)) return START;
  try {
    const binary = atob(fragment.slice(PREFIX.length).replaceAll("-", "+").replaceAll("_", "/"));
    const text = new TextDecoder().decode(Uint8Array.from(binary, (character) => character.charCodeAt(0)));
    return fitted(JSON.parse(text), START, "") as PageState;
  } catch {
    return START;
  }
}

function changes(value: unknown, start: unknown): unknown {
  if (Array.isArray(value) || typeof value !== "object" || value === null) {
    return JSON.stringify(value) === JSON.stringify(start) ? undefined : value;
  }
  const found = Object.entries(value)
    .map(([name, each]) => [name, changes(each, (start as Record<string, unknown>)[name])])
    .filter(([, each]) => each !== undefined);
  return found.length ? Object.fromEntries(found) : undefined;
}

function fitted(raw: unknown, model: unknown, name: string): unknown {
  if (Array.isArray(model)) {
    if (!Array.isArray(raw)) return model;
    return raw.slice(0, MAX_ITEMS).map((item) => fitted(item, ITEMS[name], ""));
  }
  if (typeof model === "object" && model !== null) {
    const given = (typeof raw === "object" && raw !== null ? raw : {}) as Record<string, unknown>;
    return Object.fromEntries(
      Object.entries(model).map(([each, start]) => [each, fitted(given[each], start, each)]),
    );
  }
  const words = WORDS[name];
  const fits = typeof raw === typeof model && (typeof raw !== "number" || Number.isFinite(raw));
  return fits && (words === undefined || words.includes(raw as string)) ? raw : model;
}
