/** The page's state and what runs: kept in Preact's hooks. */

import { createContext } from "preact";
import { useCallback, useContext, useEffect, useRef, useState } from "preact/hooks";

import { isCancelled } from "../api/client";
import type { Capabilities, Detector, Dictionary, Vector } from "../api/types";
import { decode, encode } from "./link";
import type { PageState } from "./page";

const LINK_MS = 200;
export const SETTLE_MS = 350;

export type Change = (change: Partial<PageState>) => void;

/** What every view needs. */
export interface Page {
  state: PageState;
  change: Change;
  capabilities: Capabilities;
  vectors: Vector[];
  /** Of this model. */
  detectors: Detector[];
  /** Of this model. */
  dictionaries: Dictionary[];
  reloadStored: () => Promise<void>;
}

export const PageContext = createContext<Page | null>(null);

export function usePage(): Page {
  return useContext(PageContext)!;
}

/** Returns the state, which the address follows, and which follows the address. */
export function useLinkedState(): [PageState, Change] {
  const [state, setState] = useState(() => decode(location.hash));
  const change = useCallback((part: Partial<PageState>) => setState((old) => ({ ...old, ...part })), []);
  const seen = useRef(location.hash);
  useEffect(() => {
    const timer = setTimeout(() => {
      if (location.hash !== seen.current) return; // A link was opened, which is followed.
      history.replaceState(null, "", encode(state));
      seen.current = location.hash;
    }, LINK_MS);
    return () => clearTimeout(timer);
  }, [state]);
  useEffect(() => {
    const follow = () => {
      seen.current = location.hash;
      setState(decode(location.hash));
    };
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return [state, change];
}

/** Whether the page was opened by an address without a state. */
export const IS_FIRST_VISIT = location.hash === "";

const kept = new Map<string, unknown>();

/** Returns a state that outlives its view: what it has is there again when the view is. */
export function useKept<T>(name: string, start: T): [T, (value: T) => void] {
  const [value, setValue] = useState(() => (kept.has(name) ? (kept.get(name) as T) : start));
  const set = useCallback(
    (value: T) => {
      kept.set(name, value);
      setValue(() => value);
    },
    [name],
  );
  return [value, set];
}

export type Work = (signal: AbortSignal, count: (numTokens: number) => void) => Promise<void>;

export interface Run {
  isRunning: boolean;
  hasRun: boolean;
  /** Tokens generated so far. */
  numTokens: number;
  /** Null if nothing went wrong. */
  failure: unknown;
  /** Removes the answer that is shown. */
  clear: () => void;
  start: (work: Work) => void;
  cancel: () => void;
}

const NO_ANSWER = { isThere: false, clear: () => {} };

/**
 * Returns something that runs one piece of work at a time: the next one cancels the last. The answer of an earlier
 * run is removed where a run fails before it has one.
 */
export function useRun(answer: { isThere: boolean; clear: () => void } = NO_ANSWER): Run {
  const clear = useRef(answer.clear);
  clear.current = answer.clear;
  const current = useRef<AbortController | null>(null);
  const [isRunning, setIsRunning] = useState(false);
  const [hasRun, setHasRun] = useState(answer.isThere);
  const [numTokens, setNumTokens] = useState(0);
  const [failure, setFailure] = useState<unknown>(null);
  const cancel = useCallback(() => {
    current.current?.abort();
    current.current = null;
    setIsRunning(false);
  }, []);
  const start = useCallback((work: Work) => {
    current.current?.abort();
    const mine = new AbortController();
    current.current = mine;
    setIsRunning(true);
    setHasRun(true);
    setNumTokens(0);
    setFailure(null);
    let counted = 0;
    const count = (more: number) => {
      counted += more;
      if (current.current === mine) setNumTokens(counted);
    };
    work(mine.signal, count)
      .catch((problem: unknown) => {
        if (current.current !== mine || isCancelled(problem)) return;
        setFailure(problem);
        if (!counted) clear.current();
      })
      .finally(() => {
        mine.abort(); // where one of several requests failed, the others end too
        if (current.current !== mine) return;
        current.current = null;
        setIsRunning(false);
      });
  }, []);
  useEffect(() => cancel, [cancel]);
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if (event.key === "Escape" && current.current) cancel();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [cancel]);
  return { isRunning, hasRun, numTokens, failure, clear: answer.clear, start, cancel };
}

/** Calls `again` once `value` has stopped changing, and not for the value that it begins with. */
export function useSettled(value: string, again: () => void): void {
  const seen = useRef(value);
  const latest = useRef(again);
  latest.current = again;
  useEffect(() => {
    if (seen.current === value) return;
    const timer = setTimeout(() => {
      seen.current = value;
      latest.current();
    }, SETTLE_MS);
    return () => clearTimeout(timer);
  }, [value]);
}
