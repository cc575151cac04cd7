/** Asks the server that the page came from. The key is in this module's memory, and nowhere else. */

import { createParser } from "eventsource-parser";

import type { Answer, ApiRequest, Json, ListPage, Token } from "./types";

/** Pages of a list that are asked for, of 100 each. */
const MAX_PAGES = 10;

let key = "";

export function setKey(text: string): void {
  key = text.trim();
}

export function hasKey(): boolean {
  return key !== "";
}

/** An answer that is an error, in the server's words or in ours. */
export class ApiFailure extends Error {
  constructor(
    message: string,
    readonly code: string,
    readonly status: number,
  ) {
    super(message);
  }

  /** Whether the same request can succeed later: the server is away, loading or full. */
  get isPassing(): boolean {
    return [0, 429, 502, 503, 504].includes(this.status);
  }
}

/** The server's address, wherever it is mounted: the page is at `playground`, right below it. */
export const SERVER = new URL(".", location.href).href.replace(/\/$/, "");

export function isCancelled(error: unknown): boolean {
  return error instanceof DOMException && error.name === "AbortError";
}

/** Returns an error as a sentence for a person. */
export function sentence(error: unknown): string {
  if (error instanceof ApiFailure || error instanceof Error) return error.message;
  return String(error);
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await (await send("GET", path, undefined, signal)).json()) as T;
}

export async function post<T>({ path, body }: ApiRequest, signal?: AbortSignal): Promise<T> {
  return (await (await send("POST", path, body, signal)).json()) as T;
}

export async function bytes(path: string, signal?: AbortSignal): Promise<ArrayBuffer> {
  return (await send("GET", path, undefined, signal)).arrayBuffer();
}

/** Returns the items of a list with pages. */
export async function listed<T>(path: string): Promise<T[]> {
  const found: T[] = [];
  let after = "";
  for (let number = 0; number < MAX_PAGES; number += 1) {
    const page = await get<ListPage<T>>(`${path}?limit=100${after}`);
    found.push(...page.data);
    if (!page.has_more || !page.last_id) break;
    after = `&after=${encodeURIComponent(page.last_id)}`;
  }
  return found;
}

export async function tokenize(prompt: Json, signal?: AbortSignal): Promise<Token[]> {
  const body = typeof prompt === "string" ? { prompt } : { messages: prompt };
  return (await post<{ tokens: Token[] }>({ path: "/v1/tokenize", body }, signal)).tokens;
}

/** The texts of tokens that were asked for, by id: a server has one model for as long as it runs. */
const known = new Map<number, string>();

/** Returns each token's own text, as those of a prompt have it. */
export async function textsOf(ids: number[], signal?: AbortSignal): Promise<string[]> {
  const unknown = [...new Set(ids)].filter((id) => !known.has(id));
  if (unknown.length) {
    const request = { path: "/v1/tokenize", body: { prompt: unknown } };
    const { tokens } = await post<{ tokens: Token[] }>(request, signal);
    for (const token of tokens) known.set(token.id, token.text);
  }
  return ids.map((id) => known.get(id)!);
}

/** Yields the events of a streamed answer; an error among them is thrown. */
export async function* stream<T = Answer>(
  { path, body }: ApiRequest,
  signal?: AbortSignal,
): AsyncGenerator<T> {
  const response = await send("POST", path, { ...body, stream: true }, signal);
  const waiting: string[] = [];
  const parser = createParser({ onEvent: (event) => waiting.push(event.data) });
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (value !== undefined) parser.feed(value);
      for (const data of waiting.splice(0)) {
        if (data === "[DONE]") return;
        const event = JSON.parse(data) as Awaited<T> & { error?: ErrorBody };
        if (event.error) throw failure(event.error, response.status);
        signal?.throwIfAborted();
        yield event;
      }
      if (done) throw new ApiFailure("The answer broke off before its end; send it again.", "broken_off", 0);
    }
  } finally {
    void reader.cancel().catch(() => undefined);
  }
}

interface ErrorBody {
  message?: string;
  code?: string | number | null;
  param?: string | null;
}

async function send(method: string, path: string, body?: Json, signal?: AbortSignal): Promise<Response> {
  if (!/^[\x20-\x7e]*$/.test(key)) {
    throw new ApiFailure(
      "The API key has a character that keys do not have; copy it again.",
      "invalid_api_key",
      401,
    );
  }
  const headers: Record<string, string> = {};
  if (key) headers["Authorization"] = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response: Response;
  try {
    const content = body === undefined ? undefined : JSON.stringify(body);
    response = await fetch(SERVER + path, { method, headers, body: content, signal, credentials: "omit" });
  } catch (error) {
    if (isCancelled(error)) throw error;
    throw new ApiFailure("The server cannot be reached. Is it still running?", "unreachable", 0);
  }
  if (response.ok) return response;
  throw failure(await errorBody(response), response.status);
}

async function errorBody(response: Response): Promise<ErrorBody> {
  try {
    return ((await response.json()) as { error?: ErrorBody }).error ?? {};
  } catch {
    return {};
  }
}

function failure(error: ErrorBody, status: number): ApiFailure {
  const said = error.message ?? `The server answered ${status}, without saying why.`;
  return new ApiFailure(/[.!?]$/.test(said) ? said : `${said}.`, String(error.code ?? status), status);
}
