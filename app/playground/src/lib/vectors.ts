/** Which vector a name means: the same one as to the server. */

import type { Vector } from "../api/types";

/**
 * Returns the vector that `name` or `name@version` means, or nothing: one's own where there is one so named,
 * this model's before another's, the newest.
 */
export function vectorNamed(text: string, vectors: Vector[], model: string): Vector | undefined {
  const [name, version] = text.split("@");
  const named = vectors.filter((vector) => vector.name === name);
  const isOwn = named.some((vector) => vector.own);
  const found = named.filter(
    (vector) => vector.own === isOwn && (version === undefined || vector.version === Number(version)),
  );
  const rank = (vector: Vector) => [Number(vector.model === model), vector.version] as const;
  return found.sort((one, other) => {
    const [ours, theirs] = [rank(one), rank(other)];
    return theirs[0] - ours[0] || theirs[1] - ours[1];
  })[0];
}
