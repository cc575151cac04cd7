/** Small pieces that views are made of. */

import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef, useState } from "preact/hooks";

import { copyText } from "../lib/clipboard";
import { FieldError } from "../lib/where";
import { ApiFailure, SERVER, sentence } from "../api/client";
import { curl, python, type Snippets } from "../lib/snippets";
import { plural } from "../lib/text";
import type { ApiRequest } from "../api/types";
import type { Run } from "../state/hooks";
import { encode } from "../state/link";
import { usePage } from "../state/hooks";
import type { Trace } from "../lib/traces";

/** Windows in which all is in one column, as in styles.css. */
const NARROW = "(max-width: 60rem)";

interface FieldProps {
  label: string;
  hint?: string;
  class?: string;
}

export function TextField(
  props: FieldProps & {
    value: string;
    onChange: (text: string) => void;
    placeholder?: string;
    list?: string;
    /** What is wrong with the value. */
    problem?: string;
  },
) {
  const id = useId();
  const hint = props.problem || props.hint;
  return (
    <div class={`field ${props.class ?? ""}`}>
      <label for={id}>{props.label}</label>
      <input
        id={id}
        type="text"
        value={props.value}
        placeholder={props.placeholder}
        list={props.list}
        spellcheck={false}
        aria-invalid={props.problem ? true : undefined}
        aria-describedby={hint ? `${id}-hint` : undefined}
        onInput={(event) => props.onChange(event.currentTarget.value)}
      />
      {hint && (
        <small id={`${id}-hint`} class={props.problem ? "wrong" : "hint"}>
          {hint}
        </small>
      )}
    </div>
  );
}

export function NumberField(
  props: FieldProps & {
    value: number;
    onChange: (value: number) => void;
    min?: number;
    max?: number;
    step?: number | "any";
  },
) {
  const id = useId();
  const [problem, setProblem] = useState("");
  return (
    <div class={`field number ${props.class ?? ""}`}>
      <label for={id}>{props.label}</label>
      <input
        id={id}
        type="number"
        value={props.value}
        min={props.min}
        max={props.max}
        step={props.step ?? "any"}
        required
        aria-invalid={problem ? true : undefined}
        aria-describedby={problem ? `${id}-problem` : undefined}
        onInput={(event) => {
          const { valueAsNumber, validity, validationMessage } = event.currentTarget;
          setProblem(validity.stepMismatch && props.step !== 1 ? "" : validationMessage);
          if (Number.isFinite(valueAsNumber)) props.onChange(valueAsNumber);
        }}
      />
      {problem && (
        <small id={`${id}-problem`} class="wrong">
          {problem}
        </small>
      )}
    </div>
  );
}

export function TextArea(
  props: FieldProps & { value: string; onChange: (text: string) => void; rows?: number },
) {
  const id = useId();
  return (
    <div class={`field ${props.class ?? ""}`}>
      <label for={id}>{props.label}</label>
      <textarea
        id={id}
        rows={props.rows ?? 3}
        value={props.value}
        aria-describedby={props.hint ? `${id}-hint` : undefined}
        onInput={(event) => props.onChange(event.currentTarget.value)}
      />
      {props.hint && (
        <small id={`${id}-hint`} class="hint">
          {props.hint}
        </small>
      )}
    </div>
  );
}

export function Choice<T extends string>(
  props: FieldProps & { value: T; options: readonly (readonly [T, string])[]; onChange: (value: T) => void },
) {
  const id = useId();
  return (
    <div class={`field ${props.class ?? ""}`}>
      <label for={id}>{props.label}</label>
      <select
        id={id}
        value={props.value}
        onChange={(event) => props.onChange(event.currentTarget.value as T)}
      >
        {props.options.map(([value, label]) => (
          <option key={value} value={value}>
            {label}
          </option>
        ))}
      </select>
    </div>
  );
}

export function Check(props: { label: string; value: boolean; onChange: (value: boolean) => void }) {
  return (
    <label class="check">
      <input
        type="checkbox"
        checked={props.value}
        onChange={(event) => props.onChange(event.currentTarget.checked)}
      />
      {props.label}
    </label>
  );
}

/** A slider with its number beside it, for what is found by moving it. */
export function Slider(
  props: FieldProps & {
    value: number;
    min: number;
    max: number;
    step: number;
    onChange: (value: number) => void;
  },
) {
  const id = useId();
  const min = Math.min(props.min, props.value);
  const max = Math.max(props.max, props.value);
  return (
    <div class={`field slider ${props.class ?? ""}`}>
      <label for={id}>{props.label}</label>
      <input
        id={id}
        type="range"
        min={min}
        max={max}
        step={props.step}
        value={props.value}
        onInput={(event) => props.onChange(event.currentTarget.valueAsNumber)}
      />
      <input
        type="number"
        aria-label={`${props.label}, as a number`}
        step="any"
        value={props.value}
        onInput={(event) => {
          const value = event.currentTarget.valueAsNumber;
          if (Number.isFinite(value)) props.onChange(value);
        }}
      />
    </div>
  );
}

