/** What two texts have in common, word by word. */

import { diffWordsWithSpace } from "diff";

export interface Part {
  text: string;
  differs: boolean;
}

/** Returns both texts in parts: those that the other one has too, and those that it has not. */
export function compared(before: string, after: string): { before: Part[]; after: Part[] } {
  const parts = diffWordsWithSpace(before, after);
  return {
    before: parts.filter((part) => !part.added).map((part) => ({ text: part.value, differs: part.removed })),
    after: parts.filter((part) => !part.removed).map((part) => ({ text: part.value, differs: part.added })),
  };
}

/** Returns which part of a text's words differs, 0 to 1. */
export function changedShare(parts: Part[]): number {
  const words = (parts: Part[]) => parts.flatMap((part) => part.text.split(/\s+/).filter(Boolean)).length;
  const all = words(parts);
  return all ? words(parts.filter((part) => part.differs)) / all : 0;
}
