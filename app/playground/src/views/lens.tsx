/** What each layer predicts after each token: layers down, tokens across, as they stream. */

import { useState } from "preact/hooks";

import { post, stream, tokenize } from "../api/client";
import type { Answer, ApiRequest, LensResult, LensRow, LensToken, Operation } from "../api/types";
import { generation, source, tokensIn, withTokens } from "../lib/requests";
import { steerOps } from "../lib/steering";
import { percent, probability, visible } from "../lib/text";
import { trace, type Reading } from "../lib/traces";
import { useKept, usePage, useRun } from "../state/hooks";
import { Chart } from "../ui/chart";
import { Grid, clamped, type Place } from "../ui/grid";
import { Check, CopyBar, Failure, Legend, NumberField, ViewRun } from "../ui/parts";

const NAME = "lens";
const START: Place = { row: 0, column: 0 };

interface Read {
  /** What was asked, which the fields may have left since. */
  request: ApiRequest;
  layers: number[];
  tokens: string[];
  /** By position, then by layer. */
  rows: Map<number, Map<number, LensRow>>;
  text: string;
}

interface Followed {
  token: LensToken;
  position: number;
  ranks: (number | null)[];
  chances: number[];
}

export function LensView() {
  const { state, change, capabilities, vectors, detectors } = usePage();
  const following = useRun();
  const [read, setRead] = useKept<Read | null>("lens", null);
  const [active, setActive] = useState(START);
  const [chosen, setChosen] = useState<Place | null>(null);
  const [followed, setFollowed] = useState<Followed | null>(null);
  const clear = () => {
    setRead(null);
    setFollowed(null);
    setChosen(null);
  };
  const run = useRun({ isThere: read !== null, clear });
  const { lens } = state;
  const set = (part: Partial<typeof lens>) => change({ lens: { ...lens, ...part } });

  const layers = layersOf(capabilities.sizes.num_layers, lens.every);
  const request = () => {
    const steers = lens.steered ? steerOps(state, detectors) : [];
    const operation: Operation = { op: "logit_lens", layers, top_k: lens.topK, name: NAME };
    return generation(state, capabilities, [...steers, operation]);
  };
  const start = () => {
    following.cancel();
    run.start(async (signal, count) => {
      const asked = request();
      const prompt = (await tokenize(source(state), signal)).map((token) => token.text);
      let found: Read = { request: asked, layers, tokens: prompt, rows: new Map(), text: "" };
      setActive({ row: 0, column: prompt.length - 1 });
      for await (const answer of stream(withTokens(asked), signal)) {
        const tokens = await tokensIn(answer, signal);
        count(tokens.length);
        found = extended(found, answer, tokens);
        setRead(found);
      }
    });
  };
  /** Asks how likely one token is at every layer of one position: the same request, with it as the target. */
  const follow = (place: Place) => {
    const token = read && rowAt(read, place)?.top[0];
    if (!token) return;
    setChosen(place);
    following.start(async (signal) => {
      const answer = await post<Answer>(asking(read.request, token.id, place.column), signal);
      const result = answer.choices[0]!.interventions!.results[NAME] as LensResult;
      const targets = read.layers.map((layer) => result.layers[String(layer)]?.[0]?.targets[0]);
      setFollowed({
        token,
        position: place.column,
        ranks: targets.map((target) => target?.rank ?? null),
        chances: targets.map((target) => probability(target?.logprob)),
      });
    });
  };

  const shownLayers = [...(read?.layers ?? [])].reverse();
  const columns = read?.tokens.filter((_, position) => read.rows.has(position)) ?? [];
  const toLayers = (place: Place): Place => ({
    row: shownLayers.length - 1 - place.row,
    column: place.column,
  });
  const cell = (row: number, position: number) => {
    const top = read && rowAt(read, toLayers({ row, column: position }))?.top[0];
    if (!top) return undefined;
    const chance = probability(top.logprob);
    return {
      text: visible(top.token),
      heat: chance,
      label: `layer ${shownLayers[row]}, after ${visible(read.tokens[position] ?? "")}: ${visible(top.token)}, ${percent(chance)}`,
    };
  };
  const here = clamped(active, shownLayers.length, columns.length);
  return (
    <>
      <div class="fields">
        <NumberField
          label="Every nth layer"
          value={lens.every}
          min={1}
          step={1}
          onChange={(every) => set({ every })}
        />
        <NumberField
          label="Top k"
          value={lens.topK}
          min={1}
          max={100}
          step={1}
          onChange={(topK) => set({ topK })}
        />
        <Check label="With steering" value={lens.steered} onChange={(steered) => set({ steered })} />
      </div>
      <ViewRun run={run} onRun={start} />
      {read && columns.length > 0 && (
        <>
          <section aria-label="Answer">
            <p class="text answer">{read.text}</p>
          </section>
          <Legend low="0 %" high="100 % likely" />
          <div class="beside">
            <Grid
              label="Logit lens: what each layer predicts after each token"
              axes={["layer", "token"]}
              rows={shownLayers.map(String)}
              columns={columns.map(visible)}
              cell={cell}
              active={here}
              chosen={chosen && toLayers(chosen)}
              onActive={setActive}
              onChoose={(place) => follow(toLayers(place))}
            />
            <div class="details" role="group" aria-label="The cell" aria-live="polite">
              <h3>
                Layer {shownLayers[here.row]}, after “{visible(read.tokens[here.column] ?? "")}”
              </h3>
              <Top row={rowAt(read, toLayers(here))} />
              <p class="hint">Arrow keys move; Enter or a click plots the top token across layers.</p>
            </div>
          </div>
          <Failure run={following} onRetry={() => chosen && follow(chosen)} />
          {followed && (
            <section aria-label="The chosen token across layers">
              <h3>
                “{visible(followed.token.token)}” after “{visible(read.tokens[followed.position] ?? "")}”, by
                layer
              </h3>
              <Chart
                label={`Rank of ${visible(followed.token.token)} at each layer; 1 is the most likely`}
                series={[{ name: "rank", values: followed.ranks }]}
                places={read.layers.map(String)}
                x="layer"
                y="rank (1 is the most likely)"
                log
                isFlipped
              />
              <Chart
                label={`Probability of ${visible(followed.token.token)} at each layer`}
                series={[{ name: "probability", values: followed.chances }]}
                places={read.layers.map(String)}
                x="layer"
                y="probability"
                domain={[0, 1]}
              />
            </section>
          )}
        </>
      )}
      <CopyBar
        request={request}
        trace={() => trace(request(), capabilities, vectors, reading(layers, lens.topK))}
      />
    </>
  );
}

