/** The requests that the views have in common. */

import { textsOf } from "../api/client";
import type { Answer, ApiRequest, Capabilities, JsonObject, Operation } from "../api/types";
import type { PageState } from "../state/page";

/** Returns the request of the prompt or the conversation, with operations. */
export function generation(
  state: PageState,
  capabilities: Capabilities,
  operations: Operation[],
  maxTokens = state.sampling.maxTokens,
): ApiRequest {
  const { temperature, topP, seed } = state.sampling;
  const sampling: JsonObject = { max_tokens: maxTokens, temperature, seed };
  if (topP !== 1) sampling["top_p"] = topP;
  const interventions = operations.length ? { interventions: operations } : {};
  const common = { ...sampling, ...interventions };
  if (state.kind === "plain") {
    return { path: "/v1/completions", body: { model: capabilities.model, prompt: state.prompt, ...common } };
  }
  const messages = state.messages.map(({ role, content }) => ({ role, content }));
  return { path: "/v1/chat/completions", body: { model: capabilities.model, messages, ...common } };
}

/** Returns the request with a preset, if there is one; its operations come first. */
export function withPreset(request: ApiRequest, preset: string): ApiRequest {
  return preset ? { path: request.path, body: { ...request.body, preset } } : request;
}

/** Returns what the tokenizer is asked for the same prompt or conversation. */
export function source(state: PageState): string | JsonObject[] {
  return state.kind === "plain"
    ? state.prompt
    : state.messages.map(({ role, content }) => ({ role, content }));
}

/** Returns the request with the ids of what is generated beside the text, which says only whole characters. */
export function withTokens(request: ApiRequest): ApiRequest {
  return { path: request.path, body: { ...request.body, return_token_ids: true } };
}

/** Returns the text that a piece of an answer has. */
export function textOf(answer: Answer, index = 0): string {
  const choice = answer.choices.find((each) => each.index === index);
  return choice?.text ?? choice?.delta?.content ?? choice?.message?.content ?? "";
}

/** Returns the texts of the tokens that a piece of an answer has, if their ids were asked for. */
export function tokensIn(answer: Answer, signal?: AbortSignal): Promise<string[]> {
  return textsOf(answer.choices[0]?.token_ids ?? [], signal);
}
