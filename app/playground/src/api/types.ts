/** What the server says and is told: the parts of its API that the page uses. */

export interface Capabilities {
  model: string;
  architecture: string;
  dtype: string;
  points: { name: string; shape: number[]; width: number; tier: string; operations: string[] }[];
  limits: { max_operations: number; max_body_bytes: number | null };
  sizes: { num_layers: number; hidden_size: number; vocab_size: number; max_model_len: number };
}

export interface LayerScore {
  layer: number;
  auroc: number;
  accuracy: number;
  separation: number;
  bias: number;
  norm: number;
}

/** What is stored under a name with versions. */
export interface Stored {
  id: string;
  name: string;
  version: number;
  model: string;
  shared: boolean;
  /** Whether it is of the tenant who asks. */
  own: boolean;
}

export interface Vector extends Stored {
  at: string;
  layers: number[];
  width: number;
  format: string;
  training?: { method: string; best_layer: number; num_held_out: number; layers: LayerScore[] } | null;
}

export interface Detector extends Stored {
  threshold: number | null;
}

export interface Dictionary extends Stored {
  at: string;
  output_at: string | null;
  architecture: string;
  num_features: number;
  num_labels: number;
  sha256: string;
  warnings: string[];
}

export interface Feature {
  id: number;
  label: string | null;
}

export interface ListPage<T> {
  data: T[];
  last_id: string | null;
  has_more: boolean;
}

export interface Models {
  data: { id: string; parent?: string | null }[];
}

export interface Preset {
  name: string;
  version: number;
}

export interface TrainingEvent {
  type?: "progress" | "vector";
  stage?: "capture" | "fit";
  done?: number;
  total?: number;
  vector?: Vector;
}

export interface Token {
  id: number;
  text: string;
}

export interface TensorObject {
  dtype: string;
  shape: number[];
  data: string;
  encoding: "base64";
}

export interface TensorLink {
  url: string;
  format: "safetensors";
  key: string;
  dtype: string;
  shape: number[];
}

export type TensorReference = TensorObject | TensorLink;

export interface LensToken {
  token: string;
  id: number;
  logprob: number | null;
  rank?: number;
}

export interface LensRow {
  top: LensToken[];
  targets: LensToken[];
}

export interface LensResult {
  type: "logit_lens";
  positions: number[];
  layers: Record<string, LensRow[]>;
}

export interface CaptureResult {
  type: "capture";
  positions: number[];
  points: Record<string, TensorReference>;
}

export interface ProbeResult {
  type: "probe";
  positions: number[];
  points: Record<string, (number | null)[]>;
}

export interface DetectResult {
  type: "detect";
  positions: number[];
  scores: (number | null)[];
}

/** The positions where a condition held. */
export interface MarkResult {
  type: "stop" | "flag";
  positions: number[];
}

export interface ActiveFeature extends Feature {
  /** Nothing where it is not finite. */
  activation: number | null;
}

export interface FeaturesResult {
  type: "features";
  positions: number[];
  features: ActiveFeature[][];
}

export type Result = LensResult | CaptureResult | ProbeResult | DetectResult | MarkResult | FeaturesResult;

export interface ChoiceInterventions {
  results: Record<string, Result>;
  /** One for each operation; those with a condition say of which position each of its tests decides. */
  applied?: { op: string; at: string[]; positions: number[]; decides?: string[] }[];
  provenance?: {
    fingerprint: string;
    cached_tokens: number;
    recomputed_tokens: number;
    drafted_rows: number;
    refused_rows: number;
    tier: string;
  };
}

export interface Choice {
  index: number;
  text?: string;
  delta?: { content?: string | null };
  message?: { content?: string | null };
  finish_reason?: string | null;
  stop_reason?: number | string | { intervention: string } | null;
  token_ids?: number[] | null;
  /** By position, then by token; the first has none. */
  prompt_logprobs?: (Record<string, { logprob: number }> | null)[] | null;
  interventions?: ChoiceInterventions;
}

export interface Answer {
  choices: Choice[];
  usage?: { prompt_tokens: number; completion_tokens: number };
}

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json | undefined };
export type JsonObject = { [name: string]: Json | undefined };

/** One request: where it goes, and its body. */
export interface ApiRequest {
  path: string;
  body: JsonObject;
}

/** One operation of the field `interventions`. */
export type Operation = JsonObject & { op: string };