export function Problem(props: { text: string }) {
  return props.text ? (
    <p class="problem" role="alert">
      {props.text}
    </p>
  ) : null;
}

/** What went wrong in a run, and a button to try again where that can help. */
export function Failure(props: { run: Run; onRetry: () => void }) {
  const { failure } = props.run;
  if (failure === null) return null;
  return (
    <>
      <Problem text={sentence(failure)} />
      {failure instanceof ApiFailure && failure.isPassing && (
        <button type="button" class="retry" onClick={props.onRetry}>
          Retry
        </button>
      )}
    </>
  );
}

/** A button that starts work, the one that cancels it, and what went wrong. */
export function RunBar(props: {
  run: Run;
  label: string;
  onRun: () => void;
  class?: string;
  children?: ComponentChildren;
}) {
  const { isRunning, numTokens, cancel } = props.run;
  return (
    <>
      <div class={`runbar ${props.class ?? ""}`}>
        <button type="button" class="primary" onClick={props.onRun}>
          {props.label}
        </button>
        <button type="button" disabled={!isRunning} onClick={cancel}>
          Cancel
        </button>
        <span class="status" role="status">
          {isRunning ? "Running…" : ""}
        </span>
        {isRunning && numTokens > 0 && <span class="status">{plural(numTokens, "token")}</span>}
        {props.children}
      </div>
      <Failure run={props.run} onRetry={props.onRun} />
    </>
  );
}

/** The run of a view, also by Ctrl+Enter. On narrow windows it stays at the bottom, and shows the answer. */
export function ViewRun(props: { run: Run; onRun: () => void; children?: ComponentChildren }) {
  const end = useRef<HTMLSpanElement>(null);
  const start = useRef(() => {});
  start.current = () => {
    props.run.clear();
    props.onRun();
    if (matchMedia(NARROW).matches) end.current?.scrollIntoView({ block: "center" });
  };
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      start.current();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
  return (
    <>
      <RunBar run={props.run} label="Run" class="of-view" onRun={() => start.current()}>
        <span class="hint shortcut">Ctrl+Enter</span>
        {props.children}
      </RunBar>
      <span ref={end} />
    </>
  );
}

/** The buttons that copy a view's request in each form, and the link to what is shown. */
export function CopyBar(props: {
  request: () => ApiRequest;
  trace: () => Trace;
  forms?: () => Partial<Snippets>;
}) {
  const { state } = usePage();
  const [said, setSaid] = useState("");
  const timer = useRef(0);
  useEffect(() => () => clearTimeout(timer.current), []);
  const copy = async (what: string, text: () => Trace) => {
    const say = (words: string) => {
      setSaid(words);
      clearTimeout(timer.current);
      timer.current = window.setTimeout(() => setSaid(""), 6000);
    };
    try {
      const content = text();
      if (typeof content !== "string") return say(content.missing);
      await copyText(content);
      say(`Copied ${what}.`);
    } catch (error) {
      say(error instanceof FieldError ? error.message : "The browser did not let the page copy.");
    }
  };
  const form = (name: "curl" | "python", make: (request: ApiRequest) => string) => () =>
    props.forms?.()[name] ?? make(props.request());
  return (
    <div class="copybar" role="group" aria-label="Copy this view">
      <span class="copy-title">Copy as</span>
      <button type="button" onClick={() => copy("the curl command", form("curl", curl))}>
        curl
      </button>
      <button type="button" onClick={() => copy("the Python program", form("python", python))}>
        Python
      </button>
      <button type="button" onClick={() => copy("the trace", props.trace)}>
        trace
      </button>
      <button
        type="button"
        onClick={() => copy("the link", () => `${location.origin}${location.pathname}${encode(state)}`)}
      >
        link
      </button>
      <span class="status" role="status">
        {said}
      </span>
    </div>
  );
}

/** A link to a part of the API's documentation, which the server has at /docs. */
export function Guide(props: { tag: "detectors" | "dictionaries" }) {
  return <a href={`${SERVER}/docs#/${props.tag}`}>The API of {props.tag}</a>;
}

/** A scale from nothing to all, for the colours of a map. */
export function Legend(props: { low: string; high: string; kind?: "two-sided" }) {
  return (
    <p class="legend">
      <span>{props.low}</span>
      <span class={`ramp ${props.kind ?? ""}`} aria-hidden="true" />
      <span>{props.high}</span>
    </p>
  );
}
