/** One prompt at several strengths of one vector: one request, a prompt for each. */

import { useMemo, useState } from "preact/hooks";

import { stream, tokenize } from "../api/client";
import type { ApiRequest, Operation } from "../api/types";
import { changedShare, compared } from "../lib/diff";
import { generation, source } from "../lib/requests";
import { steerOps } from "../lib/steering";
import { percent } from "../lib/text";
import { call, client } from "../lib/snippets";
import { trace } from "../lib/traces";
import { FieldError } from "../lib/where";
import { usePage, useRun } from "../state/hooks";
import { Chart } from "../ui/chart";
import { Choice, CopyBar, NumberField, RunBar } from "../ui/parts";

const MAX_STEPS = 15;

interface Swept {
  ids: number[];
  baseline: string;
  strengths: number[];
  texts: string[];
}

export function SweepView() {
  const { state, change, capabilities, vectors, detectors } = usePage();
  const run = useRun();
  const [swept, setSwept] = useState<Swept | null>(null);
  const [active, setActive] = useState(0);
  const { sweep, steering } = state;
  const set = (part: Partial<typeof sweep>) => change({ sweep: { ...sweep, ...part } });

  const strengths = () => {
    const steps = Math.max(2, Math.min(MAX_STEPS, Math.round(sweep.steps)));
    const gap = (sweep.to - sweep.from) / (steps - 1);
    return Array.from({ length: steps }, (_, index) => Number((sweep.from + gap * index).toFixed(4)));
  };
  /** Returns the request for a prompt that is repeated; the first is the baseline. */
  const request = (prompt: string | number[]): ApiRequest => {
    const all = strengths();
    const operations: Operation[] = all.flatMap((strength, index) =>
      steerOps(state, detectors, new Map([[sweep.which, strength]])).map((op) => ({
        ...op,
        prompts: [index + 1],
      })),
    );
    if (!operations.length || !steering[sweep.which]?.on) {
      throw new FieldError("Add a vector under Steering first, and leave it on.");
    }
    const { body } = generation({ ...state, kind: "plain", prompt: "" }, capabilities, operations);
    const prompts = Array.from({ length: all.length + 1 }, () => prompt);
    return { path: "/v1/completions", body: { ...body, prompt: prompts } };
  };
  const start = () =>
    run.start(async (signal) => {
      const all = strengths();
      request(""); // says what is wrong with the fields before anything is asked
      const ids = (await tokenize(source(state), signal)).map((token) => token.id);
      const texts = Array.from({ length: all.length + 1 }, () => "");
      for await (const answer of stream(request(ids), signal)) {
        for (const choice of answer.choices) texts[choice.index] += choice.text ?? "";
        setSwept({ ids, baseline: texts[0]!, strengths: all, texts: texts.slice(1) });
      }
    });
  /** What is copied has the text as it was written, or a conversation's tokens. */
  const copied = () => {
    if (state.kind === "plain") return request(state.prompt);
    if (!swept) throw new FieldError("Run it once: the conversation's tokens are known then.");
    return request(swept.ids);
  };
  const block = () => {
    const varied = steerOps(state, detectors, new Map([[sweep.which, "strength"]]));
    const reading = { over: { name: "strength", values: strengths() } };
    return trace(generation(state, capabilities, varied), capabilities, vectors, reading);
  };
  // Many long texts cannot be compared at every token that comes: they are when all is written.
  const parts = useMemo(
    () => (run.isRunning ? null : swept?.texts.map((text) => compared(swept.baseline, text).after)),
    [swept, run.isRunning],
  );
  const changed = parts?.map(changedShare);
  return (
    <>
      <div class="fields">
        <Choice
          label="Vector to vary"
          value={String(sweep.which)}
          options={
            steering.length
              ? steering.map((steer, index) => [String(index), `${index + 1}: ${steer.vector}`] as const)
              : [["0", "none yet"] as const]
          }
          onChange={(which) => set({ which: Number(which) })}
        />
        <NumberField label="From" value={sweep.from} onChange={(from) => set({ from })} />
        <NumberField label="To" value={sweep.to} onChange={(to) => set({ to })} />
        <NumberField
          label="Strengths"
          value={sweep.steps}
          min={2}
          max={MAX_STEPS}
          step={1}
          onChange={(steps) => set({ steps })}
        />
      </div>
      <RunBar run={run} label="Run all" onRun={start} />
      {swept && (
        <>
          {changed && (
            <Chart
              label="The part of each text's words that the baseline does not have"
              series={[{ name: "changed words", values: changed }]}
              places={swept.strengths.map(String)}
              x="strength"
              y="changed words"
              domain={[0, 1]}
              active={active}
              onActive={setActive}
            />
          )}
          <div class="multiples">
            <article class="multiple" aria-label="Baseline">
              <h3>Baseline</h3>
              <p class="text">{swept.baseline}</p>
            </article>
            {swept.texts.map((text, index) => (
              <article
                key={index}
                class={`multiple ${index === active ? "here" : ""}`}
                aria-label={`Strength ${swept.strengths[index]}`}
              >
                <h3>
                  {swept.strengths[index]} <small>{changed && `${percent(changed[index]!)} new`}</small>
                </h3>
                <p class="text">
                  {(parts?.[index] ?? [{ text, differs: false }]).map((part, each) =>
                    part.differs ? (
                      <mark key={each} class="added">
                        {part.text}
                      </mark>
                    ) : (
                      <span key={each}>{part.text}</span>
                    ),
                  )}
                </p>
              </article>
            ))}
          </div>
        </>
      )}
      {state.kind === "chat" && (
        <p class="hint">
          A conversation is rendered first, and its tokens are sent as prompts: several go together so.
        </p>
      )}
      <CopyBar request={copied} trace={block} forms={() => ({ python: everyText(copied()) })} />
    </>
  );
}

/** Returns the program that prints the text of each prompt. */
function everyText(request: ApiRequest): string {
  return `${client()}\n${call(request)}for choice in answer.choices:\n    print(choice.index, choice.text)\n`;
}
