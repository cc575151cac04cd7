/** What is stored under names with versions: vectors, detectors, dictionaries. */

import type { Stored } from "../api/types";

/**
 * Returns what `name` or `name@version` means, the same as to the server, or nothing: one's own where there is
 * one so named, this model's before another's, the newest.
 */
export function named<T extends Stored>(text: string, stored: T[], model = ""): T | undefined {
  const [name, version] = text.split("@");
  const alike = stored.filter((each) => each.name === name);
  const isOwn = alike.some((each) => each.own);
  const found = alike.filter(
    (each) => each.own === isOwn && (version === undefined || each.version === Number(version)),
  );
  const rank = (each: T) => [Number(each.model === model), each.version] as const;
  return found.sort((one, other) => {
    const [ours, theirs] = [rank(one), rank(other)];
    return theirs[0] - ours[0] || theirs[1] - ours[1];
  })[0];
}

/** Returns what can be chosen: the newest of each name, then certain versions. */
export function namesOf(stored: Stored[], current: string): (readonly [string, string])[] {
  const names = [...new Set(stored.map((each) => each.name))];
  const newest = names.map((name) => [name, name] as const);
  const versions = stored
    .filter((each) => each.version > 1 || stored.some((one) => one.name === each.name && one.version > 1))
    .map((each) => [`${each.name}@${each.version}`, `${each.name}, version ${each.version}`] as const);
  const options = [...newest, ...versions];
  const isThere = options.some(([name]) => name === current);
  return isThere
    ? options
    : [[current, current ? `${current} (not here)` : "choose one"] as const, ...options];
}
