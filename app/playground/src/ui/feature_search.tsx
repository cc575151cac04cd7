/** A dictionary's features, found by words of their labels or by number. */

import { useState } from "preact/hooks";

import type { Dictionary, Feature } from "../api/types";
import { called, featuresLike } from "../lib/features";
import { plural } from "../lib/text";
import { useRun, useSettled } from "../state/hooks";
import { Failure, TextField } from "./parts";

interface FeatureActions {
  /** The number of the feature that colours the text. */
  chosen: number;
  onChoose: (feature: Feature) => void;
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
  useSettled(`${dictionary.id} ${text}`, search);
  return (
    <section class="measure" aria-label="Search">
      <TextField
        label="Find features"
        value={text}
        hint={`words of a label, or a number below ${dictionary.num_features}; ${plural(dictionary.num_labels, "feature")} with a label`}
        onChange={setText}
      />
      <Failure run={run} onRetry={search} />
      <p class="status" role="status">
        {found && text ? `${plural(found.length, "feature")}${hasMore ? ", and more" : ""}` : ""}
      </p>
      {found && text && found.length > 0 && (
        <ul class="found">
          {found.map((feature) => (
            <li key={feature.id}>
              <FeatureName feature={feature} {...props} />
            </li>
          ))}
        </ul>
      )}
    </section>
  );
}

/** A feature's name, which colours the text by it and shows what it is about. */
export function FeatureName(props: FeatureActions & { feature: Feature }) {
  const { feature } = props;
  return (
    <button
      type="button"
      class="name"
      aria-pressed={props.chosen === feature.id}
      onClick={() => props.onChoose(feature)}
    >
      {called(feature)}
    </button>
  );
}
