/** A dictionary's features, found by words of their labels or by number. */

import { useEffect, useState } from "preact/hooks";

import type { Dictionary, Feature } from "../api/types";
import { called, featuresLike } from "../lib/features";
import { plural } from "../lib/text";
import { useRun, useSettled } from "../state/hooks";
import { Problem, TextField } from "./parts";

interface FeatureActions {
  /** The number of the feature that colours the text. */
  chosen: number;
  onColour: (feature: Feature) => void;
  onSlider: (feature: Feature, activation?: number) => void;
}

export function FeatureSearch(props: FeatureActions & { dictionary: Dictionary }) {
  const { dictionary } = props;
  const run = useRun();
  const [text, setText] = useState("");
  const [found, setFound] = useState<Feature[] | null>(null);
  const [hasMore, setHasMore] = useState(false);
  const search = () =>
    run.start(async (signal) => {
      const page = await featuresLike(dictionary, text, signal);
      setFound(page.data);
      setHasMore(page.has_more);
    });
  useEffect(search, [dictionary.id]);
  useSettled(text, search);
  return (
    <section class="measure" aria-label="Search">
      <TextField
        label="Find features"
        value={text}
        hint={`words of their labels, or a number below ${dictionary.num_features}; ${plural(dictionary.num_labels, "feature")} of them have labels`}
        onChange={setText}
      />
      <Problem text={run.error} />
      <p class="status" role="status">
        {found && !run.error ? `${plural(found.length, "feature")}${hasMore ? ", and more" : ""}` : ""}
      </p>
      {found && found.length > 0 && (
        <ul class="found">
          {found.map((feature) => (
            <li key={feature.id}>
              <FeatureButtons feature={feature} {...props} />
            </li>
          ))}
        </ul>
      )}
    </section>
  );
}

/** What a feature is called, and the buttons that colour the text by it and give it a slider. */
export function FeatureButtons(props: FeatureActions & { feature: Feature; activation?: number }) {
  const { feature, chosen } = props;
  const name = called(feature);
  return (
    <>
      <span class="name">{name}</span>
      <span class="buttons">
        <button
          type="button"
          aria-label={`Colour by ${name}`}
          aria-pressed={chosen === feature.id}
          onClick={() => props.onColour(feature)}
        >
          Colour
        </button>
        <button
          type="button"
          aria-label={`Slider for ${name}`}
          onClick={() => props.onSlider(feature, props.activation)}
        >
          Slider
        </button>
      </span>
    </>
  );
}
