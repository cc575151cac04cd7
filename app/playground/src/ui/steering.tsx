/** What steers: vectors, and below them sliders of features. */

import { useRef } from "preact/hooks";

import { MODES, type SteerState } from "../state/page";
import { usePage } from "../state/hooks";
import type { Vector } from "../api/types";
import { named, namesOf } from "../lib/names";
import { layerOfRow, pointsOf, steeringBy } from "../lib/steering";
import { problemOf } from "../lib/where";
import { When } from "./conditions";
import { Check, Choice, Slider, TextField } from "./parts";
import { Presets } from "./presets";
import { FeatureSliders } from "./sliders";
import { Training } from "./training";
import { Where } from "./where";

const MODE_NAMES: Record<(typeof MODES)[number], string> = {
  add: "add",
  norm_match: "add, as a share of the norm",
  project_out: "project out",
  clamp: "clamp the projection",
  replace: "replace",
};

/** How far the slider goes: strengths mean different things in each mode. */
const REACH: Record<(typeof MODES)[number], number> = {
  add: 4,
  norm_match: 1,
  project_out: 2,
  clamp: 40,
  replace: 16,
};

export function SteeringPanel() {
  const { state, change, vectors } = usePage();
  const { steering } = state;
  const latest = useRef(steering);
  latest.current = steering;
  const set = (index: number, part: Partial<SteerState>) =>
    change({ steering: steering.map((steer, each) => (each === index ? { ...steer, ...part } : steer)) });
  const add = (vector: Vector | undefined) => {
    if (vector) change({ steering: [...latest.current, steeringBy(vector)] });
  };
  return (
    <section class="panel" aria-labelledby="steering-title">
      <h2 id="steering-title">Steering</h2>
      {steering.map((steer, index) => (
        <Steer
          key={index}
          number={index + 1}
          steer={steer}
          onChange={(part) => set(index, part)}
          onRemove={() => change({ steering: steering.filter((_, each) => each !== index) })}
        />
      ))}
      {vectors.length ? (
        <button type="button" onClick={() => add(vectors[0])}>
          {steering.length ? "Add another vector" : "Add a vector"}
        </button>
      ) : (
        <p class="hint">This server has no vectors yet. Train one from two lists of prompts:</p>
      )}
      <Training onMade={add} />
      <FeatureSliders />
      <Presets />
    </section>
  );
}

function Steer(props: {
  number: number;
  steer: SteerState;
  onChange: (part: Partial<SteerState>) => void;
  onRemove: () => void;
}) {
  const { vectors, capabilities } = usePage();
  const { number, steer, onChange } = props;
  const options = namesOf(vectors, steer.vector);
  const vector = named(steer.vector, vectors, capabilities.model);
  return (
    <fieldset class="steer">
      <legend>
        Vector {number}
        {steer.vector ? `: ${steer.vector}` : ""}
      </legend>
      <div class="fields">
        <Choice
          label="Vector"
          value={steer.vector}
          options={options}
          onChange={(name) => onChange({ vector: name })}
        />
        <TextField
          label="Layers"
          value={steer.layers}
          hint={`12, 8:20 or *${vector ? `; it has ${describeLayers(vector.layers)}` : ""}`}
          problem={problemOf(() => pointsOf(steer.layers))}
          onChange={(layers) => onChange({ layers })}
        />
      </div>
      <Choice
        label="Mode"
        value={steer.mode}
        options={MODES.map((mode) => [mode, MODE_NAMES[mode]] as const)}
        onChange={(mode) => onChange({ mode })}
      />
      <Slider
        label="Strength"
        value={steer.scale}
        min={-REACH[steer.mode]}
        max={REACH[steer.mode]}
        step={REACH[steer.mode] / 40}
        onChange={(scale) => onChange({ scale: Number(scale.toFixed(4)) })}
      />
      <Where scope={steer} onChange={onChange}>
        <TextField
          label="Row of layer"
          value={steer.row}
          hint="empty: each layer its own"
          problem={problemOf(() => layerOfRow(steer.row))}
          onChange={(row) => onChange({ row })}
        />
      </Where>
      <When scope={steer} onChange={onChange} />
      <div class="runbar">
        <Check label="On" value={steer.on} onChange={(on) => onChange({ on })} />
        <button type="button" class="quiet" aria-label={`Remove vector ${number}`} onClick={props.onRemove}>
          Remove
        </button>
      </div>
    </fieldset>
  );
}

function describeLayers(layers: number[]): string {
  const [first, last] = [layers[0]!, layers.at(-1)!];
  const isWhole = layers.length === last - first + 1;
  return isWhole && layers.length > 1 ? `layers ${first} to ${last}` : `layer ${layers.join(", ")}`;
}
