/** How tokens and numbers are written. */

/** Returns a token's text so that blanks can be seen. */
export function visible(token: string): string {
  const shown = token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ /, "·");
  return shown === "" ? "∅" : shown;
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
