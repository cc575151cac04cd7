/** One prompt at several strengths of one vector, beside a random direction of the same norm. */

import { useMemo, useState } from "preact/hooks";

import { post, stream, tokenize } from "../api/client";
import type {
  Answer,
  ApiRequest,
  ChoiceInterventions,
  Json,
  LensResult,
  Operation,
  ProbeResult,
  TensorLink,
  TensorObject,
} from "../api/types";
import { changedShare, compared } from "../lib/diff";
import { named } from "../lib/names";
import { generation, source, withTokens } from "../lib/requests";
import { steerOps } from "../lib/steering";
import { numbers, randomLike, tensorOf } from "../lib/tensors";
import { percent, typed } from "../lib/text";
import { call, client } from "../lib/snippets";
import { trace } from "../lib/traces";
import { FieldError } from "../lib/where";
import { useKept, usePage, useRun, useSettled } from "../state/hooks";
import { MEASURES } from "../state/page";
import { Chart } from "../ui/chart";
import { Choice, CopyBar, NumberField, TextField, ViewRun } from "../ui/parts";

const MAX_STEPS = 15;
const READ = "measure";

const MEASURE_NAMES: Record<(typeof MEASURES)[number], string> = {
  projection: "projection",
  target: "log-probability",
  perplexity: "perplexity",
};

interface Swept {
  ids: number[];
  vector: string;
  /** What the chart's numbers are. */
  measured: string;
  strengths: number[];
  hasRandom: boolean;
  /** Of the baseline, of each strength, then of each strength of the random direction. */
  texts: string[];
  values: (number | null)[];
}

