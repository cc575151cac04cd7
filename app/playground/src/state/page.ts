/** What the page shows: all of it can be in a link, and no secret is in it. */

export const VIEWS = ["generate", "sweep", "lens", "activations", "attention", "patching"] as const;
export type View = (typeof VIEWS)[number];

export const TITLES: Record<View, string> = {
  generate: "Compare",
  sweep: "Strengths",
  lens: "Logit lens",
  activations: "Activations",
  attention: "Attention",
  patching: "Patching",
};

export const MODES = ["add", "norm_match", "project_out", "clamp", "replace"] as const;
export const PHASES = ["all", "prompt", "generated"] as const;
export const ROLES = ["system", "user", "assistant"] as const;
export const LEAVES = ["output", "attn.output", "mlp.output"] as const;

export interface WhereState {
  phase: (typeof PHASES)[number];
  positions: string;
  range: string;
  tokens: string;
  exceptPositions: string;
  exceptTokens: string;
}

export interface SteerState {
  on: boolean;
  vector: string;
  layers: string;
  row: string;
  mode: (typeof MODES)[number];
  scale: number;
  where: WhereState;
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
  preset: string;
  sweep: { which: number; from: number; to: number; steps: number };
  lens: { every: number; topK: number; steered: boolean };
  activations: { layer: number; vector: string; steered: boolean };
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

export const STEER: SteerState = {
  on: true,
  vector: "",
  layers: "",
  row: "",
  mode: "norm_match",
  scale: 0.2,
  where: WHERE,
};

export const START: PageState = {
  view: "generate",
  kind: "plain",
  prompt: "I think this movie is",
  messages: [{ role: "user", content: "What do you think of Mondays?" }],
  sampling: { maxTokens: 32, temperature: 0, topP: 1, seed: 0 },
  steering: [],
  preset: "",
  sweep: { which: 0, from: -0.4, to: 0.4, steps: 5 },
  lens: { every: 1, topK: 5, steered: false },
  activations: { layer: -1, vector: "", steered: false },
  attention: { layer: 0, head: 0 },
  patching: {
    clean: "The Eiffel Tower is in the city of",
    corrupted: "The Colosseum is in the city of",
    answer: " Paris",
    contrast: " Rome",
    leaf: "output",
  },
};
