/** What the page shows: all of it can be in a link, and no secret is in it. */

export const VIEWS = [
  "generate",
  "sweep",
  "lens",
  "activations",
  "features",
  "attention",
  "patching",
] as const;
export type View = (typeof VIEWS)[number];

export const TITLES: Record<View, string> = {
  generate: "Compare",
  sweep: "Strengths",
  lens: "Logit lens",
  activations: "Activations",
  features: "Features",
  attention: "Attention",
  patching: "Patching",
};

export const MODES = ["add", "norm_match", "project_out", "clamp", "replace"] as const;
export const PHASES = ["all", "prompt", "generated"] as const;
export const ROLES = ["system", "user", "assistant"] as const;
export const LEAVES = ["output", "attn.output", "mlp.output"] as const;

export const JOINS = ["all", "any"] as const;
export const SCORES = ["detector", "feature"] as const;
export const SIDES = ["above", "below"] as const;
export const SPANS = ["position", "prompt", "window"] as const;
export const REDUCTIONS = ["max", "mean"] as const;
export const ENDS = ["clears", "end"] as const;
export const MARKS = ["flag", "stop"] as const;
export const CHANGES = ["set", "add", "scale", "ablate"] as const;
export const MEASURES = ["projection", "target", "perplexity"] as const;

export interface WhereState {
  phase: (typeof PHASES)[number];
  positions: string;
  range: string;
  tokens: string;
  exceptPositions: string;
  exceptTokens: string;
}

/** A test of a condition: of a detector's score, or of a feature's activation. */
export interface TestState {
  score: (typeof SCORES)[number];
  detector: string;
  dictionary: string;
  /** A number, or a label. */
  feature: string;
  isNegated: boolean;
  side: (typeof SIDES)[number];
  /** A number, or nothing: the detector's threshold, or of a feature 0. */
  bound: string;
  over: (typeof SPANS)[number];
  of: number;
  reduce: (typeof REDUCTIONS)[number];
  until: (typeof ENDS)[number];
  hysteresis: number;
}

/** A condition; without tests there is none. */
export interface WhenState {
  join: (typeof JOINS)[number];
  tests: TestState[];
}

export interface SteerState {
  on: boolean;
  vector: string;
  layers: string;
  row: string;
  mode: (typeof MODES)[number];
  scale: number;
  where: WhereState;
  when: WhenState;
}

/** A feature whose activation is changed. */
export interface SliderState {
  on: boolean;
  dictionary: string;
  feature: number;
  label: string;
  change: (typeof CHANGES)[number];
  value: number;
  /** How far the slider goes. */
  reach: number;
  where: WhereState;
  when: WhenState;
}

/** A stop or a flag. */
export interface MarkState {
  on: boolean;
  op: (typeof MARKS)[number];
  name: string;
  where: WhereState;
  when: WhenState;
}

export interface Message {
  role: (typeof ROLES)[number];
  content: string;
}

export interface PageState {
  view: View;
  kind: "plain" | "chat";
  prompt: string;
  messages: Message[];
  sampling: { maxTokens: number; temperature: number; topP: number; seed: number };
  steering: SteerState[];
  sliders: SliderState[];
  marks: MarkState[];
  /** Detectors whose scores are shown, by name. */
  watched: string[];
  preset: string;
  sweep: {
    which: number;
    from: number;
    to: number;
    steps: number;
    measure: (typeof MEASURES)[number];
    target: string;
  };
  lens: { every: number; topK: number; steered: boolean };
  activations: { layer: number; vector: string; steered: boolean };
  /** The feature that colours the text is -1 where none is chosen. */
  features: { dictionary: string; feature: number; label: string; topK: number; steered: boolean };
  attention: { layer: number; head: number };
  patching: {
    clean: string;
    corrupted: string;
    answer: string;
    contrast: string;
    leaf: (typeof LEAVES)[number];
  };
}

export const WHERE: WhereState = {
  phase: "all",
  positions: "",
  range: "",
  tokens: "",
  exceptPositions: "",
  exceptTokens: "",
};

export const TEST: TestState = {
  score: "detector",
  detector: "",
  dictionary: "",
  feature: "",
  isNegated: false,
  side: "above",
  bound: "",
  over: "position",
  of: 8,
  reduce: "max",
  until: "clears",
  hysteresis: 0,
};

export const WHEN: WhenState = { join: "all", tests: [] };

export const STEER: SteerState = {
  on: true,
  vector: "",
  layers: "",
  row: "",
  mode: "norm_match",
  scale: 0.2,
  where: WHERE,
  when: WHEN,
};

export const SLIDER: SliderState = {
  on: true,
  dictionary: "",
  feature: 0,
  label: "",
  change: "set",
  value: 8,
  reach: 20,
  where: WHERE,
  when: WHEN,
};

/** The steering of a first visit, if the server has the vector. */
export const DEMO: SteerState = { ...STEER, vector: "example-joy", layers: "12", mode: "add", scale: 1 };

export const MARK: MarkState = { on: true, op: "flag", name: "", where: WHERE, when: WHEN };

export const START: PageState = {
  view: "generate",
  kind: "plain",
  prompt: "I think dogs are",
  messages: [{ role: "user", content: "What do you think of Mondays?" }],
  sampling: { maxTokens: 16, temperature: 0, topP: 1, seed: 0 },
  steering: [],
  sliders: [],
  marks: [],
  watched: [],
  preset: "",
  sweep: { which: 0, from: 0, to: 1, steps: 5, measure: "projection", target: " wonderful" },
  lens: { every: 1, topK: 5, steered: false },
  activations: { layer: -1, vector: "", steered: false },
  features: { dictionary: "", feature: -1, label: "", topK: 10, steered: false },
  attention: { layer: 0, head: 0 },
  patching: {
    clean: "The Eiffel Tower is in the city of",
    corrupted: "The Colosseum is in the city of",
    answer: " Paris",
    contrast: " Rome",
    leaf: "output",
  },
};
