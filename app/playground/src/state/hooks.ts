/** The page's state and what runs: kept in Preact's hooks. */

import { createContext } from "preact";
import { useCallback, useContext, useEffect, useRef, useState } from "preact/hooks";

import { isCancelled, sentence } from "../api/client";
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
  useEffect(() => {
    const timer = setTimeout(() => history.replaceState(null, "", encode(state)), LINK_MS);
    return () => clearTimeout(timer);
  }, [state]);
  useEffect(() => {
    const follow = () => setState(decode(location.hash));
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return [state, change];
}

export interface Run {
  isRunning: boolean;
  error: string;
  start: (work: (signal: AbortSignal) => Promise<void>) => void;
  cancel: () => void;
}

/** Returns something that runs one piece of work at a time: the next one cancels the last. */
export function useRun(): Run {
  const current = useRef<AbortController | null>(null);
  const [isRunning, setIsRunning] = useState(false);
  const [error, setError] = useState("");
  const cancel = useCallback(() => {
    current.current?.abort();
    current.current = null;
    setIsRunning(false);
  }, []);
  const start = useCallback((work: (signal: AbortSignal) => Promise<void>) => {
    current.current?.abort();
    const mine = new AbortController();
    current.current = mine;
    setIsRunning(true);
    setError("");
    work(mine.signal)
      .catch((problem: unknown) => {
        if (current.current === mine && !isCancelled(problem)) setError(sentence(problem));
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
  return { isRunning, error, start, cancel };
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
