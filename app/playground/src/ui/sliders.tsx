/** Features whose activations are changed, each with a slider. */

import { called } from "../lib/features";
import { namesOf } from "../lib/names";
import { usePage } from "../state/hooks";
import { CHANGES, type SliderState } from "../state/page";
import { When } from "./conditions";
import { Check, Choice, Slider } from "./parts";
import { Where } from "./where";

const CHANGE_NAMES: Record<(typeof CHANGES)[number], string> = {
  set: "set",
  add: "add",
  scale: "multiply",
  ablate: "ablate",
};

const FACTOR_REACH = 4;

export function FeatureSliders() {
  const { state, change, dictionaries } = usePage();
  const { sliders } = state;
  if (!dictionaries.length && !sliders.length) return null;
  const set = (index: number, part: Partial<SliderState>) =>
    change({ sliders: sliders.map((slider, each) => (each === index ? { ...slider, ...part } : slider)) });
  return (
    <>
      {sliders.map((slider, index) => (
        <FeatureSlider
          key={index}
          slider={slider}
          onChange={(part) => set(index, part)}
          onRemove={() => change({ sliders: sliders.filter((_, each) => each !== index) })}
        />
      ))}
      {!sliders.length && (
        <p class="hint">
          The view{" "}
          <button type="button" class="quiet" onClick={() => change({ view: "features" })}>
            Features
          </button>{" "}
          finds features to steer with.
        </p>
      )}
    </>
  );
}

function FeatureSlider(props: {
  slider: SliderState;
  onChange: (part: Partial<SliderState>) => void;
  onRemove: () => void;
}) {
  const { dictionaries } = usePage();
  const { slider, onChange } = props;
  const name = called({ id: slider.feature, label: slider.label });
  const isFactor = slider.change === "scale";
  const reach = isFactor ? FACTOR_REACH : slider.reach;
  return (
    <fieldset class="steer">
      <legend>Feature: {name}</legend>
      <div class="fields">
        <Choice
          label="Dictionary"
          value={slider.dictionary}
          options={namesOf(dictionaries, slider.dictionary)}
          onChange={(dictionary) => onChange({ dictionary })}
        />
        <Choice
          label="Mode"
          value={slider.change}
          options={CHANGES.map((change) => [change, CHANGE_NAMES[change]] as const)}
          onChange={(change) => onChange({ change, value: change === "scale" ? 2 : slider.reach / 2 })}
        />
      </div>
      {slider.change !== "ablate" && (
        <Slider
          label={isFactor ? "Factor" : "Activation"}
          value={slider.value}
          min={slider.change === "set" ? 0 : -reach}
          max={reach}
          step={reach / 50}
          onChange={(value) => onChange({ value: Number(value.toFixed(4)) })}
        />
      )}
      <Where scope={slider} onChange={onChange} />
      <When scope={slider} onChange={onChange} />
      <div class="runbar">
        <Check label="On" value={slider.on} onChange={(on) => onChange({ on })} />
        <button type="button" class="quiet" aria-label={`Remove ${name}`} onClick={props.onRemove}>
          Remove
        </button>
      </div>
    </fieldset>
  );
}
