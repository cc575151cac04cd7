/** What a feature is about: where it is most active, and the tokens that it makes more and less likely. */

import { useEffect, useState } from "preact/hooks";

import type { Dictionary, Feature } from "../api/types";
import bundled from "../data/example-topics.json?url";
import { called } from "../lib/features";
import { short, visible } from "../lib/text";

interface Described {
  /** Text before the token, the token, text after it, the activation. */
  examples: [string, string, string, number][];
  promotes: string[];
  suppresses: string[];
}

/** The descriptions that come with the page, of one dictionary. */
interface Descriptions {
  sha256: string;
  features: Record<string, Described>;
}

export function FeatureDetails(props: { dictionary: Dictionary; feature: Feature; onSteer: () => void }) {
  const { dictionary, feature } = props;
  const [known, setKnown] = useState<Descriptions | null>(null);
  useEffect(() => {
    if (dictionary.name !== "example-topics") return;
    void fetch(bundled)
      .then((answer) => answer.json())
      .then(setKnown, () => setKnown(null));
  }, [dictionary.name]);
  const described = known?.sha256 === dictionary.sha256 ? known.features[feature.id] : undefined;
  return (
    <section class="measure" aria-label={`Feature ${feature.id}`}>
      <h3>{called(feature)}</h3>
      <button type="button" class="steer-with" onClick={props.onSteer}>
        Steer with it
      </button>
      {described && (
        <>
          <ul class="examples" aria-label="Top examples">
            {described.examples.map(([before, token, after, activation], index) => (
              <li key={index}>
                <span class="value">{short(activation)}</span> …{before}
                <mark class="added">{token}</mark>
                {after}…
              </li>
            ))}
          </ul>
          <Effects title="Makes more likely" tokens={described.promotes} />
          <Effects title="Makes less likely" tokens={described.suppresses} />
        </>
      )}
    </section>
  );
}

function Effects(props: { title: string; tokens: string[] }) {
  return (
    <p class="effects">
      <span class="copy-title">{props.title}</span>
      {props.tokens.map((token) => (
        <span key={token} class="token">
          {visible(token)}
        </span>
      ))}
    </p>
  );
}
