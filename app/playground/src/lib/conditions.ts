/** From what the page says of conditions to the API's, and to words. */

import type { Detector, JsonObject, Operation } from "../api/types";
import type { MarkState, TestState, WhenState } from "../state/page";
import { named } from "./names";
import { FieldError, given, whereOf } from "./where";

const WINDOW = 64;

/** Returns a condition, or nothing where it has no tests. */
export function whenOf(when: WhenState, detectors: Detector[]): JsonObject | undefined {
  const tests = when.tests.map((test) => {
    const found = testOf(test, detectors);
    return test.isNegated ? { not: found } : found;
  });
  return tests.length > 1 ? { [when.join]: tests } : tests[0];
}

/** Returns a condition in words. */
export function whenInWords(when: WhenState, detectors: Detector[]): string {
  const said = when.tests.map((test) => {
    const bound = test.bound.trim() || (ownBound(test, detectors) ?? "its threshold");
    const value = `${test.side === "above" ? ">" : "<"} ${bound}`;
    const span = test.over === "window" ? `last ${test.of}` : test.over;
    const over = test.over === "position" ? "" : ` (${test.reduce} of the ${span})`;
    return `${test.isNegated ? "not " : ""}${subject(test) || "…"}${over} ${value}`;
  });
  return said.join(when.join === "all" ? " and " : " or ");
}

/** Returns the operations of the stops and flags that are switched on; each has a name in the answer. */
export function markOps(marks: MarkState[], detectors: Detector[]): Operation[] {
  return marks.flatMap((mark, index) => {
    if (!mark.on) return [];
    const name = nameOf(mark, index);
    const when = whenOf(mark.when, detectors);
    if (!when) throw new FieldError(`“${name}” needs a condition: add a test, or remove it.`);
    return [{ op: mark.op, name, when, ...given({ where: whereOf(mark.where) }) }];
  });
}

/** Returns what a stop or a flag is called. */
export function nameOf(mark: MarkState, index: number): string {
  return mark.name.trim() || `${mark.op} ${index + 1}`;
}

function testOf(test: TestState, detectors: Detector[]): JsonObject {
  if (!subject(test)) {
    throw new FieldError(`A test needs a ${test.score}: choose one, or remove the test.`);
  }
  const isWindow = test.over === "window";
  if (isWindow && !(Number.isInteger(test.of) && test.of >= 1 && test.of <= WINDOW)) {
    throw new FieldError(`A window has 1 to ${WINDOW} tokens, got ${test.of}.`);
  }
  const score =
    test.score === "detector"
      ? { detector: test.detector }
      : { dictionary: test.dictionary, feature: featureOf(test.feature) };
  return {
    ...score,
    ...sideOf(test, detectors),
    ...given({
      over: test.over === "position" ? undefined : test.over,
      of: isWindow ? test.of : undefined,
      reduce: test.over !== "position" && test.reduce === "mean" ? "mean" : undefined,
      until: test.until === "end" ? "end" : undefined,
      hysteresis: test.until === "clears" && test.hysteresis > 0 ? test.hysteresis : undefined,
    }),
  };
}

/** Returns the bound of a test; the server knows that of a detector, where the score has to be above it. */
function sideOf(test: TestState, detectors: Detector[]): JsonObject {
  const isOwn = !test.bound.trim() && test.score === "detector" && test.side === "above";
  return isOwn ? {} : { [test.side]: boundOf(test, detectors) };
}

export function boundOf(test: TestState, detectors: Detector[]): number {
  const text = test.bound.trim();
  const bound = text ? Number(text) : ownBound(test, detectors);
  if (bound === undefined) {
    throw new FieldError(`The detector ${test.detector} has no threshold: give one.`);
  }
  if (!Number.isFinite(bound)) throw new FieldError(`A threshold is a number, got “${text}”.`);
  return bound;
}

/** Returns the number that a test compares with where its field is empty, if there is one. */
export function ownBound(test: TestState, detectors: Detector[]): number | undefined {
  if (test.score === "feature") return 0;
  return named(test.detector, detectors)?.threshold ?? undefined;
}

function featureOf(text: string): number | string {
  const found = /^\s*#?(\d+)\s*$/.exec(text);
  return found ? Number(found[1]) : text.trim();
}

/** Returns what a test reads, or nothing where it is not chosen yet. */
function subject(test: TestState): string {
  if (test.score === "detector") return test.detector;
  return test.dictionary && test.feature.trim() ? `feature ${test.feature.trim()}` : "";
}
