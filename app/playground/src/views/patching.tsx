/** Where the clean prompt's values, patched into the corrupted one, recover the answer: causal tracing. */

import { useState } from "preact/hooks";

import { post, tokenize } from "../api/client";
import type { Answer, CaptureResult, LensResult, LensToken } from "../api/types";
import { tensorOf, type Tensor } from "../lib/tensors";
import { FieldError } from "../lib/where";
import { percent, plural, short, typed, visible } from "../lib/text";
import { LEAVES } from "../state/page";
import { useKept, usePage, useRun } from "../state/hooks";
import { Grid, type Place } from "../ui/grid";
import { Choice, CopyBar, Legend, ViewRun, TextField } from "../ui/parts";
import { cells, firstRequest, layersFor, programs, secondRequest, type Plan } from "./patching_requests";

const LEAF_NAMES = {
  output: "residual stream",
  "attn.output": "attention's output",
  "mlp.output": "MLP's output",
} as const;

interface Mapped {
  clean: string[];
  corrupted: string[];
  plan: Plan;
  cleanScore: number;
  corruptedScore: number;
  /** By layer of the plan, then by position of the plan; null where the model's number is none. */
  scores: (number | null)[][];
}

export function PatchingView() {
  const { state, change, capabilities } = usePage();
  const [mapped, setMapped] = useKept<Mapped | null>("patching", null);
  const run = useRun({ isThere: mapped !== null, clear: () => setMapped(null) });
  const [active, setActive] = useState<Place>({ row: 0, column: 0 });
  const { patching } = state;
  const set = (part: Partial<typeof patching>) => change({ patching: { ...patching, ...part } });
  const offered = LEAVES.filter((leaf) =>
    capabilities.points.some((point) => point.name === `layers.*.${leaf}`),
  );

  const start = () =>
    run.start(async (signal) => {
      const [clean, corrupted] = await Promise.all([
        tokenize(patching.clean, signal),
        tokenize(patching.corrupted, signal),
      ]);
      const positions = aligned(
        clean.map((token) => token.id),
        corrupted.map((token) => token.id),
      );
      const plan: Plan = {
        ...patching,
        model: capabilities.model,
        clean: clean.map((token) => token.id),
        corrupted: corrupted.map((token) => token.id),
        positions,
        layers: layersFor(capabilities.sizes.num_layers, positions.length),
        targets: [],
      };
      const answer = await post<Answer>(firstRequest(plan), signal);
      plan.targets = targetsOf(answer, 0).map((target) => target.id);
      const captured = answer.choices[0]!.interventions!.results["clean"] as CaptureResult;
      const files = new Map<string, Promise<ArrayBuffer>>();
      const values: Tensor[] = [];
      for (const layer of plan.layers) {
        values.push(await tensorOf(captured.points[`layers.${layer}.${plan.leaf}`]!, files, signal));
      }
      const patched = await post<Answer>(secondRequest(plan, values), signal);
      const all = cells(plan).map((_, index) => scoreOf(patched, index + 1));
      const [cleanScore, corruptedScore] = [scoreOf(answer, 0), scoreOf(patched, 0)];
      if (cleanScore === null || corruptedScore === null) {
        throw new FieldError("The log-probability of that token is not finite: nothing to compare.");
      }
      const across = plan.positions.length;
      setMapped({
        clean: clean.map((token) => token.text),
        corrupted: corrupted.map((token) => token.text),
        plan,
        cleanScore,
        corruptedScore,
        scores: plan.layers.map((_, row) => all.slice(row * across, (row + 1) * across)),
      });
      setActive({ row: 0, column: 0 });
    });
  return (
    <>
      <div class="fields wide">
        <TextField label="Clean prompt" value={patching.clean} onChange={(clean) => set({ clean })} />
        <TextField
          label="Corrupted prompt"
          value={patching.corrupted}
          onChange={(corrupted) => set({ corrupted })}
        />
      </div>
      <div class="fields">
        <TextField
          label="Target token"
          value={patching.answer}
          hint="one token, as shown, or its id as #7042"
          onChange={(answer) => set({ answer })}
        />
        <TextField
          label="Contrast token"
          value={patching.contrast}
          hint="optional"
          onChange={(contrast) => set({ contrast })}
        />
        <Choice
          label="Patch"
          value={patching.leaf}
          options={offered.map((leaf) => [leaf, LEAF_NAMES[leaf]] as const)}
          onChange={(leaf) => set({ leaf })}
        />
      </div>
      <ViewRun run={run} onRun={start} />
      {mapped && <EffectMap mapped={mapped} active={active} onActive={setActive} />}
      <CopyBar
        request={() => firstRequest(known(mapped))}
        forms={() => programs(known(mapped))}
        trace={() => programs(known(mapped)).trace}
      />
    </>
  );
}

