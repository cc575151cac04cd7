/** How tokens and numbers are written. */

const MARKS: Record<string, string> = { " ": "·", "\n": "⏎", "\r": "␍", "\t": "⇥" };
const BLANKS = Object.fromEntries(Object.entries(MARKS).map(([blank, mark]) => [mark, blank]));

/** Returns a token's text so that blanks can be seen; `typed` is its inverse, and no two tokens look alike. */
export function visible(token: string): string {
  if (token === "") return "∅";
  const unclear = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f·⏎␍⇥∅]|\\(?=u[0-9a-f]{4})/g;
  const clear = token.replace(unclear, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
  return clear.replace(/[ \n\r\t]/g, (blank) => MARKS[blank]!);
}

/** Returns the token's text that somebody typed or copied as it was shown, or its id of `#7042`. */
export function typed(shown: string): string | number {
  if (/^#\d+$/.test(shown.trim())) return Number(shown.trim().slice(1));
  const marks = shown.replace(/[·⏎␍⇥]/g, (mark) => BLANKS[mark]!);
  return marks.replace(/\\u([0-9a-f]{4})/g, (_, code: string) => String.fromCharCode(parseInt(code, 16)));
}

/** Returns the position of the last token that is a word or a part of one. */
export function lastReadable(tokens: string[]): number {
  const found = tokens.findLastIndex((token) => /[\p{L}\p{N}]/u.test(token));
  return found < 0 ? tokens.length - 1 : found;
}

export function probability(logprob: number | null | undefined): number {
  return logprob === null || logprob === undefined ? 0 : Math.exp(logprob);
}

export function percent(share: number): string {
  return `${(share * 100).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`;
}

export function short(value: number): string {
  const size = Math.abs(value);
  return size !== 0 && (size < 0.01 || size >= 10000)
    ? value.toExponential(1)
    : value.toFixed(size < 10 ? 2 : 1);
}

export function plural(count: number, word: string): string {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}
