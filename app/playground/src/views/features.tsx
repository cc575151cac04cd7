/** Which features of a dictionary are active at each token of the text. */

import { useState } from "preact/hooks";

import { stream, tokenize } from "../api/client";
import type { ActiveFeature, Answer, Feature, Operation } from "../api/types";
import { called } from "../lib/features";
import { named, namesOf } from "../lib/names";
import { generation, source, tokensIn, withTokens } from "../lib/requests";
import { sliderOf, steerOps } from "../lib/steering";
import { short, visible } from "../lib/text";
import { trace } from "../lib/traces";
import { FieldError } from "../lib/where";
import { usePage, useRun, useSettled } from "../state/hooks";
import { FeatureButtons, FeatureSearch } from "../ui/feature_search";
import { Check, Choice, CopyBar, Guide, Legend, NumberField, RunBar } from "../ui/parts";
import { Tokens } from "../ui/tokens";

const CHOSEN = "chosen";
const TOP = "top";

interface Read {
  /** The feature that was asked for, which the fields may have left since. */
  feature: Feature | null;
  tokens: string[];
  /** By position. */
  chosen: Map<number, number | null>;
  top: Map<number, ActiveFeature[]>;
}

export function FeaturesView() {
  const { state, change, capabilities, vectors, detectors, dictionaries } = usePage();
  const run = useRun();
  const [read, setRead] = useState<Read | null>(null);
  const [active, setActive] = useState(0);
  const [said, setSaid] = useState("");
  const { features } = state;
  const set = (part: Partial<typeof features>) => change({ features: { ...features, ...part } });
  const name = features.dictionary || (dictionaries[0]?.name ?? "");
  const dictionary = named(name, dictionaries);
  const feature = features.feature < 0 ? null : { id: features.feature, label: features.label || null };

  const request = () => {
    if (!name) throw new FieldError("The server has no dictionaries: upload one first.");
    const operations = features.steered ? steerOps(state, detectors) : [];
    const reading: Operation = { op: "features", dictionary: name };
    if (feature) operations.push({ ...reading, features: [feature.id], name: CHOSEN });
    operations.push({ ...reading, top_k: features.topK, name: TOP });
    return generation(state, capabilities, operations);
  };
  const start = () =>
    run.start(async (signal) => {
      const asked = withTokens(request());
      const tokens = (await tokenize(source(state), signal)).map((token) => token.text);
      let found: Read = { feature, tokens, chosen: new Map(), top: new Map() };
      for await (const answer of stream(asked, signal)) {
        found = extended(found, answer, await tokensIn(answer, signal));
        setRead(found);
      }
    });
  const steering = features.steered && [state.steering, state.sliders];
  const { label: _, ...asked } = features;
  useSettled(JSON.stringify([asked, steering]), () => read && start());

  const actions = {
    chosen: features.feature,
    onColour: ({ id, label }: Feature) => set({ dictionary: name, feature: id, label: label ?? "" }),
    onSlider: (taken: Feature, activation?: number) => {
      if (state.sliders.some((each) => each.dictionary === name && each.feature === taken.id)) {
        return setSaid(`${called(taken)} has a slider under Steering already.`);
      }
      const slider = sliderOf(name, taken.id, taken.label ?? "", activation);
      change({ sliders: [...state.sliders, slider] });
      setSaid(`${called(taken)} is under Steering. The view Compare shows the answers with it and without.`);
    },
  };
  if (!dictionaries.length) {
    return (
      <p class="hint">
        The server has no dictionaries of this model yet: <code>POST /v1/dictionaries</code> stores a sparse
        autoencoder or a transcoder with labels of its features. <Guide tag="dictionaries" />
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
          label="Features of a token"
          value={features.topK}
          min={1}
          max={100}
          step={1}
          onChange={(topK) => set({ topK })}
        />
        <Check label="With the steering" value={features.steered} onChange={(steered) => set({ steered })} />
      </div>
      {dictionary?.warnings.map((warning) => (
        <p class="hint" role="note">
          {warning}
        </p>
      ))}
      {dictionary && <FeatureSearch dictionary={dictionary} {...actions} />}
      <RunBar run={run} label="Read the features" onRun={start}>
        <span class="status" role="status">
          {said}
        </span>
      </RunBar>
      {read && read.top.size > 0 && (
        <div class="beside">
          <Coloured read={read} active={active} onActive={setActive} />
          <div class="details" role="group" aria-label="The token" aria-live="polite">
            <h3>
              “{visible(read.tokens[active] ?? "")}”, position {active}
            </h3>
            <Top features={read.top.get(active)} actions={actions} />
          </div>
        </div>
      )}
      <CopyBar request={request} trace={() => trace(request(), capabilities, vectors)} />
    </>
  );
}

function Coloured(props: { read: Read; active: number; onActive: (position: number) => void }) {
  const { tokens, feature, chosen } = props.read;
  const most = largest(chosen);
  const title = feature ? `Activation of ${called(feature)}` : "Tokens";
  const label = (position: number) => {
    const place = `${visible(tokens[position]!)}, position ${position}`;
    const value = chosen.get(position);
    return value === undefined ? place : `${place}: ${told(value)}`;
  };
  return (
    <section class="measure" aria-label={title}>
      <h3>{title}</h3>
      <Tokens
        label={title}
        class="heated"
        count={tokens.length}
        look={(position) => ({
          title: label(position),
          label: label(position),
          class: "above",
          heat: most ? Math.min(1, (chosen.get(position) ?? 0) / most) : 0,
          content: tokens[position],
        })}
        active={props.active}
        onActive={props.onActive}
      />
      {feature && <Legend low="0" high={short(most)} />}
      <p class="status">
        {feature && !most && chosen.size ? "It is active at no token." : label(props.active)}
      </p>
      <p class="hint">
        {feature ? "" : "“Colour” shows where a feature is active. "}A click or the arrow keys choose a token,
        whose features are listed.
      </p>
    </section>
  );
}

function Top(props: {
  features: ActiveFeature[] | undefined;
  actions: Omit<Parameters<typeof FeatureButtons>[0], "feature" | "activation">;
}) {
  const { features, actions } = props;
  if (!features) return <p class="hint">Of the last token nothing is computed.</p>;
  if (!features.length) return <p class="hint">No feature is active here.</p>;
  const most = features[0]!.activation ?? 1;
  return (
    <ol class="found">
      {features.map((feature) => (
        <li key={feature.id}>
          <FeatureButtons feature={feature} activation={feature.activation ?? 0} {...actions} />
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

/** Returns the largest activation: of all tokens but the first, where models keep large numbers, if one is active. */
function largest(chosen: Map<number, number | null>): number {
  const others = [...chosen].filter(([position]) => position > 0).map(([, value]) => Number(value));
  return Math.max(0, ...others) || Number(chosen.get(0) ?? 0);
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
