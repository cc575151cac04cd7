/** Which features of a dictionary are active at each token of the text. */

import { useState } from "preact/hooks";

import { stream, tokenize } from "../api/client";
import type { ActiveFeature, Answer, Feature, Operation } from "../api/types";
import { called } from "../lib/features";
import { named, namesOf } from "../lib/names";
import { generation, source, tokensIn, withTokens } from "../lib/requests";
import { sliderOf, steerOps } from "../lib/steering";
import { lastReadable, short, visible } from "../lib/text";
import { trace } from "../lib/traces";
import { FieldError } from "../lib/where";
import { useKept, usePage, useRun, useSettled } from "../state/hooks";
import { FeatureDetails } from "../ui/feature_details";
import { FeatureName, FeatureSearch } from "../ui/feature_search";
import { Figure } from "../ui/figure";
import { Check, Choice, CopyBar, Guide, Legend, NumberField, ViewRun } from "../ui/parts";
import { Tokens } from "../ui/tokens";

const CHOSEN = "chosen";
const TOP = "top";

interface Read {
  /** The feature that was asked for, which the fields may have left since. */
  feature: Feature | null;
  tokens: string[];
  /** The position that is shown first. */
  opening: number;
  /** By position. */
  chosen: Map<number, number | null>;
  top: Map<number, ActiveFeature[]>;
}

export function FeaturesView() {
  const { state, change, capabilities, vectors, detectors, dictionaries } = usePage();
  const [read, setRead] = useKept<Read | null>("features", null);
  const run = useRun({ isThere: read !== null, clear: () => (setRead(null), setActive(null)) });
  const [pointed, setActive] = useState<number | null>(null);
  const active = pointed ?? read?.opening ?? 0;
  const [said, setSaid] = useState("");
  const { features } = state;
  const set = (part: Partial<typeof features>) => change({ features: { ...features, ...part } });
  const name = features.dictionary || (dictionaries[0]?.name ?? "");
  const dictionary = named(name, dictionaries);
  const feature = features.feature < 0 ? null : { id: features.feature, label: features.label || null };

  const request = () => {
    if (!name) throw new FieldError("The server has no dictionaries: upload one first.");
    const operations = features.steered ? steerOps(state, detectors) : [];
    const where = { exclude: { positions: [0] } };
    const reading: Operation = { op: "features", dictionary: name, where };
    if (feature) operations.push({ ...reading, features: [feature.id], name: CHOSEN });
    operations.push({ ...reading, top_k: features.topK, name: TOP });
    return generation(state, capabilities, operations);
  };
  const start = () =>
    run.start(async (signal, count) => {
      const asked = withTokens(request());
      const tokens = (await tokenize(source(state), signal)).map((token) => token.text);
      let found: Read = { feature, tokens, opening: lastReadable(tokens), chosen: new Map(), top: new Map() };
      for await (const answer of stream(asked, signal)) {
        const more = await tokensIn(answer, signal);
        count(more.length);
        found = extended(found, answer, more);
        setRead(found);
      }
    });
  const steering = features.steered && [state.steering, state.sliders];
  const { label: _, ...asked } = features;
  useSettled(JSON.stringify([asked, steering]), () => run.hasRun && start());

  const shown = feature ?? (read && strongest(read));
  const values = read && shown ? valuesOf(read, shown) : new Map<number, number | null>();
  const most = Math.max(0, ...[...values.values()].map(Number));
  const actions = {
    chosen: shown?.id ?? -1,
    onChoose: ({ id, label }: Feature) => set({ dictionary: name, feature: id, label: label ?? "" }),
  };
  const steer = (taken: Feature) => {
    if (state.sliders.some((each) => each.dictionary === name && each.feature === taken.id)) {
      return setSaid(`${called(taken)} already has a slider under Steering.`);
    }
    change({ sliders: [...state.sliders, sliderOf(name, taken.id, taken.label ?? "", most)] });
    setSaid(`${called(taken)} is under Steering. Compare shows the text with and without it.`);
  };
  if (!dictionaries.length) {
    return (
      <p class="hint">
        This server has no dictionaries for this model yet. <code>POST /v1/dictionaries</code> stores a sparse
        autoencoder or a transcoder, with labels of its features. <Guide tag="dictionaries" />
      </p>
    );
  }
  return (
    <>
      <div class="fields">
        <Choice
          label="Dictionary"
          value={name}
          options={namesOf(dictionaries, name)}
          onChange={(chosen) => set({ dictionary: chosen, feature: -1, label: "" })}
        />
        <NumberField
          label="Features per token"
          value={features.topK}
          min={1}
          max={100}
          step={1}
          onChange={(topK) => set({ topK })}
        />
        <Check label="With steering" value={features.steered} onChange={(steered) => set({ steered })} />
      </div>
      {dictionary?.warnings.map((warning) => (
        <p class="hint" role="note">
          {warning}
        </p>
      ))}
      {dictionary && <FeatureSearch dictionary={dictionary} {...actions} />}
      <ViewRun run={run} onRun={start}>
        <span class="status" role="status">
          {said}
        </span>
      </ViewRun>
      {read && read.top.size > 0 && (
        <div class="beside">
          <div class="measure">
            <Coloured
              tokens={read.tokens}
              feature={shown}
              values={values}
              most={most}
              active={active}
              onActive={setActive}
            />
            {dictionary && shown && (
              <FeatureDetails dictionary={dictionary} feature={shown} onSteer={() => steer(shown)} />
            )}
          </div>
          <div class="details" role="group" aria-label="The token" aria-live="polite">
            <h3>
              “{visible(read.tokens[active] ?? "")}”, position {active}
            </h3>
            <Top isFirst={active === 0} features={read.top.get(active)} actions={actions} />
          </div>
        </div>
      )}
      <CopyBar request={request} trace={() => trace(request(), capabilities, vectors)} />
    </>
  );
}