export function SweepView() {
  const { state, change, capabilities, vectors, detectors } = usePage();
  const [swept, setSwept] = useKept<Swept | null>("sweep", null);
  const run = useRun({ isThere: swept !== null, clear: () => setSwept(null) });
  const [active, setActive] = useState(0);
  const { sweep, steering } = state;
  const set = (part: Partial<typeof sweep>) => change({ sweep: { ...sweep, ...part } });
  const steer = steering[sweep.which];
  const vector = steer && named(steer.vector, vectors, capabilities.model);
  const last = vector?.layers.at(-1) ?? capabilities.sizes.num_layers - 1;

  const strengths = () => {
    const steps = Math.max(2, Math.min(MAX_STEPS, Math.round(sweep.steps)));
    const gap = (sweep.to - sweep.from) / (steps - 1);
    return Array.from({ length: steps }, (_, index) => Number((sweep.from + gap * index).toFixed(4)));
  };
  const reads = (): Operation[] => {
    if (sweep.measure === "projection") {
      const weights = { name: steer!.vector };
      return [
        { op: "probe", at: `layers.${last}.output`, weights, where: { phase: "generated" }, name: READ },
      ];
    }
    if (sweep.measure === "perplexity") return [];
    const targets: Json[] = [typed(sweep.target)];
    return [{ op: "logit_lens", layers: [-1], top_k: 0, targets, where: { positions: [-1] }, name: READ }];
  };
  /** Returns the request for a prompt that is repeated; the first is the baseline. */
  const request = (prompt: string | number[], random: TensorObject | null = null): ApiRequest => {
    const all = strengths();
    const varied = (strength: number, number: number, other?: TensorObject): Operation[] => {
      const changes = { scale: strength, ...(other && { vector: { ...other } }) };
      const operations = steerOps(state, detectors, new Map([[sweep.which, changes]]));
      return operations.map((op) => ({ ...op, prompts: [number] }));
    };
    if (!steer?.on || !steer.vector) {
      throw new FieldError("Add a vector under Steering first, and leave it on.");
    }
    const operations = [
      ...all.flatMap((strength, index) => varied(strength, index + 1)),
      ...(random ? all.flatMap((strength, index) => varied(strength, all.length + index + 1, random)) : []),
      ...reads(),
    ];
    const { body } = generation({ ...state, kind: "plain", prompt: "" }, capabilities, operations);
    const count = 1 + all.length * (random ? 2 : 1);
    return {
      path: "/v1/completions",
      body: { ...body, prompt: Array.from({ length: count }, () => prompt) },
    };
  };
  const start = () =>
    run.start(async (signal, count) => {
      const all = strengths();
      request(""); // says what is wrong with the fields before anything is asked
      const ids = (await tokenize(source(state), signal)).map((token) => token.id);
      // A random direction is for a vector that acts in one layer.
      const files = new Map<string, Promise<ArrayBuffer>>();
      const row = await rowAt(Number(steer!.row.trim() || steer!.layers), files, signal);
      const random = row && randomLike(row, state.sampling.seed);
      const lastRow = await rowAt(last, files, signal);
      const unit = sweep.measure === "projection" && lastRow ? Math.hypot(...numbers(lastRow)) : 1;
      const asked = request(ids, random);
      const length = (asked.body["prompt"] as Json[]).length;
      const texts = Array.from({ length }, () => "");
      const tokens: number[][] = texts.map(() => []);
      const values: number[][] = texts.map(() => []);
      const show = (means: (number | null)[]) =>
        setSwept({
          ids,
          vector: steer!.vector,
          measured: measured(),
          strengths: all,
          hasRandom: random !== null,
          texts: [...texts],
          values: means,
        });
      for await (const answer of stream(withTokens(asked), signal)) {
        for (const { index, text, token_ids, interventions } of answer.choices) {
          texts[index] += text ?? "";
          tokens[index]!.push(...(token_ids ?? []));
          values[index]!.push(...numbersOf(interventions));
          count(token_ids?.length ?? 0);
        }
        show(values.map((found) => mean(found.map((value) => value / unit))));
      }
      if (sweep.measure === "perplexity") show(await perplexities(ids, tokens, signal));
    });
  useSettled(JSON.stringify([sweep.measure, sweep.target]), () => run.hasRun && start());
  const measured = () =>
    ({
      projection: `mean projection after layer ${last}`,
      target: `log-probability of “${sweep.target}”`,
      perplexity: "perplexity",
    })[sweep.measure];
  const rowAt = async (layer: number, files: Map<string, Promise<ArrayBuffer>>, signal: AbortSignal) => {
    if (!vector?.layers.includes(layer)) return null;
    const url = `/v1/vectors/${vector.id}/content`;
    const key = `layers.${layer}.output`;
    const link: TensorLink = { url, format: "safetensors", key, dtype: "float32", shape: [vector.width] };
    return tensorOf(link, files, signal);
  };
  /** Returns how unlikely the model without steering finds each text. */
  const perplexities = async (ids: number[], texts: number[][], signal: AbortSignal) => {
    const prompt = texts.map((tokens) => [...ids, ...tokens]);
    const body = { model: capabilities.model, prompt, max_tokens: 1, prompt_logprobs: 0 };
    const { choices } = await post<Answer>({ path: "/v1/completions", body }, signal);
    return texts.map((tokens, index) => {
      const all = choices.find((choice) => choice.index === index)?.prompt_logprobs?.slice(ids.length) ?? [];
      const found = all.map((each, place) => each?.[String(tokens[place])]?.logprob ?? NaN);
      const average = mean(found.filter(Number.isFinite));
      return average === null ? null : Math.exp(-average);
    });
  };
  /** What is copied has the text as it was written, or a conversation's tokens. */
  const copied = () => {
    if (state.kind === "plain") return request(state.prompt);
    if (!swept) throw new FieldError("Run it once first: the request needs the conversation's tokens.");
    return request(swept.ids);
  };
  const block = () => {
    const varied = steerOps(state, detectors, new Map([[sweep.which, { scale: "strength" }]]));
    const reading = { over: { name: "strength", values: strengths() } };
    return trace(generation(state, capabilities, varied), capabilities, vectors, reading);
  };
  const shown = swept?.texts.slice(1, 1 + swept.strengths.length);
  // Many long texts cannot be compared at every token that comes: they are when all is written.
  const parts = useMemo(
    () => (run.isRunning ? null : shown?.map((text) => compared(swept!.texts[0]!, text).after)),
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
        <Choice
          label="Plot"
          value={sweep.measure}
          options={MEASURES.map((measure) => [measure, MEASURE_NAMES[measure]] as const)}
          onChange={(measure) => set({ measure })}
        />
        {sweep.measure === "target" && (
          <TextField
            label="Token"
            value={sweep.target}
            hint="one token, as shown, or its id as #7042"
            onChange={(target) => set({ target })}
          />
        )}
      </div>
      <ViewRun run={run} onRun={start} />
      {swept && (
        <>
          {!run.isRunning && <Plot swept={swept} active={active} onActive={setActive} />}
          <div class="multiples">
            <article class="multiple" aria-label="Baseline">
              <h3>Baseline</h3>
              <p class="text">{swept.texts[0]}</p>
            </article>
            {shown!.map((text, index) => (
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
          <p class="hint">
            All strengths run in one batch. Rounding depends on the batch, so even at temperature 0 a text can
            differ from the one in Compare.
          </p>
        </>
      )}
      {state.kind === "chat" && (
        <p class="hint">The conversation is rendered once; its tokens are sent as the prompts.</p>
      )}
      <CopyBar request={copied} trace={block} forms={() => ({ python: everyText(copied()) })} />
    </>
  );
}

function Plot(props: { swept: Swept; active: number; onActive: (index: number) => void }) {
  const { values, strengths, measured, vector, hasRandom } = props.swept;
  const count = strengths.length;
  return (
    <Chart
      label={`${measured} by strength`}
      series={[
        { name: vector, values: values.slice(1, 1 + count) },
        ...(hasRandom ? [{ name: "random direction, same norm", values: values.slice(1 + count) }] : []),
        { name: "baseline", values: strengths.map(() => values[0] ?? null) },
      ]}
      places={strengths.map(String)}
      x="strength"
      y={measured}
      active={props.active}
      onActive={props.onActive}
    />
  );
}

/** Returns the numbers that a piece of an answer has of the measure. */
function numbersOf(told: ChoiceInterventions | undefined): number[] {
  const result = told?.results[READ] as ProbeResult | LensResult | undefined;
  const found =
    result?.type === "probe"
      ? Object.values(result.points)[0]!
      : Object.values(result?.layers ?? {}).flatMap((rows) => rows.map((row) => row.targets[0]?.logprob));
  return found.filter((value) => value !== null && value !== undefined);
}

function mean(values: number[]): number | null {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

/** Returns the program that prints the text of each prompt. */
function everyText(request: ApiRequest): string {
  return `${client()}\n${call(request)}for choice in answer.choices:\n    print(choice.index, choice.text)\n`;
}
