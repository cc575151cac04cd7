/** From what the page says of steering to operations of the API. */

import type { Detector, Json, JsonObject, Operation, Vector } from "../api/types";
import { DEMO, SLIDER, STEER, WHERE, type PageState, type SliderState, type SteerState } from "../state/page";
import { whenOf } from "./conditions";
import { FieldError, given, whereOf } from "./where";

/** What steers: vectors and sliders of features. */
export type Steering = Pick<PageState, "steering" | "sliders">;

/** Returns the operations of the steering that is switched on; `changes` are of vectors, by their number. */
export function steerOps(
  { steering, sliders }: Steering,
  detectors: Detector[],
  changes?: Map<number, JsonObject>,
): Operation[] {
  const vectors = steering.flatMap((steer, index) => {
    if (!steer.on || !steer.vector) return [];
    const row = layerOfRow(steer.row);
    return [
      {
        op: "steer",
        at: pointsOf(steer.layers),
        vector: { name: steer.vector, ...(row === undefined ? {} : { layer: row }) },
        mode: steer.mode,
        scale: steer.scale,
        ...scopeOf(steer, detectors),
        ...changes?.get(index),
      },
    ];
  });
  return [...vectors, ...featureOps(sliders, detectors)];
}

/** Returns whether something steers. */
export function isSteering({ steering, sliders }: Steering): boolean {
  return steering.some((steer) => steer.on && steer.vector) || sliders.some((slider) => slider.on);
}

/** Returns a vector's steering as it is added: at its best layer, or one in the middle of those that it has. */
export function steeringBy(vector: Vector): SteerState {
  if (vector.name === DEMO.vector && vector.layers.includes(Number(DEMO.layers))) return DEMO;
  const layer = vector.training?.best_layer ?? vector.layers[Math.floor(vector.layers.length / 2)]!;
  return { ...STEER, vector: vector.name, layers: String(layer) };
}

/**
 * Returns a slider of a feature, which goes beyond the activation that it was seen with. It leaves out position 0,
 * where the state is many times longer than elsewhere.
 */
export function sliderOf(dictionary: string, feature: number, label: string, activation = 0): SliderState {
  const reach = activation > 0 ? Number((4 * activation).toPrecision(2)) : SLIDER.reach;
  const where = { ...WHERE, exceptPositions: "0" };
  return { ...SLIDER, dictionary, feature, label, reach, value: reach / 2, where };
}

/** Returns one operation for the sliders of a dictionary that act at the same positions. */
function featureOps(sliders: SliderState[], detectors: Detector[]): Operation[] {
  const found = new Map<string, Operation & { changes: Json[] }>();
  for (const slider of sliders.filter(({ on }) => on)) {
    const scope = scopeOf(slider, detectors);
    const key = JSON.stringify([slider.dictionary, scope]);
    const operation = found.get(key) ?? {
      op: "feature",
      dictionary: slider.dictionary,
      changes: [],
      ...scope,
    };
    const value = slider.change === "ablate" ? {} : { value: slider.value };
    operation.changes.push({ feature: slider.feature, mode: slider.change, ...value });
    found.set(key, operation);
  }
  return [...found.values()];
}

/** Returns where and when an operation acts. */
export function scopeOf(
  { where, when }: Pick<SteerState, "where" | "when">,
  detectors: Detector[],
): Partial<Operation> {
  return given({ where: whereOf(where), when: whenOf(when, detectors) }) ?? {};
}

/** Returns the layer whose row of a vector is used, if one is given. */
export function layerOfRow(text: string): number | undefined {
  const row = text.trim();
  if (row && !/^-?\d+$/.test(row)) throw new FieldError(`The row is a layer's number, got “${row}”.`);
  return row ? Number(row) : undefined;
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