function Top(props: { row: LensRow | undefined }) {
  if (!props.row) return <p class="hint">Nothing yet.</p>;
  return (
    <ol class="top">
      {props.row.top.map((token) => {
        const chance = probability(token.logprob);
        return (
          <li key={token.id}>
            <span class="token">{visible(token.token)}</span>
            <meter min={0} max={1} value={chance} aria-label={`probability of ${visible(token.token)}`} />
            <span class="value">{percent(chance)}</span>
          </li>
        );
      })}
    </ol>
  );
}

function extended(read: Read, answer: Answer, tokens: string[]): Read {
  const result = answer.choices[0]?.interventions?.results[NAME] as LensResult | undefined;
  const rows = new Map(read.rows);
  result?.positions.forEach((position, index) => {
    const layers = Object.entries(result.layers).map(([layer, all]) => [Number(layer), all[index]!] as const);
    rows.set(position, new Map(layers));
  });
  const choice = answer.choices[0];
  const text = choice?.text ?? choice?.delta?.content ?? "";
  return { ...read, tokens: [...read.tokens, ...tokens], rows, text: read.text + text };
}

function rowAt(read: Read, place: Place): LensRow | undefined {
  return read.rows.get(place.column)?.get(read.layers[place.row]!);
}

/** Returns a request for the lens as one for how likely a token is at one position. */
function asking(request: ApiRequest, token: number, position: number): ApiRequest {
  const change = { top_k: 0, targets: [token], where: { positions: [position] } };
  const operations = (request.body["interventions"] as Operation[]).map((operation) =>
    operation.op === "logit_lens" ? { ...operation, ...change } : operation,
  );
  return { path: request.path, body: { ...request.body, interventions: operations } };
}

function layersOf(count: number, every: number): number[] {
  const step = Math.max(1, Math.round(every));
  const found = Array.from({ length: count }, (_, layer) => layer).filter(
    (layer) => (count - 1 - layer) % step === 0,
  );
  return found.length ? found : [count - 1];
}

function reading(layers: number[], topK: number): Reading {
  return {
    before: ["lens = save([])"],
    layers,
    each: [
      `if layer == ${layers[0]}:`,
      "    lens.append({})",
      "logprobs = model.lm_head(model.norm(hidden)).float().log_softmax(-1)",
      `values, ids = logprobs.topk(${topK})`,
      "lens[-1][layer] = [values, ids]",
    ],
    after: [
      "for step in lens:",
      "    for layer, (values, ids) in step.items():",
      "        print(layer, ids[-1].tolist(), values[-1].exp().tolist())",
    ],
  };
}
