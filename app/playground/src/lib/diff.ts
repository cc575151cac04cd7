/** What two texts have in common, word by word. */

import { diffWordsWithSpace } from "diff";

export interface Part {
  text: string;
  differs: boolean;
}

export interface Compared {
  before: Part[];
  after: Part[];
  /** The words that both begin with; null if the texts are the same. */
  common: string | null;
}

/** Returns both texts in parts: those that the other one has too, and those that it has not. */
export function compared(before: string, after: string): Compared {
  const parts = diffWordsWithSpace(before, after);
  const first = parts.findIndex((part) => part.added || part.removed);
  return {
    common:
      first < 0
        ? null
        : parts
            .slice(0, first)
            .map((part) => part.value)
            .join(""),
    before: parts.filter((part) => !part.added).map((part) => ({ text: part.value, differs: part.removed })),
    after: parts.filter((part) => !part.removed).map((part) => ({ text: part.value, differs: part.added })),
  };
}

/** Returns which part of a text's words differs, 0 to 1. */
export function changedShare(parts: Part[]): number {
  const words = (parts: Part[]) => numWords(parts.map((part) => part.text).join(" "));
  const all = words(parts);
  return all ? words(parts.filter((part) => part.differs)) / all : 0;
}

export function numWords(text: string): number {
  return text.split(/\s+/).filter(Boolean).length;
}