function Coloured(props: {
  tokens: string[];
  feature: Feature | null;
  values: Map<number, number | null>;
  most: number;
  active: number;
  onActive: (position: number) => void;
}) {
  const { tokens, feature, values, most } = props;
  const title = feature ? `Activation of ${called(feature)}` : "Tokens";
  const label = (position: number) => {
    const place = `${visible(tokens[position]!)}, position ${position}`;
    const value = values.get(position);
    return value === undefined ? place : `${place}: ${told(value)}`;
  };
  return (
    <section class="measure" aria-label={title}>
      <h3>{title}</h3>
      <Figure
        label={title}
        rows={() => [
          ["position", "token", "activation"],
          ...tokens.map((token, position) => [position, token, values.get(position) ?? null]),
        ]}
      >
        <Tokens
          label={title}
          class="heated"
          count={tokens.length}
          look={(position) => ({
            title: label(position),
            label: label(position),
            class: "above",
            heat: most ? Math.min(1, (values.get(position) ?? 0) / most) : 0,
            content: tokens[position],
          })}
          active={props.active}
          onActive={props.onActive}
        />
        {feature && <Legend low="0" high={short(most)} />}
      </Figure>
      <p class="status">
        {feature && !most && values.size ? "It is active at no token." : label(props.active)}
      </p>
      <p class="hint">Click a token, or use the arrow keys, to list its features.</p>
    </section>
  );
}

function Top(props: {
  isFirst: boolean;
  features: ActiveFeature[] | undefined;
  actions: Omit<Parameters<typeof FeatureName>[0], "feature">;
}) {
  const { features, actions } = props;
  if (props.isFirst) return <p class="hint">Position 0 is skipped: its state is an attention sink.</p>;
  if (!features) return <p class="hint">The last token is not computed.</p>;
  if (!features.length) return <p class="hint">No feature is active here.</p>;
  const most = features[0]!.activation ?? 1;
  return (
    <ol class="found">
      {features.map((feature) => (
        <li key={feature.id}>
          <FeatureName feature={feature} {...actions} />
          <meter
            min={0}
            max={most}
            value={feature.activation ?? 0}
            aria-label={`activation of ${called(feature)}`}
          />
          <span class="value">{told(feature.activation)}</span>
        </li>
      ))}
    </ol>
  );
}

/** Returns the most active feature with a label: of the token that is shown first, or of all. */
function strongest({ top, opening }: Read): Feature | null {
  const labelled = [...(top.get(opening) ?? []), ...[...top.values()].flat()].filter((each) => each.label);
  return labelled[0] ?? null;
}

/** Returns a feature's activations: those that were asked for, or where it is among the most active. */
function valuesOf(read: Read, feature: Feature): Map<number, number | null> {
  if (read.feature?.id === feature.id) return read.chosen;
  const found = [...read.top].map(([position, all]) => {
    return [position, all.find(({ id }) => id === feature.id)?.activation ?? 0] as const;
  });
  return new Map(found);
}

function told(activation: number | null): string {
  return activation === null ? "not a finite number" : short(activation);
}

function extended(read: Read, answer: Answer, tokens: string[]): Read {
  const results = answer.choices[0]?.interventions?.results ?? {};
  const chosen = new Map(read.chosen);
  const top = new Map(read.top);
  const [one, all] = [results[CHOSEN], results[TOP]];
  if (one?.type === "features") {
    one.positions.forEach((position, index) => chosen.set(position, one.features[index]![0]!.activation));
  }
  if (all?.type === "features") {
    all.positions.forEach((position, index) => top.set(position, all.features[index]!));
  }
  return { ...read, tokens: [...read.tokens, ...tokens], chosen, top };
}