function EffectMap(props: { mapped: Mapped; active: Place; onActive: (place: Place) => void }) {
  const { mapped, active } = props;
  const { plan } = mapped;
  const layers = [...plan.layers].reverse();
  const gap = mapped.cleanScore - mapped.corruptedScore;
  const scoreAt = (place: Place) => mapped.scores[plan.layers.length - 1 - place.row]?.[place.column];
  const recovered = (score: number) => (gap === 0 ? 0 : (score - mapped.corruptedScore) / gap);
  const columns = plan.positions.map((position) => {
    const [was, is] = [visible(mapped.corrupted[position]!), visible(mapped.clean[position]!)];
    return was === is ? is : `${is} / ${was}`;
  });
  const score = scoreAt(active);
  const said = (found: number | null) =>
    found === null ? "no finite number" : `${short(found)}, ${percent(recovered(found))} recovered`;
  const position = plan.positions[Math.min(active.column, plan.positions.length - 1)]!;
  const against = plan.contrast ? ` minus that of “${followed(plan.contrast)}”` : "";
  const measure = `Log-probability of “${followed(plan.answer)}”${against}`;
  return (
    <>
      <div class="aligned" role="group" aria-label="The prompts, token by token">
        <Aligned title="clean" tokens={mapped.clean} other={mapped.corrupted} />
        <Aligned title="corrupted" tokens={mapped.corrupted} other={mapped.clean} />
      </div>
      <p class="hint">
        {measure}: {short(mapped.cleanScore)} after the clean prompt, {short(mapped.corruptedScore)} after the
        corrupted one. {plural(plan.layers.length * plan.positions.length, "cell")}, one request; columns
        before the first difference are omitted: nothing changes there
        {plan.layers.length > 1 && plan.layers[1]! - plan.layers[0]! > 1
          ? `; every ${plan.layers[1]! - plan.layers[0]!}th layer`
          : ""}
        .
      </p>
      <Legend low="−100 %" high="100 % recovered" kind="two-sided" />
      <Grid
        label="Share of the clean answer that each patch recovers"
        axes={["layer", "token"]}
        rows={layers.map(String)}
        columns={columns}
        active={active}
        onActive={props.onActive}
        cell={(row, column) => {
          const found = scoreAt({ row, column });
          if (found === undefined) return undefined;
          if (found === null) {
            return {
              text: "?",
              heat: 0,
              label: `layer ${layers[row]}, ${columns[column]}: no finite number`,
            };
          }
          const share = recovered(found);
          return {
            text: String(Math.round(share * 100)),
            heat: Math.max(-1, Math.min(1, share)),
            label: `layer ${layers[row]}, ${columns[column]}: ${Math.round(share * 100)} % recovered`,
          };
        }}
      />
      <p class="status" aria-live="polite">
        {score !== undefined && `Layer ${layers[active.row]}, position ${position}: ${said(score)}.`}
      </p>
    </>
  );
}

function Aligned(props: { title: string; tokens: string[]; other: string[] }) {
  return (
    <p>
      <span class="copy-title">{props.title}</span>
      {props.tokens.map((token, index) =>
        token === props.other[index] ? (
          <span key={index} class="token">
            {visible(token)}
          </span>
        ) : (
          <mark key={index} class="token added">
            {visible(token)}
          </mark>
        ),
      )}
    </p>
  );
}

/** Returns the positions that can have an effect: from the first difference on. */
function aligned(clean: number[], corrupted: number[]): number[] {
  if (clean.length !== corrupted.length) {
    throw new FieldError(
      `Both prompts must have the same number of tokens: the clean one has ${clean.length}, ` +
        `the corrupted one ${corrupted.length}.`,
    );
  }
  const first = clean.findIndex((id, index) => id !== corrupted[index]);
  if (first < 0) throw new FieldError("The prompts are the same: nothing to patch.");
  return clean.map((_, index) => index).slice(first);
}

function targetsOf(answer: Answer, index: number): LensToken[] {
  const choice = answer.choices.find((each) => each.index === index)!;
  const lens = choice.interventions!.results["lens"] as LensResult;
  return Object.values(lens.layers)[0]![0]!.targets;
}

/** Returns the answer's log-probability, less the contrast's if there is one; null where one is not finite. */
function scoreOf(answer: Answer, index: number): number | null {
  const [wanted, against] = targetsOf(answer, index).map((target) => target.logprob);
  if (wanted === undefined || wanted === null || against === null) return null;
  return wanted - (against ?? 0);
}

/** Returns how a token that was typed is shown. */
function followed(text: string): string {
  const token = typed(text);
  return typeof token === "number" ? `#${token}` : visible(token);
}

function known(mapped: Mapped | null): Plan {
  if (!mapped) throw new FieldError("Run it once first: the request needs the prompts' tokens.");
  return mapped.plan;
}
