/** The vectors that steer: which, where, how strongly. */

import { useRef } from "preact/hooks";

import { MODES, PHASES, STEER, WHERE, type SteerState, type WhereState } from "../state/page";
import { usePage } from "../state/hooks";
import type { Vector } from "../api/types";
import { vectorNamed } from "../lib/vectors";
import { Check, Choice, Slider, TextField } from "./parts";
import { Presets } from "./presets";
import { Training } from "./training";

const MODE_NAMES: Record<(typeof MODES)[number], string> = {
  add: "add it",
  norm_match: "add it, as a share of the value's norm",
  project_out: "take its direction out",
  clamp: "set the part along it",
  replace: "replace the value",
};

/** How far the slider goes: strengths mean different things in each mode. */
const REACH: Record<(typeof MODES)[number], number> = {
  add: 16,
  norm_match: 1,
  project_out: 2,
  clamp: 40,
  replace: 16,
};

const PHASE_NAMES: Record<(typeof PHASES)[number], string> = {
  all: "prompt and answer",
  prompt: "the prompt",
  generated: "the answer",
};

export function SteeringPanel() {
  const { state, change, vectors } = usePage();
  const { steering } = state;
  const latest = useRef(steering);
  latest.current = steering;
  const set = (index: number, part: Partial<SteerState>) =>
    change({ steering: steering.map((steer, each) => (each === index ? { ...steer, ...part } : steer)) });
  const add = (vector: Vector | undefined) => {
    if (!vector) return;
    const layer = vector.training?.best_layer ?? vector.layers[Math.floor(vector.layers.length / 2)]!;
    change({ steering: [...latest.current, { ...STEER, vector: vector.name, layers: String(layer) }] });
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
        <p class="hint">The server keeps no vectors yet. Make one from two lists of prompts:</p>
      )}
      <Training onMade={add} />
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
  const vector = vectorNamed(steer.vector, vectors, capabilities.model);
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
          hint={vector ? `It has ${describeLayers(vector.layers)}; 12, 8:20 or *.` : "12, 8:20 or *"}
          onChange={(layers) => onChange({ layers })}
        />
      </div>
      <Choice
        label="What is done"
        value={steer.mode}
        options={MODES.map((mode) => [mode, MODE_NAMES[mode]] as const)}
        onChange={(mode) => onChange({ mode })}
      />
      <Slider
        label="Strength"
        value={steer.scale}
        min={-REACH[steer.mode]}
        max={REACH[steer.mode]}
        step={REACH[steer.mode] / 50}
        onChange={(scale) => onChange({ scale: Number(scale.toFixed(4)) })}
      />
      <Where
        where={steer.where}
        row={steer.row}
        onChange={(where) => onChange({ where })}
        onRow={(row) => onChange({ row })}
      />
      <div class="runbar">
        <Check label="On" value={steer.on} onChange={(on) => onChange({ on })} />
        <button type="button" class="quiet" aria-label={`Remove vector ${number}`} onClick={props.onRemove}>
          Remove
        </button>
      </div>
    </fieldset>
  );
}

function Where(props: {
  where: WhereState;
  row: string;
  onChange: (where: WhereState) => void;
  onRow: (row: string) => void;
}) {
  const { where, onChange } = props;
  const set = (part: Partial<WhereState>) => onChange({ ...where, ...part });
  const isNarrowed = JSON.stringify(where) !== JSON.stringify(WHERE);
  return (
    <details class="where">
      <summary>Where{isNarrowed ? ` (${summary(where)})` : ": at every position"}</summary>
      <Choice
        label="Part"
        value={where.phase}
        options={PHASES.map((phase) => [phase, PHASE_NAMES[phase]] as const)}
        onChange={(phase) => set({ phase })}
      />
      <div class="fields">
        <TextField
          label="Positions"
          value={where.positions}
          hint="0, 3, -1: negatives from the prompt's end"
          onChange={(positions) => set({ positions })}
        />
        <TextField
          label="Range"
          value={where.range}
          hint="3:9 or -4:, without its end"
          onChange={(range) => set({ range })}
        />
        <TextField
          label="Tokens"
          value={where.tokens}
          hint="as shown, ·Paris, or with blanks; commas between; ids as #7042"
          onChange={(tokens) => set({ tokens })}
        />
        <TextField
          label="But not positions"
          value={where.exceptPositions}
          hint="such as 0, the first"
          onChange={(exceptPositions) => set({ exceptPositions })}
        />
        <TextField
          label="But not tokens"
          value={where.exceptTokens}
          onChange={(exceptTokens) => set({ exceptTokens })}
        />
        <TextField
          label="Row of layer"
          value={props.row}
          hint="one layer's row everywhere; empty: each its own"
          onChange={props.onRow}
        />
      </div>
    </details>
  );
}

function summary(where: WhereState): string {
  const said = [
    where.phase === "all" ? "" : PHASE_NAMES[where.phase],
    where.positions && `positions ${where.positions}`,
    where.range && `range ${where.range}`,
    where.tokens && `tokens ${where.tokens}`,
    where.exceptPositions && `not ${where.exceptPositions}`,
    where.exceptTokens && `not ${where.exceptTokens}`,
  ];
  return said.filter(Boolean).join("; ");
}

/** Returns what vectors may be called: the newest of each name, then certain versions. */
export function namesOf(vectors: Vector[], current: string): (readonly [string, string])[] {
  const names = [...new Set(vectors.map((vector) => vector.name))];
  const newest = names.map((name) => [name, name] as const);
  const versions = vectors
    .filter(
      (vector) => vector.version > 1 || vectors.some((one) => one.name === vector.name && one.version > 1),
    )
    .map(
      (vector) => [`${vector.name}@${vector.version}`, `${vector.name}, version ${vector.version}`] as const,
    );
  const options = [...newest, ...versions];
  const isThere = options.some(([name]) => name === current);
  return isThere
    ? options
    : [[current, current ? `${current} (not here)` : "choose one"] as const, ...options];
}

function describeLayers(layers: number[]): string {
  const [first, last] = [layers[0]!, layers.at(-1)!];
  const isWhole = layers.length === last - first + 1;
  return isWhole && layers.length > 1 ? `layers ${first} to ${last}` : `layer ${layers.join(", ")}`;
}
