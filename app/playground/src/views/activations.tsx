/** The norm of the residual stream at each token, and its dot product with a vector. */

import { useState } from "preact/hooks";

import { stream, tokenize } from "../api/client";
import type { Answer, CaptureResult, Operation, ProbeResult, Vector } from "../api/types";
import { named, namesOf } from "../lib/names";
import { generation, source, tokensIn, withTokens } from "../lib/requests";
import { steerOps } from "../lib/steering";
import { numbers, tensorOf } from "../lib/tensors";
import { lastReadable, short, visible } from "../lib/text";
import { trace, variable, type Reading } from "../lib/traces";
import { useKept, usePage, useRun, useSettled } from "../state/hooks";
import { Chart } from "../ui/chart";
import { Check, Choice, CopyBar, Legend, ViewRun, Slider } from "../ui/parts";

const RESIDUAL = "residual";
const PROBE = "probe";

interface Measured {
  /** What was asked, which the fields may have left since. */
  layer: number;
  vector: string;
  tokens: string[];
  /** The position that is shown first. */
  opening: number;
  /** By position. */
  norms: Map<number, number>;
  probed: Map<number, number>;
}

export function ActivationsView() {
  const { state, change, capabilities, vectors, detectors } = usePage();
  const [measured, setMeasured] = useKept<Measured | null>("activations", null);
  const run = useRun({ isThere: measured !== null, clear: () => (setMeasured(null), setActive(null)) });
  const [pointed, setActive] = useState<number | null>(null);
  const active = pointed ?? measured?.opening ?? 0;
  const { activations } = state;
  const set = (part: Partial<typeof activations>) => change({ activations: { ...activations, ...part } });
  const last = capabilities.sizes.num_layers - 1;
  const layer = activations.layer < 0 ? Math.floor(last / 2) : Math.min(last, activations.layer);
  const vector = named(activations.vector, vectors, capabilities.model);
  const bias = vector?.training?.layers.find((score) => score.layer === layer)?.bias ?? 0;

  const request = () => {
    const point = `layers.${layer}.output`;
    const operations: Operation[] = activations.steered ? steerOps(state, detectors) : [];
    operations.push({ op: "capture", at: point, dtype: "float32", name: RESIDUAL });
    if (activations.vector) {
      operations.push({ op: "probe", at: point, weights: { name: activations.vector }, bias, name: PROBE });
    }
    return generation(state, capabilities, operations);
  };
  const start = () =>
    run.start(async (signal, count) => {
      const asked = withTokens(request());
      const prompt = await tokenize(source(state), signal);
      let found: Measured = {
        layer,
        vector: activations.vector,
        tokens: prompt.map((token) => token.text),
        opening: lastReadable(prompt.map((token) => token.text)),
        norms: new Map(),
        probed: new Map(),
      };
      for await (const answer of stream(asked, signal)) {
        count(answer.choices[0]?.token_ids?.length ?? 0);
        found = await extended(found, answer, signal);
        setMeasured(found);
      }
    });
  useSettled(JSON.stringify(activations), () => run.hasRun && start());

  return (
    <>
      <div class="fields">
        <Slider
          label="Layer"
          value={layer}
          min={0}
          max={last}
          step={1}
          onChange={(layer) => set({ layer: Math.round(layer) })}
        />
        <Choice
          label="Probe with"
          value={activations.vector}
          options={[
            ["", "no vector"] as const,
            ...namesOf(vectors, activations.vector).filter(([name]) => name),
          ]}
          onChange={(vector) => set({ vector })}
        />
        <Check label="With steering" value={activations.steered} onChange={(steered) => set({ steered })} />
      </div>
      <ViewRun run={run} onRun={start} />
      {measured && measured.norms.size > 0 && (
        <>
          <Measure
            title={`Norm after layer ${measured.layer}`}
            unit="L2 norm"
            tokens={measured.tokens}
            values={measured.norms}
            active={active}
            onActive={setActive}
          />
          {measured.probed.size > 0 && (
            <Measure
              title={`Probe along ${measured.vector} after layer ${measured.layer}`}
              unit="dot product + bias"
              tokens={measured.tokens}
              values={measured.probed}
              active={active}
              onActive={setActive}
              isTwoSided
            />
          )}
          <p class="hint">
            Colours and curves leave out the first token: its state is many times longer than the others.
          </p>
        </>
      )}
      <CopyBar
        request={request}
        trace={() => {
          if (!activations.vector) return trace(request(), capabilities, vectors, reading(layer));
          if (!vector) return { missing: "The vector is no longer on this server." };
          const probed = reading(layer, { vector, name: variable(vector, vectors), bias });
          return trace(request(), capabilities, vectors, probed);
        }}
      />
    </>
  );
}

