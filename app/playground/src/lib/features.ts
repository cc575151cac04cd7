/** Features of dictionaries: finding them, and what they are called. */

import { get } from "../api/client";
import type { Dictionary, Feature, ListPage } from "../api/types";

const MOST = 20;

/** Returns the features whose labels have some words, or the one of a number. */
export function featuresLike(
  dictionary: Dictionary,
  text: string,
  signal?: AbortSignal,
): Promise<Pick<ListPage<Feature>, "data" | "has_more">> {
  const number = /^\s*#?(\d+)\s*$/.exec(text)?.[1];
  const asked = new URLSearchParams({ limit: String(MOST) });
  if (number !== undefined) asked.set("id", number);
  else if (text.trim()) asked.set("query", text.trim());
  return get(`/v1/dictionaries/${dictionary.id}/features?${asked.toString()}`, signal);
}

/** Returns what a feature is called. */
export function called(feature: Feature): string {
  return feature.label ? `${feature.label} (${feature.id})` : `feature ${feature.id}`;
}
