/** A condition: tests of detectors' scores and features' activations, joined and negated. */

import type { Dictionary } from "../api/types";
import { boundOf, ownBound, whenInWords } from "../lib/conditions";
import { namesOf } from "../lib/names";
import { usePage } from "../state/hooks";
import {
  ENDS,
  JOINS,
  REDUCTIONS,
  SIDES,
  SPANS,
  TEST,
  type SteerState,
  type TestState,
  type WhenState,
} from "../state/page";
import { problemOf } from "../lib/where";
import { FeatureField } from "./feature_field";
import { Check, Choice, NumberField, TextField } from "./parts";

const MAX_TESTS = 16;

const JOIN_NAMES: Record<(typeof JOINS)[number], string> = {
  all: "all tests",
  any: "any test",
};

const SPAN_NAMES: Record<(typeof SPANS)[number], string> = {
  position: "the token",
  prompt: "the prompt so far",
  window: "the last tokens",
};

const END_NAMES: Record<(typeof ENDS)[number], string> = {
  clears: "the test fails",
  end: "the end of the text",
};

const REDUCTION_NAMES: Record<(typeof REDUCTIONS)[number], string> = {
  max: "most extreme",
  mean: "mean",
};

export function When(props: {
  scope: Pick<SteerState, "when">;
  /** Whether there is nothing without a condition. */
  isNeeded?: boolean;
  onChange: (part: { when: WhenState }) => void;
}) {
  const { detectors, dictionaries } = usePage();
  const { when } = props.scope;
  const canTest = detectors.length > 0 || dictionaries.length > 0;
  if (!canTest && !when.tests.length) return null;
  const set = (part: Partial<WhenState>) => props.onChange({ when: { ...when, ...part } });
  const change = (index: number, part: Partial<TestState>) =>
    set({ tests: when.tests.map((test, each) => (each === index ? { ...test, ...part } : test)) });
  const add = () => {
    const score = detectors.length ? "detector" : "feature";
    const test = { ...TEST, score, detector: detectors[0]?.name ?? "" } as const;
    set({ tests: [...when.tests, { ...test, dictionary: dictionaries[0]?.name ?? "" }] });
  };
  const nothing = props.isNeeded ? ": no test yet" : ": always";
  return (
    <details class="when" open={props.isNeeded}>
      <summary>When{when.tests.length ? ` ${whenInWords(when, detectors)}` : nothing}</summary>
      {when.tests.length > 1 && (
        <Choice
          label="Join"
          value={when.join}
          options={JOINS.map((join) => [join, JOIN_NAMES[join]] as const)}
          onChange={(join) => set({ join })}
        />
      )}
      {when.tests.map((test, index) => (
        <Test
          key={index}
          number={index + 1}
          test={test}
          onChange={(part) => change(index, part)}
          onRemove={() => set({ tests: when.tests.filter((_, each) => each !== index) })}
        />
      ))}
      {when.tests.length < MAX_TESTS && (
        <button type="button" onClick={add}>
          {when.tests.length ? "Add another test" : "Add a test"}
        </button>
      )}
      {when.tests.length > 0 && (
        <p class="hint">
          A test at a later point than the operation decides for the next token. Set Where to the answer then.
        </p>
      )}
    </details>
  );
}

function Test(props: {
  number: number;
  test: TestState;
  onChange: (part: Partial<TestState>) => void;
  onRemove: () => void;
}) {
  const { detectors, dictionaries } = usePage();
  const { number, test, onChange } = props;
  const own = ownBound(test, detectors);
  return (
    <fieldset class="test">
      <legend>Test {number}</legend>
      {detectors.length > 0 && dictionaries.length > 0 && (
        <Choice
          label="Score"
          value={test.score}
          options={[
            ["detector", "a detector's score"],
            ["feature", "a feature's activation"],
          ]}
          onChange={(score) => onChange({ score, bound: "" })}
        />
      )}
      <div class="fields">
        {test.score === "detector" ? (
          <Choice
            label="Detector"
            value={test.detector}
            options={namesOf(detectors, test.detector)}
            onChange={(detector) => onChange({ detector })}
          />
        ) : (
          <TestedFeature test={test} dictionaries={dictionaries} onChange={onChange} />
        )}
        <Choice
          label="Side"
          value={test.side}
          options={SIDES.map((side) => [side, side] as const)}
          onChange={(side) => onChange({ side })}
        />
        <TextField
          label="Threshold"
          value={test.bound}
          placeholder={own === undefined ? "a number" : String(own)}
          hint={own === undefined ? "This detector has no threshold." : undefined}
          problem={problemOf(() => boundOf(test, detectors))}
          onChange={(bound) => onChange({ bound })}
        />
        <Choice
          label="Over"
          value={test.over}
          options={SPANS.map((over) => [over, SPAN_NAMES[over]] as const)}
          onChange={(over) => onChange({ over })}
        />
        {test.over === "window" && (
          <NumberField
            label="Window"
            value={test.of}
            min={1}
            max={64}
            step={1}
            onChange={(of) => onChange({ of })}
          />
        )}
        {test.over !== "position" && (
          <Choice
            label="Reduce"
            value={test.reduce}
            options={REDUCTIONS.map((reduce) => [reduce, REDUCTION_NAMES[reduce]] as const)}
            onChange={(reduce) => onChange({ reduce })}
          />
        )}
        <Choice
          label="Until"
          value={test.until}
          options={ENDS.map((until) => [until, END_NAMES[until]] as const)}
          onChange={(until) => onChange({ until })}
        />
        {test.until === "clears" && (
          <NumberField
            label="Hysteresis"
            value={test.hysteresis}
            min={0}
            onChange={(hysteresis) => onChange({ hysteresis })}
          />
        )}
      </div>
      <div class="runbar">
        <Check label="Negated" value={test.isNegated} onChange={(isNegated) => onChange({ isNegated })} />
        <button type="button" class="quiet" aria-label={`Remove test ${number}`} onClick={props.onRemove}>
          Remove
        </button>
      </div>
    </fieldset>
  );
}

function TestedFeature(props: {
  test: TestState;
  dictionaries: Dictionary[];
  onChange: (part: Partial<TestState>) => void;
}) {
  const { test, dictionaries, onChange } = props;
  return (
    <>
      <Choice
        label="Dictionary"
        value={test.dictionary}
        options={namesOf(dictionaries, test.dictionary)}
        onChange={(dictionary) => onChange({ dictionary, feature: "" })}
      />
      <FeatureField
        dictionary={test.dictionary}
        value={test.feature}
        onChange={(feature) => onChange({ feature })}
      />
    </>
  );
}