function Measure(props: {
  title: string;
  unit: string;
  tokens: string[];
  values: Map<number, number>;
  active: number;
  onActive: (index: number) => void;
  isTwoSided?: boolean;
}) {
  const { tokens, values, active } = props;
  const counted = [...values].filter(([position]) => position > 0).map(([, value]) => value);
  const size = Math.max(...counted.map(Math.abs), 1e-9);
  const domain = domainOf(counted);
  const heat = (value: number) => Math.max(-1, Math.min(1, value / size));
  // A position that has no number is left out here, and the others keep theirs.
  const shown = tokens.flatMap((token, position) => {
    const value = values.get(position);
    return value === undefined ? [] : [{ token, position, value }];
  });
  const here = shown.findIndex((each) => each.position === active);
  return (
    <section class="measure" aria-label={props.title}>
      <h3>{props.title}</h3>
      <p class="heated">
        {shown.map(({ token, position, value }) => {
          const strength = heat(value);
          const side = strength < 0 ? "below" : "above";
          return (
            <span
              key={position}
              class={`${side} ${position === active ? "here" : ""}`}
              style={{ "--heat": String(Math.round(Math.abs(strength) * 100)) }}
              title={`${visible(token)}: ${short(value)}`}
              onMouseOver={() => props.onActive(position)}
            >
              {token}
            </span>
          );
        })}
      </p>
      <Legend
        low={props.isTwoSided ? short(-size) : "0"}
        high={short(size)}
        kind={props.isTwoSided ? "two-sided" : undefined}
      />
      <Chart
        label={`${props.title}, token by token`}
        series={[{ name: props.title, values: shown.map(({ value }) => drawn(value, domain)) }]}
        places={shown.map(({ token }) => visible(token))}
        x="token"
        y={props.unit}
        domain={domain}
        active={here}
        onActive={(index) => props.onActive(shown[index]!.position)}
      />
      <p class="status">
        {here < 0 ? "" : `${visible(tokens[active]!)}, position ${active}: ${short(values.get(active)!)}`}
      </p>
      {/* A table alone would be as tall as its rows, and the page with it. */}
      <div class="hidden">
        <table>
          <caption>{props.title}</caption>
          <tbody>
            {shown.map(({ token, position, value }) => (
              <tr key={position}>
                <th scope="row">{visible(token)}</th>
                <td>{short(value)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

/** Returns the axis of a chart: from zero over all tokens but the first, if there are others. */
function domainOf(counted: number[]): [number, number] | undefined {
  if (!counted.length) return undefined;
  return [Math.min(0, ...counted), Math.max(0, ...counted)];
}

function drawn(value: number, domain: [number, number] | undefined): number | null {
  return domain && (value < domain[0] || value > domain[1]) ? null : value;
}

async function extended(found: Measured, answer: Answer, signal: AbortSignal): Promise<Measured> {
  const results = answer.choices[0]?.interventions?.results ?? {};
  const norms = new Map(found.norms);
  const probed = new Map(found.probed);
  const captured = results[RESIDUAL] as CaptureResult | undefined;
  if (captured) {
    const [reference] = Object.values(captured.points);
    const values = numbers(await tensorOf(reference!, new Map(), signal));
    const width = values.length / captured.positions.length;
    captured.positions.forEach((position, row) => {
      norms.set(position, Math.hypot(...values.subarray(row * width, (row + 1) * width)));
    });
  }
  const probe = results[PROBE] as ProbeResult | undefined;
  probe?.positions.forEach((position, index) => {
    const value = Object.values(probe.points)[0]![index];
    if (value !== null && value !== undefined) probed.set(position, value);
  });
  const tokens = await tokensIn(answer, signal);
  return { ...found, tokens: [...found.tokens, ...tokens], norms, probed };
}

/** Returns what reads the norms, and the numbers along a vector that a variable has. */
function reading(layer: number, probe?: { vector: Vector; name: string; bias: number }): Reading {
  const along = probe && `${probe.name}["layers.${layer}.output"].to(value.device)`;
  return {
    before: ["norms, probed = save([]), save([])"],
    layers: [layer],
    each: [
      "value = hidden.float()",
      "norms.extend(value.norm(dim=-1).tolist())",
      ...(probe ? [`probed.extend((value @ ${along} + ${probe.bias}).tolist())`] : []),
    ],
    after: ["print(norms)", ...(probe ? ["print(probed)"] : [])],
    vectors: probe ? [probe.vector] : [],
  };
}
