/** A feature of a dictionary, by its number or its label, with suggestions. */

import { useId, useState } from "preact/hooks";

import { featuresLike } from "../lib/features";
import type { Feature } from "../api/types";
import { named } from "../lib/names";
import { usePage, useRun, useSettled } from "../state/hooks";
import { Failure, TextField } from "./parts";

export function FeatureField(props: {
  dictionary: string;
  value: string;
  onChange: (feature: string) => void;
}) {
  const { dictionaries } = usePage();
  const [found, setFound] = useState<Feature[]>([]);
  const run = useRun();
  const list = useId();
  const dictionary = named(props.dictionary, dictionaries);
  const search = () =>
    run.start(async (signal) => {
      setFound(dictionary ? (await featuresLike(dictionary, props.value, signal)).data : []);
    });
  useSettled(`${dictionary?.id} ${props.value}`, search);
  return (
    <div class="field">
      <TextField
        label="Feature"
        value={props.value}
        hint="its number or its label"
        list={list}
        onChange={props.onChange}
      />
      <datalist id={list}>
        {found.map((feature) => (
          <option key={feature.id} value={String(feature.id)}>
            {feature.label ?? ""}
          </option>
        ))}
      </datalist>
      <Failure run={run} onRetry={search} />
    </div>
  );
}
